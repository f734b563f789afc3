from __future__ import annotations

import pytest

from processors.runtime.records import Headers, Record, is_tick
from streams.contracts import TICK_HEADER


@pytest.mark.parametrize(
    ("value", "headers", "expected"),
    [
        (None, ((TICK_HEADER, b""),), True),
        (None, (("other", b"1"), (TICK_HEADER, None)), True),
        (None, (), False),
        (None, (("other", b"1"),), False),
        (b"", ((TICK_HEADER, b""),), False),
        (b"event", ((TICK_HEADER, b""),), False),
    ],
)
def test_a_tick_is_a_null_value_with_the_header(
    value: bytes | None, headers: Headers, expected: bool
) -> None:
    record = Record(topic="t", partition=0, offset=0, timestamp=1, value=value, headers=headers)
    assert is_tick(record) is expected
