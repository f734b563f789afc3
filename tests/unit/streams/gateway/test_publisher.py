from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from streams.errors import SpoolError
from streams.gateway.publisher import DeliveryError, Refused, SpoolingPublisher
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
