"""The most telling cases of the fault matrix, and proof that it catches broken workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from streams.serde import build_codec
from streams.settings import AlignSettings
from tests.faults.play import Row, play
from tests.faults.registry import PARTS, all_cases, find_cases
from tests.faults.report import as_line
from tests.faults.scene import WORKER, Kafka
from tests.faults.sizes import Sizes
from tests.faults.verdict import Judge, Outcome
from tests.integration.align_worker import topics_of

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

SHORT = Sizes(kills=4, rounds=1, scripts=10)
IMPATIENT = replace(SHORT, patience_s=6)
"""What a broken worker lost does not come, however long one waits."""

TELLING = (
    "kill-mid-batch",
    "kill-processors",
    "kill-before-commit",
    "zombie",
    "rebalance",
    "poison",
)
BROKEN = {
    "acks-first": "kill-before-commit",
    "writes-first": "kill-mid-batch",
    "unfenced": "zombie",
}
AT_ONCE = 4

Rows = dict[str, Future[Row]]


@pytest.fixture(scope="module")
def rows(kafka_bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    """Several at once: most of their time is waiting."""
    folder = tmp_path_factory.mktemp("faults")
    kafka = Kafka(kafka_bootstrap)

    def play_one(name: str, label: str, sizes: Sizes, command: Sequence[str] = WORKER) -> Row:
        (case,) = find_cases(name)
        return play(case, kafka, folder / label, sizes, command)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = {name: pool.submit(play_one, name, name, SHORT) for name in TELLING}
        for how, name in BROKEN.items():
            command = ("tests.faults.broken", how)
            made[how] = pool.submit(play_one, name, how, IMPATIENT, command)
        yield made


def test_the_matrix_has_all_fifteen_faults_under_names_of_their_own() -> None:
    cases = all_cases()
    assert {int(case.number.rstrip(PARTS)) for case in cases} == set(range(1, 16))
    assert len({case.name for case in cases}) == len({case.number for case in cases}) == len(cases)


def test_a_verdict_tells_apart_what_is_lost_there_twice_and_wrong() -> None:
    judge = Judge(topics_of("any"), AlignSettings(), build_codec())
    first, second, third = (("any.turns", 0, offset, "invalid") for offset in range(3))
    expected = Outcome(dead_letters=Counter({first: 1, second: 1}))
    found = Outcome(dead_letters=Counter({first: 2, third: 1}))
    verdict = judge.verdict([], expected, found)
    assert (verdict.lost, verdict.duplicated, verdict.wrong) == (1, 1, 1)
    assert str(second) in verdict.example
    assert not verdict.exact_by_id
    assert judge.verdict([], expected, expected).exact


@pytest.mark.parametrize("name", TELLING)
def test_outputs_equal_the_oracle_after(name: str, rows: Rows) -> None:
    row = rows[name].result()
    assert row.passed, as_line(row)
    assert row.events > 100
    assert row.recovery_s is not None


@pytest.mark.parametrize(
    ("how", "lost", "repeated"),
    [("acks-first", True, False), ("writes-first", False, True), ("unfenced", False, True)],
)
def test_a_broken_worker_is_caught(how: str, lost: bool, repeated: bool, rows: Rows) -> None:
    row = rows[how].result()
    assert not row.passed
    assert row.lost > 0 or not lost, as_line(row)
    assert row.duplicated_ids > 0 or not repeated, as_line(row)
