from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from streams.errors import ReplayError
from streams.kafka.places import KafkaLog, Place, Range, parse_place, ranges_between, resolve

NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("2026-11-01", 1_793_491_200_000),
        ("2026-11-01T08:30:00Z", 1_793_521_800_000),
        ("2026-11-01T10:30:00+02:00", 1_793_521_800_000),
        ("2026-11-01T08:30:00.250Z", 1_793_521_800_250),
        ("PT24H", NOW_MS - DAY_MS),
        ("P1DT2H3M4S", NOW_MS - DAY_MS - 7_384_000),
        ("P7D", NOW_MS - 7 * DAY_MS),
        ("90s", NOW_MS - 90_000),
        ("15m", NOW_MS - 900_000),
        ("24h", NOW_MS - DAY_MS),
        ("7d", NOW_MS - 7 * DAY_MS),
        ("earliest", None),
        ("latest", None),
    ],
)
def test_times_and_durations(text: str, time_ms: int | None) -> None:
    assert parse_place(text, NOW_MS).time_ms == time_ms


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yesterday", "no place in the log"),
        ("2026-13-01", "no place in the log"),
        ("P", "no place in the log"),
        ("PT", "no place in the log"),
        ("", "no place in the log"),
        ("-3d", "no place in the log"),
        ("2026-11-01T08:30:00", "which time zone"),
        ("nowhere.csv", "cannot read nowhere.csv"),
    ],
)
def test_what_cannot_be_read_says_what_can(text: str, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        parse_place(text, NOW_MS)


def test_offsets_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "offsets.csv"
    path.write_text("a,0,5\n\nb, 1, 7\n", encoding="utf-8")
    assert parse_place(str(path), NOW_MS).offsets == {("a", 0): 5, ("b", 1): 7}
    for bad in ("a,0", "a,x,5", "a,0,-1", "a,0,5,6"):
        path.write_text(f"a,0,5\n{bad}\n", encoding="utf-8")
        with pytest.raises(ReplayError, match="line 2"):
            parse_place(str(path), NOW_MS)


class Log:
    """A topic of two partitions, 10 to 20 and 0 to 5, with a record each 100 ms."""

    ENDS = ((10, 20), (0, 5))

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        return self.ENDS[place.partition]

    def offsets_for_times(
        self, places: list[TopicPartition], timeout: float
    ) -> list[TopicPartition]:
        (asked,) = places
        low, high = self.ENDS[asked.partition]
        offset = max(low, -(-asked.offset // 100))
        return [TopicPartition(asked.topic, asked.partition, offset if offset < high else -1)]


def resolved(place: Place, *, is_end: bool = False) -> list[int]:
    log: Any = Log()
    found = resolve(KafkaLog(log), {"t": 2}, place, is_end=is_end)
    return [found["t", 0], found["t", 1]]


def test_a_place_in_each_partition() -> None:
    assert resolved(Place("earliest")) == [10, 0]
    assert resolved(Place("latest")) == [20, 5]
    assert resolved(Place("x", time_ms=1_150)) == [12, 5]
    assert resolved(Place("x", time_ms=-5)) == [10, 0]
    offsets = {("t", 0): 13, ("t", 1): 2}
    assert resolved(Place("x.csv", offsets=offsets)) == [13, 2]
    assert resolved(Place("x.csv", offsets={("t", 0): 13}), is_end=True) == [13, 5]


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({("t", 0): 13}, "no offset for t partition 1"),
        ({("t", 0): 9, ("t", 1): 0}, "begins at offset 10: 9 has been deleted"),
        ({("t", 0): 21, ("t", 1): 0}, "ends at offset 20"),
    ],
)
def test_offsets_that_the_log_does_not_have(offsets: dict[tuple[str, int], int], said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        resolved(Place("x.csv", offsets=offsets))


def test_ranges_of_nothing_are_refused() -> None:
    starts, ends = {("t", 0): 5, ("t", 1): 5}, {("t", 0): 5, ("t", 1): 2}
    with pytest.raises(ReplayError, match="no record lies between"):
        ranges_between(starts, ends)
    found = ranges_between(starts, {("t", 0): 7, ("t", 1): 2})
    assert found == [Range("t", 0, 5, 7), Range("t", 1, 5, 5)]
