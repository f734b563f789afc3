"""Where a partition ends, asked of one that was only just made."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from streams.errors import BrokerError
from streams.kafka import reading


class Refusing:
    """Refuses ``times`` times, then says where partitions end."""

    def __init__(self, code: int, times: int) -> None:
        self._code = code
        self.left = times

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        if self.left:
            self.left -= 1
            raise KafkaException(KafkaError(self._code))
        return 3, 7


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    ],
)
def test_a_partition_without_leader_is_asked_again(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PAUSE_S", 0.0)
    consumer: Any = Refusing(code, 2)
    assert reading.offset_range(consumer, "t", 0) == (3, 7)


def test_it_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PAUSE_S", 0.0)
    monkeypatch.setattr(reading, "_TIMEOUT_S", 0.01)
    consumer: Any = Refusing(KafkaError._UNKNOWN_PARTITION, 10**9)
    with pytest.raises(BrokerError, match="cannot tell where t partition 0 ends"):
        reading.offset_range(consumer, "t", 0)


def test_what_does_not_pass_is_an_error_at_once() -> None:
    consumer: Any = Refusing(KafkaError._TRANSPORT, 10**9)
    with pytest.raises(BrokerError):
        reading.offset_range(consumer, "t", 0)
    assert consumer.left == 10**9 - 1
