"""What ``measure`` makes of what Kafka answers while a cluster starts, and of a slow end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from streams.errors import BrokerError
from streams.lag import groups
from streams.lag.groups import JUDGE, PartitionLag, Stage, measure, members_of
from streams.topics import SEGMENTS

RECORD = SimpleNamespace(error=lambda: None, timestamp=lambda: (1, 77), value=lambda: b"")
STAGE = Stage("s", "group", ("t",))


class Admin:
    """A cluster with one topic of one partition."""

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics={"t": SimpleNamespace(partitions={0: None})})


class Reader:
    """A consumer of the group that gets one answer."""

    def __init__(self, answer: int | KafkaException | SimpleNamespace) -> None:
        self.answer = answer
        self.closed = False

    def committed(self, places: list[TopicPartition], timeout: float) -> Any:
        if isinstance(self.answer, KafkaException):
            raise self.answer
        if isinstance(self.answer, int):
            return [TopicPartition("t", 0, self.answer)]
        return [self.answer]

    def close(self) -> None:
        self.closed = True


class Peek:
    """The consumer that looks for records; ``messages`` are what it gets."""

    def __init__(self, end: int, *messages: Any) -> None:
        self.end = end
        self.messages = iter(messages)

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        return 0, self.end

    def assign(self, places: list[TopicPartition]) -> None:
        pass

    def unassign(self) -> None:
        pass

    def poll(self, timeout: float) -> Any:
        return next(self.messages, None)


def refusal(code: int) -> KafkaException:
    return KafkaException(KafkaError(code))


def measured(readers: list[Reader], peek: Peek | None = None) -> PartitionLag:
    answers = iter(readers)
    (found,) = measure(
        Admin(),  # type: ignore[arg-type]
        Peek(0) if peek is None else peek,  # type: ignore[arg-type]
        {},
        open_group=lambda _: next(answers),  # type: ignore[arg-type,return-value]
        address="h:1",
    )
    return found


@pytest.fixture(autouse=True)
def _one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "STAGES", (STAGE,))
    monkeypatch.setattr(groups, "_RETRY_S", 0.0)


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._TIMED_OUT,
    ],
)
def test_a_coordinator_that_is_still_starting_is_asked_again(code: int) -> None:
    readers = [Reader(refusal(code)), Reader(refusal(code)), Reader(-1001)]
    found = measured(readers)
    assert found == PartitionLag("s", "t", 0, current=None, end=0, lag=0, group="group")
    assert [reader.closed for reader in readers] == [True, True, True]


def test_one_that_never_starts_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "_PATIENCE_S", -1.0)
    reader = Reader(refusal(KafkaError.NOT_COORDINATOR))
    with pytest.raises(BrokerError, match=r"h:1.*still starting, try again"):
        measured([reader])
    assert reader.closed


def test_another_error_is_not_tried_again() -> None:
    readers = [Reader(refusal(KafkaError.GROUP_AUTHORIZATION_FAILED)), Reader(3)]
    with pytest.raises(BrokerError, match="h:1"):
        measured(readers)
    assert [reader.closed for reader in readers] == [True, False]


def test_an_error_of_one_partition_is_no_missing_commit() -> None:
    place = SimpleNamespace(error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), offset=-1001)
    with pytest.raises(BrokerError):
        measured([Reader(place)])


def test_an_end_that_does_not_come_in_time_leaves_the_difference_of_offsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "_PEEK_S", 0.05)
    assert measured([Reader(4)], Peek(9, RECORD)).lag == 5


def test_records_are_counted_up_to_the_end_of_the_partition() -> None:
    eof = SimpleNamespace(error=lambda: KafkaError(KafkaError._PARTITION_EOF))
    assert measured([Reader(4)], Peek(9, RECORD, None, RECORD, eof)).lag == 2


def test_the_judge_is_a_stage_that_is_asked_for() -> None:
    class Topics(Admin):
        def list_topics(self, timeout: float) -> Any:
            one = SimpleNamespace(partitions={0: None})
            return SimpleNamespace(topics={"t": one, SEGMENTS: one})

    asked: list[str] = []

    def open_group(group: str) -> Any:
        asked.append(group)
        return SimpleNamespace(
            committed=lambda places, timeout: [
                TopicPartition(place.topic, place.partition, 2 if group == JUDGE.group else 4)
                for place in places
            ],
            close=lambda: None,
        )

    eof = SimpleNamespace(error=lambda: KafkaError(KafkaError._PARTITION_EOF))
    found = measure(
        Topics(),  # type: ignore[arg-type]
        Peek(4, RECORD, RECORD, eof),  # type: ignore[arg-type]
        {},
        open_group=open_group,
        address="h:1",
        also=(JUDGE,),
    )
    assert asked == ["group", "judge"]
    lags = [(lag.stage, lag.topic, lag.lag) for lag in found]
    assert lags == [("s", "t", 0), ("judge", SEGMENTS, 2)]


def test_the_members_of_its_group_are_counted_too() -> None:
    class Groups:
        def describe_consumer_groups(self, groups: list[str], request_timeout: float) -> Any:
            return {
                group: SimpleNamespace(
                    result=lambda size=size: SimpleNamespace(members=[None] * size)
                )
                for size, group in enumerate(groups)
            }

    assert members_of(Groups(), "h:1") == {"s": 0}  # type: ignore[arg-type]
    assert members_of(Groups(), "h:1", (JUDGE,)) == {"s": 0, "judge": 1}  # type: ignore[arg-type]
