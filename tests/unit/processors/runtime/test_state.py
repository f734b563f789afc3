from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiokafka.errors import (
    IllegalOperation,
    InvalidProducerEpoch,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    ProducerFenced,
)

from processors.runtime.records import Output
from processors.runtime.state import (
    ENTRY_PREFIX,
    META_KEY,
    PART_BYTES,
    PART_PREFIX,
    Parts,
    RestoredState,
    TransactionalWriter,
    as_state,
    collect,
    decode_meta,
    encode_meta,
    part_key,
)
from streams.errors import FencedError, StateError
from streams.kafka.clients import partition_for
from streams.settings import KafkaSettings


def test_the_partition_record_round_trips() -> None:
    applied = {"dialogue.turns": 12, "dialogue.feedback": -1}
    assert decode_meta(encode_meta(applied, b"\x00own")) == (applied, b"\x00own")


def test_a_partition_record_of_another_version_is_refused() -> None:
    value = msgspec.msgpack.encode({"version": 99, "applied": {}, "processor": b""})
    with pytest.raises(StateError, match="version 99"):
        decode_meta(value)
    with pytest.raises(StateError, match="cannot be read"):
        decode_meta(b"\xff")


def test_later_records_win_and_null_forgets() -> None:
    raw: dict[bytes, bytes] = {}
    a, b = ENTRY_PREFIX + b"a", ENTRY_PREFIX + b"b"
    meta = [(META_KEY, encode_meta({"t": n}, b"m%d" % n)) for n in (1, 2)]
    collect([(a, b"1"), (b, b"1"), meta[0], (a, b"2"), (b, None), meta[1], (None, b"x")], raw)
    state = as_state(raw)
    assert (state.entries, state.applied, state.meta) == ({b"a": b"2"}, {"t": 2}, b"m2")


def test_an_empty_changelog_is_a_partition_never_processed() -> None:
    state = as_state({})
    assert (state.entries, state.applied, state.meta) == ({}, {}, None)


def test_entries_without_a_partition_record_are_refused() -> None:
    with pytest.raises(StateError, match="no partition record"):
        as_state({ENTRY_PREFIX + b"a": b"1"})


def test_an_entry_never_collides_with_the_partition_record() -> None:
    raw: dict[bytes, bytes] = {}
    collect([(ENTRY_PREFIX + META_KEY, b"1"), (META_KEY, encode_meta({}, b""))], raw)
    assert as_state(raw).entries == {META_KEY: b"1"}


LARGE = bytes(range(256)) * (3 * PART_BYTES // 256) + b"end"


def written(parts: Parts, into: dict[bytes, bytes], **entries: bytes | None) -> int:
    """Write entries as the changelog would hold them; returns the number of records."""
    records = [r for k, v in entries.items() for r in parts.records(k.encode(), v)]
    collect([*records, (META_KEY, encode_meta({"t": 1}, b"m"))], into)
    assert all(len(value or b"") <= PART_BYTES for _, value in records)
    return len(records)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, len(LARGE)])
def test_an_entry_of_any_size_is_cut_and_put_together_again(size: int) -> None:
    raw: dict[bytes, bytes] = {}
    count = written(Parts(), raw, a=LARGE[:size], b=b"other")
    assert count == max(1, -(-size // PART_BYTES)) + 1
    state = as_state(raw)
    assert state.entries == {b"a": LARGE[:size], b"b": b"other"}
    assert state.parts == ({b"a": count - 1} if size > PART_BYTES else {})


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("then", [None, b"", b"small", LARGE[: PART_BYTES + 9], LARGE + LARGE])
def test_no_part_of_an_old_value_is_left(then: bytes | None, restart: bool) -> None:
    raw: dict[bytes, bytes] = {}
    parts = Parts()
    written(parts, raw, a=LARGE, ab=LARGE[:-1], b=b"x")
    if restart:
        parts = Parts(as_state(dict(raw)).parts)
    written(parts, raw, a=then)
    needed = 0 if then is None else max(1, -(-len(then) // PART_BYTES))
    assert [key for key in raw if key in {part_key(b"a", n) for n in range(9)}] == [
        part_key(b"a", n) for n in range(needed)
    ]
    kept = {} if then is None else {b"a": then}
    assert as_state(raw).entries == kept | {b"ab": LARGE[:-1], b"b": b"x"}
    assert written(parts, raw, a=b"once more") == max(1, needed)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (part_key(b"a", 1), "part 1 of entry b'a' has none before it"),
        (part_key(b"b", 2), "part 2 of entry b'b' has none before it"),
        (PART_PREFIX + b"\x00", "who else writes to it"),
        (b"", "who else writes to it"),
        (b"some key", "who else writes to it"),
    ],
)
def test_what_no_worker_wrote_is_refused(key: bytes, said: str) -> None:
    raw: dict[bytes, bytes] = {key: b"garbage"}
    written(Parts(), raw, b=b"x")
    with pytest.raises(StateError, match=said):
        as_state(raw)


def test_errors_of_the_client_are_mapped() -> None:
    writer = TransactionalWriter(KafkaSettings(bootstrap_servers="h:1"), "app", 3, "state")
    fenced = writer._mapped(ProducerFenced())
    assert isinstance(fenced, FencedError)
    assert "app-3" in str(fenced)
    assert isinstance(writer._mapped(InvalidProducerEpoch()), FencedError)
    assert isinstance(writer._mapped(IllegalOperation()), FencedError)
    assert isinstance(writer._mapped(KafkaTimeoutError()), StateError)


async def test_a_writer_that_was_not_started_says_so() -> None:
    writer = TransactionalWriter(KafkaSettings(bootstrap_servers="h:1"), "app", 3, "state")
    with pytest.raises(StateError, match="app-3 is not started"):
        await writer.commit([], {}, b"")
    await writer.close()


class Producer:
    """Answers each batch with the next of its answers, or at once."""

    def __init__(self, *answers: Exception) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []
        self.sent: list[tuple[str, int, bytes | None, bytes | None]] = []
        self.batches = 0
        self.room = 3

    async def begin_transaction(self) -> None:
        self.calls.append("begin")

    async def commit_transaction(self) -> None:
        self.calls.append("commit")

    async def stop(self) -> None:
        self.calls.append("stop")

    async def partitions_for(self, topic: str) -> set[int]:
        return {0, 1, 2}

    def create_batch(self) -> Batch:
        return Batch(self.room)

    async def send_batch(self, batch: Batch, topic: str, *, partition: int) -> asyncio.Future[None]:
        assert batch.closed
        self.sent.extend((topic, partition, key, value) for key, value in batch.records)
        self.batches += 1
        future = asyncio.get_running_loop().create_future()
        if self.answers:
            future.set_exception(self.answers.pop())
        else:
            future.set_result(None)
        return future


class Batch:
    """Takes so many records, and the first in any case."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.records: list[tuple[bytes | None, bytes | None]] = []
        self.closed = False

    def append(
        self, *, timestamp: int | None, key: bytes | None, value: bytes | None, headers: object
    ) -> object | None:
        assert type(headers) is list, "the client's own builder takes nothing else"
        if len(self.records) >= self.room:
            return None
        self.records.append((key, value))
        return self

    def close(self) -> None:
        self.closed = True


def writer_over(producer: Producer) -> TransactionalWriter:
    writer = TransactionalWriter(KafkaSettings(bootstrap_servers="h:1"), "app", 3, "state")
    writer._producer = producer
    return writer


async def test_outputs_entries_and_the_partition_record_are_one_transaction() -> None:
    producer = Producer()
    writer = writer_over(producer)
    writer.resume(RestoredState(parts={b"gone": 2}))
    out = Output(topic="out", key=b"k", value=b"v")
    await writer.commit([out], {b"e": b"1", b"gone": None}, b"meta")
    assert producer.calls == ["begin", "commit"]
    assert sorted(producer.sent, key=lambda sent: sent[0]) == [
        ("out", partition_for(b"k", 3), b"k", b"v"),
        ("state", 3, part_key(b"e", 0), b"1"),
        ("state", 3, part_key(b"gone", 0), None),
        ("state", 3, part_key(b"gone", 1), None),
        ("state", 3, META_KEY, b"meta"),
    ]
    assert producer.batches == 3


async def test_an_output_goes_where_it_says() -> None:
    producer = Producer()
    await writer_over(producer).commit(
        [Output(topic="out", key=b"k", value=b"v", partition=7)], {}, b""
    )
    assert ("out", 7, b"k", b"v") in producer.sent


async def test_a_transaction_of_which_a_record_is_refused_is_not_committed() -> None:
    producer = Producer(MessageSizeTooLargeError())
    with pytest.raises(StateError, match="cannot write as app-3: MessageSizeTooLarge"):
        await writer_over(producer).commit([], {b"e": b"1"}, b"meta")
    assert producer.calls == ["begin"]
