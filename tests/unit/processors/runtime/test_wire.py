"""Record batches whose header keys are no UTF-8, read as the driver's fetcher does."""

from __future__ import annotations

import pytest
from aiokafka.consumer import fetcher
from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.structs import TopicPartition

from processors.runtime.wire import ForgivingRecords, read_any_header_key
from tests.integration.headers import RawKey

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4


def batch(first: int, keys: list[bytes], *, codec: int = 0, transactional: bool = False) -> bytes:
    """A batch of one record a header key, from offset ``first`` on."""
    builder = _DefaultRecordBatchBuilderPy(
        magic=2,
        compression_type=codec,
        is_transactional=transactional,
        producer_id=7 if transactional else -1,
        producer_epoch=0,
        base_sequence=0,
        batch_size=1 << 20,
    )
    for number, key in enumerate(keys):
        value = b"v%d" % (first + number)
        headers = [(RawKey(key), b"h"), ("plain", None)]
        builder.append(number, timestamp=5, key=None, value=value, headers=headers)
    data = bytearray(builder.build())
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


def read(
    data: bytes, start: int = 0, aborted: list[tuple[int, int]] | None = None
) -> list[tuple[int, bytes, str]]:
    """Offset, value and first header key of each record from ``start`` on."""
    place = TopicPartition("t", 0)
    records = PartitionRecords(
        place, ForgivingRecords(data), aborted or [], start, None, None, True, READ_COMMITTED
    )
    return [(record.offset, record.value, record.headers[0][0]) for record in records]


@pytest.mark.parametrize("codec", [0, GZIP, SNAPPY, LZ4, ZSTD])
def test_a_broken_header_key_costs_nothing_but_its_own_characters(codec: int) -> None:
    data = (
        batch(0, [b"a", b"b"])
        + batch(2, [b"c", b"\xff-d", b"\xc3"], codec=codec)
        + batch(5, [b"e"])
    )
    assert read(data) == [
        (0, b"v0", "a"),
        (1, b"v1", "b"),
        (2, b"v2", "c"),
        (3, b"v3", "\ufffd-d"),
        (4, b"v4", "\ufffd"),
        (5, b"v5", "e"),
    ]


def test_reading_begins_within_such_a_batch() -> None:
    data = batch(10, [b"\xff", b"b", b"\xff", b"d"])
    assert [offset for offset, _, _ in read(data, start=12)] == [12, 13]


def test_a_batch_cut_off_at_the_end_waits_for_the_next_fetch() -> None:
    whole, cut = batch(0, [b"\xff"]), batch(1, [b"\xff"])[:-3]
    assert [offset for offset, _, _ in read(whole + cut)] == [0]
    records = ForgivingRecords(cut)
    assert not records.has_next()
    assert records.next_batch() is None
    assert records.size_in_bytes() == len(cut)


def test_aborted_records_are_still_left_out() -> None:
    data = batch(0, [b"\xff"], transactional=True) + batch(1, [b"b"])
    assert [offset for offset, _, _ in read(data, aborted=[(7, 0)])] == [1]
    assert [offset for offset, _, _ in read(data)] == [0, 1]


def test_it_takes_the_place_of_the_drivers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MemoryRecords", None)
    read_any_header_key()
    assert fetcher.MemoryRecords is ForgivingRecords
