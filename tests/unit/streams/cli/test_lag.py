from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.cli.lag import _follow, _learner_positions, _print
from streams.contracts import OffsetRange, VersionStatus
from streams.errors import BrokerError
from streams.lag.burrow import State
from streams.lag.groups import PartitionLag
from streams.lag.watch import LagStatus, Watch
from streams.registry import RETRAIN, Registry
from streams.settings import Settings
from streams.topics import SCORED
from tests.unit.streams.registry.builders import version


def test_a_retrained_version_is_not_where_the_learner_is(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)

    def read_up_to(end: int) -> tuple[OffsetRange, ...]:
        return (OffsetRange(topic=SCORED, partition=0, start=0, end=end),)

    with Registry.open(settings.effective_registry_url) as registry:
        registry.record(version(1, source_offsets=read_up_to(90)))
        registry.record(
            version(
                2,
                source_offsets=read_up_to(40),
                status=VersionStatus.CANDIDATE,
                attributes={RETRAIN: "november"},
            )
        )
    (positions,) = _learner_positions(settings).values()
    assert positions == {(SCORED, 0): 90}


def status(
    partition: int, state: State, reason: str, topic: str = "dialogue.feedback"
) -> LagStatus:
    found = PartitionLag("align", topic, partition, 123_456, 987_654, 864_198, "feedback_align")
    return LagStatus(found, state, reason, 1_234.5, 2.0, 7_201.0, 59.94)


def test_what_is_shown_fits_80_columns_and_says_each_reason_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _print(
        [
            status(0, State.OK, "everything is read", "trajectory.segments"),
            status(1, State.STOP, "nobody runs it"),
            status(2, State.STOP, "nobody runs it"),
            status(0, State.UNKNOWN, "not judged"),
        ]
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines[:5])) <= 80
    assert lines[1].split() == [
        "align", "trajectory.segments/0", "123456", "987654", "864198", "1234", "2", "h",
        "59.9", "s", "OK",
    ]  # fmt: skip
    assert lines[6:] == [
        "STOP   align dialogue.feedback/1,2: nobody runs it",
        "OK     align trajectory.segments/0: everything is read",
        "-      align dialogue.feedback/0: not judged",
    ]


def test_a_row_is_never_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    _print([status(3, State.OK, "everything is read " * 9)])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "dialogue.feedback/3" in shown
    assert "everything is read " * 8 in shown


@pytest.mark.parametrize("as_json", [True, False])
def test_a_watch_outlives_kafka(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Iterator[Any] = iter(
        [
            [PartitionLag("align", "t", 0, 1, 1, 0)],
            BrokerError("gone"),
            [PartitionLag("align", "t", 0, 7, 7, 0)],
            KeyboardInterrupt(),
        ]
    )

    def look() -> list[PartitionLag]:
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return list(found)

    monkeypatch.setattr("streams.cli.lag.time.sleep", lambda seconds: None)
    _follow(Watch(look, lambda: {"align": 1}), 0.1, as_json)
    shown = capsys.readouterr()
    assert "Kafka does not answer: gone" in (shown.err if as_json else shown.out)
    if as_json:
        assert [line.count('"current": ') for line in shown.out.splitlines()] == [1, 1]
        assert '"current": 7' in shown.out


def test_a_watch_of_a_kafka_that_never_answered_ends() -> None:
    def look() -> list[PartitionLag]:
        raise BrokerError("never there")

    with pytest.raises(BrokerError, match="never there"):
        _follow(Watch(look, dict), 0.1, as_json=True)
