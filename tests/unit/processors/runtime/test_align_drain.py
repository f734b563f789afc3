"""The aligner's drain: backlogs are drained without new input, what is forgotten is null."""

from __future__ import annotations

import pytest

from processors.runtime.records import Outcome
from streams.contracts import TICK_HEADER, DeadLetter, DeadLetterReason, Role, TrajectorySegment
from streams.settings import AlignSettings
from streams.topics import DEAD_LETTERS, FEEDBACK, SEGMENTS, TURNS
from tests.unit.processors.runtime.test_align_agent import CODEC, Log, thumb, turn

DEFAULTS = AlignSettings()
TURNS_PUT = 12


def drain_dry(log: Log, limit: int) -> list[Outcome]:
    """Every outcome that comes of what was fed, asked for as the runtime does."""
    outcomes = [log.processor.drain(limit)]
    while outcomes[-1].more:
        outcomes.append(log.processor.drain(limit))
        assert len(outcomes) < 100
    return outcomes


def backlog() -> Log:
    """A conversation, some broken records, and ticks long after it."""
    log = Log()
    for number in range(TURNS_PUT):
        at_ms = 1_000 * (number + 1)
        role = Role.ASSISTANT if number % 2 else Role.USER
        log.put(TURNS, at_ms, turn(at_ms, role))
    log.put(FEEDBACK, 2_500, thumb(2_500, "assistant-2000"))
    log.put(FEEDBACK, 3_000, b"\xff")
    for topic in (TURNS, FEEDBACK):
        log.put(topic, 10_000_000, None, ((TICK_HEADER, b""),))
    return log


@pytest.mark.parametrize("limit", [1, 2, 4, TURNS_PUT + 1, TURNS_PUT + 2, 1_000])
def test_a_backlog_is_drained_without_new_input(limit: int) -> None:
    log = backlog()
    outcomes = drain_dry(log, limit)
    assert [outcome.records <= limit for outcome in outcomes] == [True] * len(outcomes)
    assert sum(outcome.records for outcome in outcomes) == TURNS_PUT + 1
    assert outcomes[-1].applied == {TURNS: TURNS_PUT, FEEDBACK: 2}
    outputs = [output for outcome in outcomes for output in outcome.outputs]
    (output,) = [output for output in outputs if output.topic == SEGMENTS]
    segment = CODEC.decode(output.value, TrajectorySegment)
    assert len(segment.lineage) == TURNS_PUT + 1
    (dead,) = [output for output in outputs if output.topic == DEAD_LETTERS]
    assert CODEC.decode(dead.value, DeadLetter).reason is DeadLetterReason.UNDECODABLE
    assert (log.processor.buffered(TURNS), log.processor.buffered(FEEDBACK)) == (0, 0)
    status = log.processor.status()
    assert status.clock_ms == 10_000_000 - 1
    assert (status.sessions, status.open_sessions) == (1, 0)


def test_nothing_more_is_promised_where_nothing_more_can_be_applied() -> None:
    log = Log()
    log.put(TURNS, 1_000, turn(1_000, Role.USER))
    waiting = log.processor.drain(1_000)
    assert (waiting.records, waiting.more) == (0, False)
    assert log.processor.buffered(TURNS) == 1


def test_a_forgotten_session_is_null_in_the_changelog_and_leaves_nothing_behind() -> None:
    log = backlog()
    changelog: dict[bytes, bytes | None] = {}
    for outcome in drain_dry(log, 3):
        changelog.update(outcome.changes)
    kept = {key: value for key, value in changelog.items() if value is not None}
    assert kept
    assert log.processor.status().state_entries == len(kept)
    assert log.processor.status().state_bytes == sum(map(len, kept.values()))
    forgotten = log.tick(10_000_000 + 2 * DEFAULTS.horizon_ms)
    changelog.update(forgotten.changes)
    assert changelog.keys() >= kept.keys()
    assert {key: value for key, value in changelog.items() if value is not None} == {}
    assert forgotten.outputs == []
    status = log.processor.status()
    assert (status.sessions, status.state_entries, status.state_bytes) == (0, 0, 0)


def test_what_was_forgotten_and_comes_again_is_kept_again() -> None:
    log = backlog()
    drain_dry(log, 1_000)
    later_ms = 10_000_000 + 2 * DEFAULTS.horizon_ms
    log.put(TURNS, later_ms, turn(later_ms, Role.USER))
    outcome = log.tick(later_ms + 1)
    assert any(value is not None for value in outcome.changes.values())
    assert log.processor.status().open_sessions == 1
