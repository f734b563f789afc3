"""Merging: what may be handed out, in which order, and how far the clock may go."""

from __future__ import annotations

from random import Random

import pytest

from processors.feedback_align.machine import Advance, Arrival, Input
from processors.feedback_align.model import NEVER
from processors.feedback_align.watermark import Merger, Payload, Position
from streams.errors import StateError
from streams.topics import FEEDBACK, TURNS
from tests.unit.processors.feedback_align.logs import make_feedback, make_turn


def offer(merger: Merger, *records: tuple[str, int, int]) -> None:
    """(``t`` turn, ``f`` feedback, ``T`` or ``F`` tick; offset; timestamp)."""
    for kind, offset, time in records:
        topic = TURNS if kind in "tT" else FEEDBACK
        record: Payload = None
        if kind == "t":
            record = make_turn(f"u{offset}", time)
        elif kind == "f":
            record = make_feedback(f"f{offset}", time)
        merger.offer(topic, offset, time, record)


def text(inputs: list[Input]) -> str:
    """``t0@5`` for a turn with offset 0 that arrives at 5, ``|4`` for the clock at 4."""
    return " ".join(
        f"|{item.clock_ms}"
        if isinstance(item, Advance)
        else f"{'t' if item.topic == TURNS else 'f'}{item.offset}@{item.arrival_ms}"
        for item in inputs
    )


CASES = {
    "a turn waits for the other side": ([("t", 0, 5)], ""),
    "a turn goes once feedback is read up to it": ([("t", 0, 5), ("F", 0, 5)], "t0@5 |4"),
    "feedback behind it is not enough": ([("t", 0, 5), ("F", 0, 4)], "|3"),
    "feedback waits until turns are past it": ([("f", 0, 5), ("T", 0, 5)], "|4"),
    "and goes then": ([("f", 0, 5), ("T", 0, 6)], "f0@5 |4"),
    "turns before feedback": ([("f", 0, 5), ("t", 0, 5), ("T", 1, 6)], "t0@5 f0@5 |4"),
    "by arrival": (
        [("t", 0, 5), ("t", 1, 7), ("f", 0, 6), ("f", 1, 8)],
        "t0@5 f0@6 t1@7 |6",
    ),
    "a timestamp that falls back counts as the maximum": (
        [("t", 0, 9), ("t", 1, 5), ("F", 0, 20)],
        "t0@9 t1@9 |8",
    ),
    "a tick counts for the maximum": ([("T", 0, 9), ("t", 1, 5), ("F", 0, 20)], "t1@9 |8"),
    "an old offset is ignored": ([("t", 1, 5), ("t", 1, 6), ("t", 0, 7), ("F", 0, 9)], "t1@5 |4"),
    "ticks alone move the clock": ([("T", 0, 9), ("F", 0, 7)], "|6"),
}


@pytest.mark.parametrize("name", CASES)
def test_drain(name: str) -> None:
    records, expected = CASES[name]
    merger = Merger(0)
    offer(merger, *records)
    assert text(merger.drain()) == expected
    assert merger.drain() == []


def test_limit_holds_the_clock_back() -> None:
    merger = Merger(0)
    offer(merger, ("t", 0, 5), ("t", 1, 7), ("T", 2, 20), ("F", 0, 20))
    assert text(merger.drain(1)) == "t0@5 |6"
    assert merger.buffered(TURNS) == 2
    assert text(merger.drain(1)) == "t1@7 |19"
    assert merger.buffered(TURNS) == 0


def test_positions_are_those_of_what_was_handed_out() -> None:
    merger = Merger(3)
    offer(merger, ("t", 7, 5), ("T", 8, 9), ("t", 9, 6), ("t", 10, 30), ("F", 4, 20))
    assert text(merger.drain()) == "t7@5 t9@9 |19"
    assert merger.positions() == {TURNS: Position(9, 9), FEEDBACK: Position(4, 20)}
    assert merger.maxima() == {TURNS: 30, FEEDBACK: 20}
    assert merger.lagging_topic == FEEDBACK


def test_unknown_topic() -> None:
    with pytest.raises(StateError, match=r"topic other is not merged here \(partition=4\)"):
        Merger(4).offer("other", 0, 0, None)


@pytest.mark.parametrize(
    ("records", "due", "expected"),
    [
        ([], None, None),
        ([], 50, 50),
        ([("t", 0, 5)], None, NEVER),
        ([("t", 0, 5)], 50, NEVER),
        ([("t", 0, 5), ("F", 0, 9)], None, None),
        ([("T", 0, 60), ("F", 0, 60)], 50, None),
    ],
)
def test_when_a_tick_is_needed(
    records: list[tuple[str, int, int]], due: int | None, expected: int | None
) -> None:
    merger = Merger(0)
    offer(merger, *records)
    merger.drain()
    assert merger.tick_after_ms(due) == expected


@pytest.mark.parametrize("seed", range(40))
def test_any_interleaving_and_any_restart_give_the_log_order(seed: int) -> None:
    rng = Random(seed)
    sides = [make_side(rng, "tT"), make_side(rng, "fF")]
    expected = merged(sides)
    merger, got, clock = Merger(0), [], -10
    read, restarts = [0, 0], 3
    while read != [len(side) for side in sides]:
        index = rng.randrange(2)
        if read[index] < len(sides[index]):
            offer(merger, sides[index][read[index]])
            read[index] += 1
        for item in merger.drain(rng.choice((None, 0, 1, 3))):
            if isinstance(item, Arrival):
                assert item.arrival_ms > clock
                got.append(item)
            else:
                clock = item.clock_ms
        if restarts and rng.random() < 0.1:
            restarts -= 1
            merger = Merger(0, merger.positions())
            read = [merger.positions()[topic].offset + 1 for topic in (TURNS, FEEDBACK)]
    got += [item for item in merger.drain() if isinstance(item, Arrival)]
    assert text(list(got)).split() == expected[: len(got)]
    assert len(expected) - len(got) <= merger.buffered(TURNS) + merger.buffered(FEEDBACK)


def make_side(rng: Random, kinds: str) -> list[tuple[str, int, int]]:
    time, records = 0, []
    for offset in range(30):
        time += rng.choice((-2, 0, 0, 1, 5))
        records.append((rng.choice(kinds), offset, time))
    return records


def merged(sides: list[list[tuple[str, int, int]]]) -> list[str]:
    found = []
    for rank, side in enumerate(sides):
        maximum = side[0][2]
        for kind, offset, time in side:
            maximum = max(maximum, time)
            if kind in "tf":
                found.append((maximum, rank, offset, f"{kind}{offset}@{maximum}"))
    return [name for *_, name in sorted(found)]
