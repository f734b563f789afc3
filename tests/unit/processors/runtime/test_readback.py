from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from processors.runtime.readback import ReadBack
from streams.settings import KafkaSettings


class Message:
    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self._place = (topic, partition, offset)

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._place[2]

    def timestamp(self) -> tuple[int, int]:
        return (2, 0)

    def headers(self) -> None:
        return None

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"


class Client:
    """A consumer that delivers what it is told to, whatever is assigned."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self.messages = list(messages)
        self.assigned: list[Any] = []

    def assign(self, places: list[Any]) -> None:
        self.assigned = places

    def unassign(self) -> None:
        self.assigned = []

    def consume(self, count: int, timeout: float) -> list[Message]:
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken


def test_what_was_on_its_way_from_another_partition_is_never_taken_for_it() -> None:
    reader: Any = ReadBack(KafkaSettings(bootstrap_servers="127.0.0.1:9"))
    reader._consumer = client = Client(
        Message(topic, partition, offset)
        for topic, partition in (("t", 0), ("f", 1), ("t", 1))
        for offset in (4, 5)
    )
    found = list(reader.read("t", 1, [4, 5]))
    assert [(r.topic, r.partition, r.offset) for r in found] == [("t", 1, 4), ("t", 1, 5)]
    assert client.assigned == []
