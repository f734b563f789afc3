"""The consumer's own decisions, without the Faust services around it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from faust.transport.drivers.aiokafka import Consumer as AIOKafkaFaustConsumer
from faust.types import TP
from mode.utils.locks import Event

from processors.runtime.batches import BatchConsumer
from processors.runtime.records import Record
from streams.errors import StateError

A, B = TP("a", 0), TP("b", 0)


def batch(topic: str, *offsets: int) -> list[Any]:
    records = [
        Record(topic=topic, partition=0, offset=offset, timestamp=offset) for offset in offsets
    ]
    return [SimpleNamespace(**{n: getattr(r, n) for n in ("topic", "offset", "timestamp")},
                            timestamp_type=1) for r in records]  # fmt: skip


class Message:
    """What Faust tracks until it is acknowledged."""

    acked = False


class Owner:
    """Knows what was applied."""

    def __init__(self, applied: dict[str, int]) -> None:
        self.applied = applied

    def applied_offset(self, topic: str, partition: int) -> int | None:
        return self.applied.get(topic)

    def restored(self, topic: str, partition: int) -> bool:
        return True


class Consumer(BatchConsumer):
    """Fetches what it is given; remembers that it sought."""

    should_stop = False

    def __init__(
        self,
        fetched: dict[TP, list[Any]],
        during: Callable[[Consumer], None] = lambda _: None,
        applied: dict[str, int] | None = None,
    ) -> None:
        self.app: Any = SimpleNamespace(consumer_generation_id=1)
        self.flow_active = True
        self.sought = 0
        self.earliest = self.end = 0
        self.seek_error: Exception | None = None
        self._fetched, self._during = fetched, during
        self._read_offset: Any = {}
        self._delivered: dict[TP, int] = {}
        self._read_to: dict[TP, int] = {}
        self._owner: Any = Owner(applied or {})

    async def _wait_next_records(self, timeout: float) -> Any:
        self._during(self)
        return self._fetched, set(self._fetched)

    def _note_positions(self, batches: Any) -> None:
        self._delivered.update({tp: records[-1].offset for tp, records in batches.items()})

    def assignment(self) -> set[TP]:
        return {A, B}

    async def earliest_offsets(self, *partitions: TP) -> dict[TP, int]:
        return dict.fromkeys(partitions, self.earliest)

    def highwater(self, tp: TP) -> int:
        return self.end

    async def highwaters(self, *partitions: TP) -> dict[TP, int]:
        return dict.fromkeys(partitions, self.end)

    async def perform_seek(self) -> None:
        self.sought += 1
        if self.seek_error is not None:
            raise self.seek_error


def stop_flow(consumer: Consumer) -> None:
    consumer.flow_active = False


def next_generation(consumer: Consumer) -> None:
    consumer.app.consumer_generation_id += 1


async def test_each_fetched_list_is_one_message() -> None:
    consumer = Consumer({A: batch("a", 3, 4, 9), B: batch("b", 1)})
    messages = [(tp, message) async for tp, message in consumer.getmany(1.0)]
    assert [(tp, m.offset, len(m.value or ())) for tp, m in messages] == [(A, 9, 3), (B, 1, 1)]
    assert {message.generation_id for _, message in messages} == {1}
    assert consumer._read_offset == {A: 9, B: 1}
    assert consumer.sought == 0


@pytest.mark.parametrize("during", [stop_flow, next_generation])
async def test_what_a_rebalance_makes_it_drop_is_fetched_again(
    during: Callable[[Consumer], None],
) -> None:
    consumer = Consumer({A: batch("a", 3)}, during)
    assert [tp async for tp, _ in consumer.getmany(1.0)] == []
    assert consumer.sought == 1


async def test_so_is_what_is_left_when_a_rebalance_begins_between_two_lists() -> None:
    consumer = Consumer({A: batch("a", 3), B: batch("b", 1)})
    delivered = []
    async for tp, _ in consumer.getmany(1.0):
        delivered.append(tp)
        stop_flow(consumer)
    assert delivered == [A]
    assert consumer.sought == 1


async def test_a_seek_that_fails_is_an_error_unless_the_rebalance_still_runs() -> None:
    consumer = Consumer({A: batch("a", 3)}, next_generation)
    consumer.seek_error = RuntimeError("no such partition")
    with pytest.raises(RuntimeError, match="no such partition"):
        [tp async for tp, _ in consumer.getmany(1.0)]
    consumer = Consumer({A: batch("a", 3)}, stop_flow)
    consumer.seek_error = RuntimeError("no such partition")
    assert [tp async for tp, _ in consumer.getmany(1.0)] == []


def test_it_reads_on_behind_the_state(caplog: pytest.LogCaptureFixture) -> None:
    consumer = Consumer({}, applied={"a": 7})
    assert consumer._behind_state(A, earliest=0) == 8
    assert consumer._behind_state(B, earliest=5) == 5
    assert caplog.records == []
    with caplog.at_level(logging.ERROR):
        assert consumer._behind_state(A, earliest=20) == 20
    assert "offsets=8..19" in caplog.text


def test_the_group_commits_what_is_applied_and_markers_once_all_is() -> None:
    consumer = Consumer({}, applied={"a": 7})
    assert consumer._new_offset(B) is None
    assert consumer._new_offset(A) == 8
    consumer._delivered[A], consumer._read_to[A] = 9, 11
    assert consumer._new_offset(A) == 8
    consumer._delivered[A] = 7
    assert consumer._new_offset(A) == 11


@pytest.mark.parametrize(
    ("earliest", "lost"), [(8, ""), (9, "offsets=8..8"), (12, "offsets=8..11")]
)
async def test_a_jump_ahead_is_a_loss_only_if_what_is_left_out_is_gone(
    earliest: int, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer({A: batch("a", 12), B: batch("b", 1)})
    consumer._read_to[A], consumer.earliest = 8, earliest
    with caplog.at_level(logging.ERROR):
        assert len([tp async for tp, _ in consumer.getmany(1.0)]) == 2
    assert lost in caplog.text
    assert bool(caplog.records) == bool(lost)


async def test_offsets_that_begin_again_are_refused() -> None:
    consumer = Consumer({A: batch("a", 7)})
    consumer._read_to[A] = 7
    assert len([tp async for tp, _ in consumer.getmany(1.0)]) == 1
    consumer._read_to[A] = 8
    with pytest.raises(StateError, match="a partition 0 was read to offset 7, but offset 7 came"):
        [tp async for tp, _ in consumer.getmany(1.0)]


async def test_an_input_that_ends_before_what_was_applied_is_refused() -> None:
    consumer = Consumer({}, applied={"a": 7})
    consumer.end = 8
    await consumer.check_ends()
    consumer.end = 7
    with pytest.raises(StateError, match="it now ends at offset 7"):
        await consumer.check_ends()


async def test_a_crash_ends_the_wait_for_the_commit_before_a_revocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = asyncio.Event()
    revoked: list[set[TP]] = []

    async def commit_that_nobody_answers(_: BatchConsumer) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def note(_: BatchConsumer, partitions: set[TP]) -> None:
        revoked.append(partitions)

    async def held() -> None:
        pass

    monkeypatch.setattr(BatchConsumer, "commit", commit_that_nobody_answers)
    monkeypatch.setattr(AIOKafkaFaustConsumer, "on_partitions_revoked", note)
    consumer = Consumer({})
    consumer._owner.before_revoke = held
    consumer._loop = asyncio.get_running_loop()
    consumer._stopped, consumer._crashed = Event(), Event()
    revocation = asyncio.create_task(consumer.on_partitions_revoked({A}))
    await begun.wait()
    assert revoked == []
    consumer._crashed.set()
    async with asyncio.timeout(60):
        await revocation
    assert revoked == [{A}]
