from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, Producer

import streams.gateway.publisher as publisher_module
import streams.gateway.spool as spool_module
from streams.errors import BrokerError, OversizedError, SpoolError
from streams.gateway.publisher import DeliveryError, KafkaSender, Refused, SpoolingPublisher
from streams.gateway.spool import Envelope, Spool


class FlakySender:
    """Kafka that can be away."""

    def __init__(self) -> None:
        self.away = False
        self.sent: list[Envelope] = []
        self.never: list[Envelope] = []

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Refused]:
        if self.away:
            raise DeliveryError("away")
        self.sent.extend(e for e in envelopes if e not in self.never)
        return [(e, "too large") for e in envelopes if e in self.never]


def envelope(n: int) -> Envelope:
    return Envelope("dialogue.turns", b"s", str(n).encode())


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "spool.db")
    yield opened
    opened.close()


async def test_kafka_takes_events_without_touching_the_disk(spool: Spool) -> None:
    sender = FlakySender()
    await SpoolingPublisher(sender, spool).publish([envelope(1)])
    assert sender.sent == [envelope(1)]
    assert len(spool) == 0


async def test_what_waits_is_sent_first(spool: Spool) -> None:
    sender = FlakySender()
    publisher = SpoolingPublisher(sender, spool)
    sender.away = True
    await publisher.publish([envelope(1)])
    sender.away = False
    await publisher.publish([envelope(2)])
    assert sender.sent == []
    assert await publisher.flush_once()
    assert sender.sent == [envelope(1), envelope(2)]
    await publisher.publish([envelope(3)])
    assert sender.sent == [envelope(1), envelope(2), envelope(3)]


async def test_a_flush_that_fails_loses_nothing(spool: Spool) -> None:
    sender = FlakySender()
    publisher = SpoolingPublisher(sender, spool)
    sender.away = True
    await publisher.publish([envelope(1)])
    assert not await publisher.flush_once()
    assert publisher.spooled == 1


async def test_the_flusher_sends_when_kafka_is_back(spool: Spool) -> None:
    sender = FlakySender()
    publisher = SpoolingPublisher(sender, spool)
    spool.append([envelope(1)])
    publisher.start()
    async with asyncio.timeout(10):
        while publisher.spooled:
            await asyncio.sleep(0.005)
    await publisher.stop()
    assert sender.sent == [envelope(1)]


def test_the_spool_survives_a_restart_in_order(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool.db")
    first.append([envelope(1), envelope(2)])
    first.append([envelope(3)])
    first.close()
    second = Spool(tmp_path / "spool.db")
    assert len(second) == 3
    last_id, waiting = second.first(2)
    assert waiting == [envelope(1), envelope(2)]
    second.drop_through(last_id)
    assert second.first(9)[1] == [envelope(3)]
    assert len(second) == 1
    second.close()


async def test_an_event_nobody_takes_is_an_error(spool: Spool) -> None:
    sender = FlakySender()
    sender.away = True
    publisher = SpoolingPublisher(sender, spool)
    spool.close()
    with pytest.raises(SpoolError):
        await publisher.publish([envelope(1)])


async def test_what_kafka_never_takes_does_not_hold_up_the_rest(spool: Spool) -> None:
    sender = FlakySender()
    sender.never = [envelope(1)]
    publisher = SpoolingPublisher(sender, spool)
    spool.append([envelope(1), envelope(2)])
    assert await publisher.flush_once()
    assert sender.sent == [envelope(2)]
    assert len(spool) == 0
    with pytest.raises(OversizedError, match="too large"):
        await publisher.publish([envelope(1)])


def test_what_kafka_never_takes_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "spool.db"
    spool = Spool(path)
    spool.append([envelope(1)])
    spool.drop_through(spool.first(1)[0], [(envelope(1), "too large")])
    spool.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT value, reason FROM refused").fetchall() == [(b"1", "too large")]
    db.close()


class StubbornSpool(Spool):
    """A disk that can be full, also for forgetting."""

    full = False

    def drop_through(self, last_id: int, refused: Sequence[Refused] = ()) -> None:
        if self.full:
            raise SpoolError("full")
        super().drop_through(last_id, refused)


async def test_what_was_sent_is_not_sent_again_while_the_disk_is_full(tmp_path: Path) -> None:
    sender, spool = FlakySender(), StubbornSpool(tmp_path / "spool.db")
    publisher = SpoolingPublisher(sender, spool)
    spool.append([envelope(1)])
    spool.full = True
    for _ in range(3):
        with pytest.raises(SpoolError):
            await publisher.flush_once()
    spool.full = False
    assert await publisher.flush_once()
    assert sender.sent == [envelope(1)]
    assert len(spool) == 0
    spool.close()


async def test_the_flusher_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_RETRY_S", 0.001)
    sender, spool = FlakySender(), StubbornSpool(tmp_path / "spool.db")
    publisher = SpoolingPublisher(sender, spool)
    spool.append([envelope(1)])
    spool.full = True
    publisher.start()
    async with asyncio.timeout(10):
        while not sender.sent:
            await asyncio.sleep(0.001)
        spool.full = False
        while publisher.spooled:
            await asyncio.sleep(0.001)
    await publisher.stop()
    spool.close()


def test_a_spool_is_one_process_s_alone(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool.db")
    with pytest.raises(SpoolError, match="another gateway"):
        Spool(tmp_path / "spool.db")
    first.append([envelope(1)])
    first.close()
    second = Spool(tmp_path / "spool.db")
    assert len(second) == 1
    second.close()


def test_a_spool_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match=r"gateway\.spool_dir"):
        Spool(tmp_path / "file" / "spool.db")


class FakeProducer:
    """Acknowledges when told to; ``errors`` come first."""

    def __init__(self, errors: Sequence[KafkaError] = ()) -> None:
        self.errors = list(errors)
        self.produced: list[bytes] = []
        self.waiting: list[Callable[[KafkaError | None, None], None]] = []

    def produce(self, _topic: str, *, key: bytes, value: bytes, on_delivery: Any) -> None:
        self.produced.append(key + value)
        self.waiting.append(on_delivery)

    def poll(self, timeout_s: float) -> None:
        waiting, self.waiting = self.waiting, []
        for deliver in waiting:
            deliver(self.errors.pop(0) if self.errors else None, None)
        if not waiting:
            Event().wait(0.001)

    def __len__(self) -> int:
        return len(self.waiting)

    def flush(self, timeout_s: float) -> int:
        self.poll(timeout_s)
        return 0


def sender_of(*producers: FakeProducer) -> KafkaSender:
    rest = iter(producers)
    return KafkaSender(lambda: cast(Producer, next(rest)))


def keyed(key: str, n: int) -> Envelope:
    return Envelope("t", key.encode(), str(n).encode())


async def test_a_session_s_events_are_sent_one_after_the_other() -> None:
    producer = FakeProducer([KafkaError(KafkaError._MSG_TIMED_OUT)])
    sender = sender_of(producer)
    with pytest.raises(DeliveryError):
        await sender.send([keyed("a", 1), keyed("a", 2)])
    assert producer.produced == [b"a1"]
    assert await sender.send([keyed("a", 1), keyed("b", 1), keyed("a", 2)]) == []
    assert [p for p in producer.produced[1:] if p.startswith(b"a")] == [b"a1", b"a2"]
    sender.close()


async def test_a_record_refused_for_good_is_told_apart() -> None:
    producer = FakeProducer([KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)])
    sender = sender_of(producer)
    ((refused, _),) = await sender.send([keyed("a", 1), keyed("a", 2)])
    assert refused == keyed("a", 1)
    assert producer.produced == [b"a1", b"a2"]
    sender.close()


async def test_a_producer_that_cannot_go_on_is_replaced() -> None:
    class Dying(FakeProducer):
        def poll(self, timeout_s: float) -> None:
            if len(self.produced) >= 2:
                # One acknowledgement a poll: the second comes after the first was acted on.
                rest, self.waiting = self.waiting[1:], self.waiting[:1]
                super().poll(timeout_s)
                self.waiting += rest
            Event().wait(0.01)

    dead = Dying([KafkaError(KafkaError._FATAL)] * 2)
    fresh = FakeProducer()
    sender = sender_of(dead, fresh)
    both = (sender.send([keyed("a", 1)]), sender.send([keyed("b", 1)]))
    async with asyncio.timeout(10):
        results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(result) for result in results] == [DeliveryError] * 2
    assert await sender.send([keyed("a", 1)]) == []
    assert fresh.produced == [b"a1"]
    sender.close()


def test_acknowledgements_after_the_loop_ended_hurt_nothing() -> None:
    held: list[Callable[[KafkaError | None, None], None]] = []

    class Holding(FakeProducer):
        def poll(self, timeout_s: float) -> None:
            Event().wait(0.001)

        def produce(self, _topic: str, *, key: bytes, value: bytes, on_delivery: Any) -> None:
            held.append(on_delivery)

    async def leave() -> None:
        task = asyncio.create_task(sender.send([keyed("a", 1)]))
        while not held:
            await asyncio.sleep(0)
        task.cancel()

    sender = sender_of(Holding())
    asyncio.run(leave())
    held[0](None, None)
    sender.close()


def test_large_events_are_read_a_few_at_a_time(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "_BATCH_BYTES", 10)
    large = Envelope("t", b"k", b"x" * 6)
    spool.append([large] * 3)
    last_id, some = spool.first(99)
    assert some == [large] * 2
    spool.drop_through(last_id)
    assert spool.first(99)[1] == [large]


async def test_without_a_producer_events_wait_on_disk(spool: Spool) -> None:
    class Nothing(FlakySender):
        async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Refused]:
            raise BrokerError("no client can be made")

    publisher = SpoolingPublisher(Nothing(), spool)
    await publisher.publish([envelope(1)])
    assert not await publisher.flush_once()
    assert publisher.spooled == 1
