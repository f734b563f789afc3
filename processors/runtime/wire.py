"""Reads record batches as the driver does, whatever bytes their header keys hold.

Kafka's protocol calls a header's key a string, but no broker checks it, and the driver raises
``UnicodeDecodeError`` for a batch with one that is not UTF-8, for ever: one such record would
stop its partition. Here the batch is read again with U+FFFD in place of what is no UTF-8.
Everything else, and every other batch, is the driver's own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, SupportsIndex

from aiokafka.consumer import fetcher
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords

_PREFIX = struct.Struct(">qiib")
"""Base offset, length of what follows the first two, leader epoch, format."""

_LENGTH_COUNTS_FROM = struct.calcsize(">qi")
_FORMAT_WITH_HEADERS = 2


def read_any_header_key() -> None:
    """Have every consumer of this process read its batches in this way."""
    fetcher.MemoryRecords = ForgivingRecords


class ForgivingRecords:
    """The batches of one fetched partition; in place of the driver's ``MemoryRecords``.

    Args:
        data: As the broker sent it.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._start = 0
        self._records: Any = MemoryRecords(data)

    def size_in_bytes(self) -> int:
        """The size of what was fetched, a batch cut off at its end included."""
        return len(self._data)

    def has_next(self) -> bool:
        """Whether another whole batch follows."""
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        """The next batch, None after the last one."""
        batch = self._records.next_batch()
        if batch is None:
            return None
        start = self._start
        _, length, _, form = _PREFIX.unpack_from(self._data, start)
        self._start = start + _LENGTH_COUNTS_FROM + length
        if form < _FORMAT_WITH_HEADERS:
            return batch
        return _Batch(batch, memoryview(self._data)[start : self._start])


class _Batch:
    """A batch of the driver's; its records once more from the start if a header key is broken.

    The fetcher skips those that it has had.
    """

    def __init__(self, batch: Any, data: memoryview) -> None:
        self._batch = batch
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batch
        except UnicodeDecodeError:
            yield from _forgiving(self._data)


def _forgiving(data: memoryview) -> Iterator[Any]:
    batch: Any = iter(_DefaultRecordBatchPy(data))
    # Only now it is decompressed.
    batch._buffer = _Text(batch._buffer)
    return batch  # type: ignore[no-any-return]


class _Text(bytearray):
    """Bytes whose slices decode with U+FFFD in place of what is no UTF-8."""

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        return _Text(found) if isinstance(found, bytearray) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, errors)


__all__ = ["ForgivingRecords", "read_any_header_key"]
