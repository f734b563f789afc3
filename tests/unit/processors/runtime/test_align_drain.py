"""The aligner's drain: backlogs are drained without new input, what is forgotten is null."""

from __future__ import annotations

import pytest

from processors.runtime.records import Outcome
from streams.contracts import TICK_HEADER, DeadLetter, DeadLetterReason, Role, TrajectorySegment
from streams.kafka.clients import partition_for
from streams.metrics import ProcessorMetrics
from streams.settings import AlignSettings
from streams.topics import DEAD_LETTERS, FEEDBACK, SEGMENTS, TURNS
from tests.unit.processors.runtime.test_align_agent import (
    CODEC,
    PARTITIONS,
    Log,
    new_processor,
    thumb,
    turn,
)

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


def many_due(sessions: int) -> Log:
    """So many sessions of one turn each, and then nothing for a long time."""
    log = Log()
    for number in range(sessions):
        at_ms = 1_000 + number
        log.put(TURNS, at_ms, turn(at_ms, Role.USER, home(number)))
    return log


def home(number: int) -> str:
    names = (f"{number}-{tail}" for tail in range(999))
    return next(name for name in names if partition_for(name.encode(), PARTITIONS) == 0)


def segments_of(outcome: Outcome) -> list[str]:
    decoded = (CODEC.decode(output.value, TrajectorySegment) for output in outcome.outputs)
    return [segment.session_id for segment in decoded]


def test_what_is_due_at_once_after_a_pause_is_put_out_in_portions() -> None:
    log = many_due(12)
    for topic in (TURNS, FEEDBACK):
        log.put(topic, 10_000_000, None, ((TICK_HEADER, b""),))
    outcomes = drain_dry(log, 5)
    assert [(o.records, len(o.outputs)) for o in outcomes] == [
        (5, 0),
        (5, 0),
        (2, 5),
        (0, 5),
        (0, 2),
    ]
    names = [name for outcome in outcomes for name in segments_of(outcome)]
    assert names == list(map(home, range(12)))
    assert log.processor.status().clock_ms == 10_000_000 - 1


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (4, [(4, 0), (4, 0), (4, 4), (0, 4), (0, 4), (1, 0)]),
        (8, [(8, 0), (4, 8), (1, 4)]),
        (12, [(12, 12), (1, 0)]),
        (20, [(13, 12)]),
    ],
)
def test_a_record_after_a_pause_waits_for_what_is_due_before_it(
    limit: int, expected: list[tuple[int, int]]
) -> None:
    log = many_due(12)
    log.put(TURNS, 10_000_000, turn(10_000_000, Role.USER))
    log.put(FEEDBACK, 10_000_000, None, ((TICK_HEADER, b""),))
    outcomes = drain_dry(log, limit)
    assert [(o.records, len(o.outputs)) for o in outcomes if o.records or o.outputs] == expected
    assert [o.applied[TURNS] for o in outcomes][-1] == 12
    assert log.processor.buffered(TURNS) == 0


def test_a_restart_between_portions_goes_on_with_what_is_due() -> None:
    log = many_due(12)
    for topic in (TURNS, FEEDBACK):
        log.put(topic, 10_000_000, None, ((TICK_HEADER, b""),))
    kept: dict[bytes, bytes] = {}
    names: list[str] = []
    more = True
    while more:
        outcome = log.processor.drain(5)
        names.extend(segments_of(outcome))
        more = outcome.more
        kept.update({k: v for k, v in outcome.changes.items() if v is not None})
        log.processor = new_processor(ProcessorMetrics("feedback_align"), log)
        log.processor.restore(kept.items(), outcome.meta)
        for (topic, offset), item in log.records.items():
            if offset > outcome.applied.get(topic, -1):
                log.processor.feed(topic, [item])
    assert names == list(map(home, range(12)))
