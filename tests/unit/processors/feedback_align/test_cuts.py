"""ALIGNMENT §5: where the first piece of a run ends."""

from __future__ import annotations

from typing import Any

import pytest

from processors.feedback_align.cuts import first_piece
from processors.feedback_align.identity import turn_fact
from processors.feedback_align.model import Piece
from streams.contracts import TurnType
from tests.unit.processors.feedback_align.logs import SECOND, SETTINGS, make_turn

SIDE = {"turn_type": TurnType.SIDE}
DONE = {"session_done": True}
Spec = tuple[str, int] | tuple[str, int, dict[str, Any]]


def piece_of(*specs: Spec) -> Piece:
    """The first piece of turns given as (name, event time in seconds, fields)."""
    facts = []
    for offset, (name, seconds, *rest) in enumerate(specs):
        fields = rest[0] if rest else {}
        turn = make_turn(name, seconds * SECOND, **({"content": "x"} | fields))
        facts.append(turn_fact(turn, "t", 0, offset, seconds * SECOND))
    return first_piece(facts, SETTINGS)


CASES: dict[str, tuple[list[Spec], int, str | None]] = {
    "open-ended": ([("u1", 0), ("a1", 10)], 2, None),
    "at the gap": ([("u1", 0), ("a1", 0), ("u2", 300)], 3, None),
    "past the gap": ([("u1", 0), ("a1", 0), ("u2", 301)], 2, "gap"),
    "a slow reply stays": ([("u1", 0), ("a1", 900)], 2, None),
    "a slow tool stays": ([("u1", 0), ("t1", 900)], 2, None),
    "a slow side reply does not": ([("u1", 0), ("a1", 900, SIDE)], 1, "gap"),
    "a side turn fills the gap": ([("u1", 0), ("u2", 200, SIDE), ("u3", 400)], 3, None),
    "max_open": ([("u1", 0), ("a1", 1800)], 2, None),
    "past max_open": ([("u1", 0), ("a1", 1801)], 1, "duration"),
    "gap before duration": ([("u1", 0), ("u2", 1801)], 1, "gap"),
    "end": ([("u1", 0), ("a1", 1, DONE), ("u2", 2)], 2, "end"),
    "end by a side turn": ([("u1", 0), ("u2", 1, SIDE | DONE), ("a1", 2)], 2, "end"),
    "sixteen replies": ([(f"a{n}", n) for n in range(20)], 16, "size"),
    "end before size": ([(f"a{n}", n, DONE if n == 15 else {}) for n in range(16)], 16, "end"),
    "bytes, only at a reply": (
        [("u1", 0, {"content": "x" * 70_000}), ("u2", 1), ("a1", 2), ("u3", 3)],
        3,
        "size",
    ),
    "bytes, reached": ([("u1", 0, {"content": "x" * 65_535}), ("a1", 1)], 2, "size"),
    "bytes, one short": ([("u1", 0, {"content": "x" * 65_534}), ("a1", 1)], 2, None),
    "bytes of side turns do not count": (
        [("u1", 0, SIDE | {"content": "x" * 70_000}), ("a1", 1)],
        2,
        None,
    ),
    "numbers count eight": ([("a1", 0, {"token_ids": tuple(range(8_192))})], 1, "size"),
}


@pytest.mark.parametrize("name", CASES)
def test_first_piece(name: str) -> None:
    specs, count, ended_by = CASES[name]
    piece = piece_of(*specs)
    assert piece.count == count
    assert piece.ended_by == ended_by


def test_sums() -> None:
    piece = piece_of(("u1", 0), ("a1", 10), ("u2", 20))
    assert (piece.replies, piece.size, piece.answered) == (1, 3, False)
    assert (piece.first_event_time, piece.last_event_time) == (0, 20 * SECOND)
    assert piece.latest_stamp == 20 * SECOND
