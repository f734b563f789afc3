from __future__ import annotations

from dataclasses import dataclass

import pytest

from processors.runtime.topics import CHANGELOG_BYTES, check
from streams.errors import TopicError
from streams.topics import TopicDescription

ARRIVALS = {"message.timestamp.type": "LogAppendTime"}
COMPACT = {"cleanup.policy": "compact"}


@dataclass(frozen=True)
class Needs:
    inputs: tuple[str, ...] = ("a", "b")
    outputs: tuple[str, ...] = ("out",)
    changelog: str = "state"
    ticks: bool = True
    read_back_ms: int = 0


def described(**changes: TopicDescription | None) -> dict[str, TopicDescription]:
    found: dict[str, TopicDescription | None] = {
        "a": topic(4, ARRIVALS),
        "b": topic(4, ARRIVALS),
        "out": topic(7, {}),
        "state": topic(4, COMPACT),
        **changes,
    }
    return {name: value for name, value in found.items() if value is not None}


def topic(partitions: int, config: dict[str, str]) -> TopicDescription:
    room = {"max.message.bytes": "2000000"}
    return TopicDescription(partitions=partitions, replication=1, config=room | config)


def test_good_topics_pass_and_tell_what_they_are_like() -> None:
    out = topic(7, {"max.message.bytes": "5000"})
    cluster = check(Needs(), described(out=out))
    assert cluster.partitions == 4
    assert cluster.room(1_000_000, "a", "b") == 1_000_000
    assert cluster.room(8_000_000, "a", "b") == 2_000_000
    assert cluster.room(8_000_000, "a", "out") == 5_000


def test_a_changelog_that_cannot_take_a_part_of_an_entry_is_refused() -> None:
    small = topic(4, COMPACT | {"max.message.bytes": str(CHANGELOG_BYTES - 1)})
    with pytest.raises(TopicError, match=r"state must have max\.message\.bytes of at least"):
        check(Needs(), described(state=small))


def test_a_missing_topic_is_named() -> None:
    with pytest.raises(TopicError, match="missing topics: b, out"):
        check(Needs(), described(b=None, out=None))


@pytest.mark.parametrize("name", ["b", "state"])
def test_inputs_and_changelog_must_have_equal_partitions(name: str) -> None:
    config = ARRIVALS if name == "b" else COMPACT
    with pytest.raises(TopicError, match=f"{name} has 3"):
        check(Needs(), described(**{name: topic(3, config)}))


def test_a_changelog_that_deletes_is_refused() -> None:
    with pytest.raises(TopicError, match=r"state must have cleanup\.policy=compact"):
        check(Needs(), described(state=topic(4, {"cleanup.policy": "delete"})))


def test_inputs_without_arrivals_are_refused_where_the_clock_matters() -> None:
    found = described(b=topic(4, {"message.timestamp.type": "CreateTime"}))
    with pytest.raises(TopicError, match=r"^b must have message\.timestamp\.type"):
        check(Needs(), found)
    assert check(Needs(ticks=False), found).partitions == 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"retention.ms": "999"}, "b has retention.ms=999, and its records are read back"),
        ({"cleanup.policy": "compact,delete"}, "b must not have cleanup.policy=compact"),
    ],
)
def test_inputs_that_lose_what_is_read_back_are_refused(config: dict[str, str], said: str) -> None:
    found = described(b=topic(4, ARRIVALS | config))
    with pytest.raises(TopicError, match=said):
        check(Needs(read_back_ms=1_000), found)
    assert check(Needs(), found).partitions == 4
    for kept in ("1000", "-1"):
        check(Needs(read_back_ms=1_000), described(b=topic(4, ARRIVALS | {"retention.ms": kept})))


@pytest.mark.parametrize(("kept", "warned"), [("-1", []), ("5000", ["b has retention.bytes=5000"])])
def test_a_limit_by_size_is_warned_of(
    kept: str, warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it holds long enough depends on the traffic to come."""
    limited = topic(4, ARRIVALS | {"retention.bytes": kept})
    check(Needs(read_back_ms=1_000), described(b=limited))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == warned
