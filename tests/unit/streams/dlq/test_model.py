from __future__ import annotations

from typing import Any

import pytest

from streams.contracts import DeadLetter, DeadLetterReason, RecordHeader
from streams.dlq.model import (
    RETRY_ATTEMPT,
    RETRY_HEADERS,
    RETRY_LETTER,
    RETRY_OFFSET,
    RETRY_PARTITION,
    RETRY_TOPIC,
    Case,
    Ledger,
    Letter,
    Mark,
    Place,
    Selector,
    Target,
    grouped,
    letter_of,
    plan_retry,
    with_retry_headers,
)
from streams.errors import DeadLetterError

TARGETS = {"turns": Target(partitions=2, max_bytes=10_000)}


def dead(offset: int = 5, **changes: Any) -> DeadLetter:
    fields: dict[str, Any] = {
        "stage": "feedback_align",
        "reason": DeadLetterReason.UNKNOWN_SCHEMA,
        "message": "schema fingerprint is not known",
        "topic": "turns",
        "partition": 0,
        "offset": offset,
        "time": 1_000 + offset,
        "timestamp": 1_000 + offset,
        "key": b"s",
        "value": b"v",
    }
    return DeadLetter(**(fields | changes))


def letter(offset: int = 5, at: int = 0, **changes: Any) -> Letter:
    return letter_of(dead(offset, **changes), Place("dead", 1, at))


def mark(of: Letter, **changes: Any) -> Mark:
    fields: dict[str, Any] = {
        "letter": of.identity,
        "action": "retried",
        "at_ms": 9_000,
        "root": of.root,
        "attempt": 1,
        "landed": Place("turns", 0, 77),
    }
    return Mark(**(fields | changes))


def cases(*entries: Letter | Mark) -> list[Case]:
    ledger = Ledger()
    for entry in entries:
        ledger.add(entry)
    return ledger.cases()


def test_places_are_written_and_read() -> None:
    place = Place("dialogue.turns", 3, 17)
    assert Place.parse(str(place)) == place
    for text in ("", "turns", "turns/1", "turns/x/1", "turns/1/", "/1/1", "turns/-1/1"):
        with pytest.raises(DeadLetterError, match="names no letter"):
            Place.parse(text)


def test_marks_survive_their_header() -> None:
    of = letter()
    for made in (
        mark(of, actor="ann", note="schema v3 is in"),
        mark(of, action="dropped", landed=None, attempt=0),
    ):
        assert Mark.from_json(made.to_json()) == made


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b'{"letter": 1}', b"\xff"])
def test_what_is_no_mark_is_refused(data: bytes) -> None:
    with pytest.raises(DeadLetterError, match="cannot be read"):
        Mark.from_json(data)


def test_a_mark_changes_the_state_of_its_letter_alone() -> None:
    one, other = letter(5), letter(6, at=1)
    found = {c.letter.origin.offset: c.state for c in cases(one, other, mark(one))}
    assert found == {5: "retried", 6: "open"}


def test_the_same_letter_written_twice_is_one_case() -> None:
    (case,) = cases(letter(5, at=0), letter(5, at=9))
    assert (case.copies, case.letter.at.offset) == (2, 0)


def test_a_letter_for_another_reason_is_another_case() -> None:
    first = letter(5)
    second = letter(5, at=1, reason=DeadLetterReason.INVALID)
    found = {c.letter.reason: c.state for c in cases(first, second, mark(first))}
    assert found == {"unknown_schema": "retried", "invalid": "open"}


def test_a_record_that_dies_again_is_known_by_its_headers() -> None:
    first = letter(5)
    (case,) = cases(first)
    headers = tuple(RecordHeader(key=k, value=v) for k, v in with_retry_headers((), case))
    (again,) = cases(letter(77, at=4, headers=headers))
    assert (again.attempt, again.root) == (1, Place("turns", 0, 5))


def test_a_record_that_dies_again_without_headers_is_known_by_its_place() -> None:
    first = letter(5)
    found = cases(first, mark(first), letter(77, at=4))
    again = next(case for case in found if case.state == "open")
    assert (again.attempt, again.root) == (1, Place("turns", 0, 5))


@pytest.mark.parametrize("attempt", [b"many", b"", None, b"-1"])
def test_foreign_headers_do_no_harm(attempt: bytes | None) -> None:
    headers = (
        RecordHeader(key=RETRY_ATTEMPT, value=attempt),
        RecordHeader(key=RETRY_PARTITION, value=b"0"),
        RecordHeader(key=RETRY_OFFSET, value=b"3"),
    )
    assert letter(headers=headers).attempt == 0


def test_headers_of_an_earlier_attempt_are_replaced() -> None:
    own = (RecordHeader(key="trace", value=b"1"), RecordHeader(key="trace", value=None))
    old = tuple(RecordHeader(key=key, value=b"9") for key in sorted(RETRY_HEADERS))
    (case,) = cases(letter(5, at=3))
    assert with_retry_headers((*own, *old), case) == [
        ("trace", b"1"),
        ("trace", None),
        (RETRY_TOPIC, b"turns"),
        (RETRY_PARTITION, b"0"),
        (RETRY_OFFSET, b"5"),
        (RETRY_LETTER, b"1/3"),
        (RETRY_ATTEMPT, b"1"),
    ]


def test_what_was_retried_is_left_alone_even_by_force() -> None:
    one = letter()
    plan = plan_retry(cases(one, mark(one)), TARGETS, force=True)
    assert (plan.retry, plan.refused, len(plan.done)) == ((), (), 1)


def test_what_was_dropped_comes_back_by_force_only() -> None:
    one = letter()
    found = cases(one, mark(one, action="dropped", landed=None, attempt=0))
    (refusal,) = plan_retry(found, TARGETS).refused
    assert "it was dropped" in refusal.why
    assert len(plan_retry(found, TARGETS, force=True).retry) == 1


def test_a_record_is_not_retried_for_ever() -> None:
    first = letter(5)
    found = cases(first, mark(first, attempt=3), letter(77, at=1))
    again = [case for case in found if case.state == "open"]
    (refusal,) = plan_retry(again, TARGETS).refused
    assert "died 4 times (first at turns/0/5)" in refusal.why
    assert len(plan_retry(again, TARGETS, max_attempts=4).retry) == 1
    assert len(plan_retry(again, TARGETS, force=True).retry) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attributes": {"value_bytes": "9000000"}}, "too large to be kept whole: bytes of the"),
        ({"attributes": {"value_omitted": "9 bytes"}, "value": None}, "stands at turns/0/5"),
        ({"attributes": {"headers_left_out": "4"}}, "headers"),
        ({"timestamp": None}, "keeps what feedback_align made"),
        ({"value": None}, "had no value"),
        ({"topic": "gone"}, "there is no topic gone any more"),
        ({"partition": 2}, "turns has no partition 2 any more"),
        ({"value": b"v" * 9_900}, "more than turns takes"),
    ],
)
def test_what_cannot_be_retried_says_why(changes: dict[str, Any], why: str) -> None:
    plan = plan_retry(cases(letter(**changes)), TARGETS, force=True)
    assert plan.retry == ()
    assert why in plan.refused[0].why


def test_a_cut_message_alone_is_no_obstacle() -> None:
    cut = letter(attributes={"truncated": "true", "message_characters": "5000"})
    assert len(plan_retry(cases(cut), TARGETS).retry) == 1


def test_records_come_back_in_the_order_in_which_they_came() -> None:
    # The clock of a producer went back: within a partition the offset decides.
    found = cases(
        letter(3, at=0, timestamp=50),
        letter(1, at=1, timestamp=90),
        letter(2, at=2, timestamp=20),
        letter(1, at=3, partition=1, timestamp=60),
    )
    order = [(c.letter.origin.partition, c.letter.origin.offset) for c in plan_of(found)]
    assert order == [(1, 1), (0, 1), (0, 2), (0, 3)]


def plan_of(found: list[Case]) -> tuple[Case, ...]:
    return plan_retry(found, TARGETS).retry


def test_letters_are_chosen_by_every_condition() -> None:
    found = cases(
        letter(5),
        letter(6, at=1, stage="reward", topic="segments"),
        letter(7, at=2, reason=DeadLetterReason.INVALID),
    )

    def offsets(**conditions: Any) -> list[int]:
        return [c.letter.origin.offset for c in Selector(**conditions).chosen(found)]

    assert offsets() == [5, 6, 7]
    assert offsets(stage="reward") == [6]
    assert offsets(topic="turns", reason="invalid") == [7]
    assert offsets(since_ms=1_006) == [6, 7]
    assert offsets(since_ms=1_006, until_ms=1_007) == [6]
    assert offsets(places=frozenset({Place("turns", 0, 5)})) == [5]
    with pytest.raises(DeadLetterError, match="there is no letter about turns/0/8"):
        offsets(places=frozenset({Place("turns", 0, 8)}))


def test_groups_count_by_stage_and_reason_the_open_ones_first() -> None:
    one = letter(5)
    found = grouped(
        cases(
            one,
            mark(one),
            letter(6, at=1, reason=DeadLetterReason.INVALID),
            letter(7, at=2, reason=DeadLetterReason.INVALID, message="newest"),
        )
    )
    assert [(g.reason, g.letters, g.open, g.retried) for g in found] == [
        ("invalid", 2, 2, 0),
        ("unknown_schema", 1, 0, 1),
    ]
    assert (found[0].first_ms, found[0].last_ms, found[0].example) == (1_006, 1_007, "newest")
