"""What a record must keep to beyond its types, so that later stages need not ask again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from streams.contracts import DialogueTurn, FeedbackEvent, Record
from streams.errors import InvalidRecordError

_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1


def validate(record: Record) -> None:
    """Check the records that come from outside.

    Raises:
        InvalidRecordError: An id is empty, a time is before 1970, a number is not finite or does
            not fit its type, or log-probabilities do not match their tokens. Not-a-number is
            refused because it equals nothing, itself included: a duplicate holding it would pass
            for a conflict.
    """
    if isinstance(record, DialogueTurn):
        _require_ids(record.event_id, record.session_id, record.turn_id, record.policy)
        _require_time(record.event_time)
        _require_logprobs(record)
        _require_32_bits(record)
    elif isinstance(record, FeedbackEvent):
        _require_ids(record.event_id, record.session_id, record.policy)
        _require_time(record.event_time)
        if record.value is not None:
            _require_finite("value", (record.value,))


def _require_ids(*ids: str) -> None:
    if not all(ids):
        raise InvalidRecordError("event_id, session_id, turn_id and policy must not be empty")


def _require_time(event_time: int) -> None:
    if event_time < 0:
        raise InvalidRecordError(f"event_time {event_time} is before 1970")


def _require_finite(name: str, values: Iterable[float]) -> None:
    if not all(map(math.isfinite, values)):
        raise InvalidRecordError(f"{name} must be finite")


def _require_32_bits(turn: DialogueTurn) -> None:
    """Avro's reader lets larger numbers pass where its writer does not."""
    sampling = turn.sampling
    given = (sampling.top_k or 0, sampling.max_tokens or 0) if sampling is not None else ()
    for numbers in (turn.token_ids, turn.prompt_token_ids, given):
        if numbers and not (min(numbers) >= _INT_MIN and max(numbers) <= _INT_MAX):
            raise InvalidRecordError(
                "token_ids, prompt_token_ids, sampling.top_k and max_tokens must fit 32 bits"
            )


def _require_logprobs(turn: DialogueTurn) -> None:
    if turn.sampling is not None:
        given = (turn.sampling.temperature, turn.sampling.top_p)
        _require_finite("sampling", (v for v in given if v is not None))
    if turn.behaviour_logprobs is None:
        return
    _require_finite("behaviour_logprobs", turn.behaviour_logprobs)
    if turn.token_ids is None or len(turn.token_ids) != len(turn.behaviour_logprobs):
        raise InvalidRecordError("behaviour_logprobs must have one entry per entry of token_ids")
