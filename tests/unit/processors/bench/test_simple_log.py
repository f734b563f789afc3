from __future__ import annotations

from collections import Counter
from itertools import islice

from processors.bench.log import LogRecord
from processors.bench.plain import PlainAligner
from processors.bench.simple_log import Shape, SimpleLog
from processors.bench.soak import rolling
from streams.contracts import DialogueTurn, TrajectorySegment
from streams.kafka.clients import partition_for
from streams.serde import build_codec
from streams.settings import AlignSettings

CODEC = build_codec()
SETTINGS = AlignSettings()
BEGIN_MS = 1_000_000


def new_log(partitions: int = 2, turns: int = 4) -> SimpleLog:
    return SimpleLog(Shape(turns), partitions, CODEC, BEGIN_MS, records_per_s=100)


def turns_of(records: list[LogRecord]) -> list[DialogueTurn]:
    found = [record.value for record in records if record.side == "turns"]
    return [CODEC.decode(value, DialogueTurn) for value in found if value is not None]


def test_arrivals_follow_at_the_rate() -> None:
    log = new_log()
    records = [record for number in range(6) for record in log.turn("a", number)]
    assert [record.side for record in records] == ["turns"] * 6 + ["feedback"]
    assert [record.arrival_ms - BEGIN_MS for record in records] == [10, 20, 30, 40, 50, 60, 70]
    assert log.at_ms == BEGIN_MS + 70


def test_a_probe_closes_in_every_partition() -> None:
    log = new_log(partitions=3)
    aligners = [PlainAligner(p, "t", "f", CODEC, SETTINGS) for p in range(3)]
    closed: Counter[int] = Counter()
    for record in [*log.turn("open", 0), *log.turn("open", 1), *log.probes("p", 30_000)]:
        topic = "t" if record.side == "turns" else "f"
        at = record.partition
        for _, value in aligners[at].take(topic, record.offset, record.arrival_ms, record.value):
            assert CODEC.decode(value, TrajectorySegment).session_id.startswith("p-")
            closed[at] += 1
    assert closed == {0: 1, 1: 1, 2: 1}


def test_keys_are_where_they_belong() -> None:
    log = new_log(partitions=3)
    for record in [*log.turn("a", 0), *log.turn("b", 0), *log.turn("c", 1)]:
        assert record.partition == partition_for(record.key, 3)


def test_rolling_sessions_talk_at_the_same_time_and_end() -> None:
    turns = turns_of(list(islice(rolling(new_log(turns=6), 10, 6), 2_000)))
    spans: dict[str, list[int]] = {}
    for place, turn in enumerate(turns):
        spans.setdefault(turn.session_id, []).append(place)
    ended = {turn.session_id for turn in turns if turn.session_done}
    lengths = Counter(len(places) for name, places in spans.items() if name in ended)
    assert set(lengths) == {2, 4, 6}
    assert lengths[6] > 200
    middle = len(turns) // 2
    talking = sum(places[0] <= middle <= places[-1] for places in spans.values())
    assert 8 <= talking <= 12
    assert len(spans) - len(ended) <= 10
