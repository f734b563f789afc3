from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from processors.runtime import views
from processors.runtime.status import OpenSession, ProcessorStatus
from processors.runtime.views import PartitionView, TopicView, WorkerView

NOW_MS = 1_800_000_000_000
OLDEST = OpenSession(
    policy="default", session_id="s1", since_ms=NOW_MS - 65_000, due_ms=NOW_MS + 9_500
)
STATUS = ProcessorStatus(
    clock_ms=NOW_MS - 1_500,
    sessions=12_345,
    open_sessions=7,
    oldest_open=OLDEST,
    next_due_ms=NOW_MS + 9_500,
    state_entries=12_345,
    state_bytes=5 * 1024 * 1024,
)
TURNS = TopicView(
    topic="dialogue.turns", applied_offset=41, end_offset=43, lag_records=1, buffered_records=0
)


def partition(status: ProcessorStatus = STATUS, number: int = 3) -> PartitionView:
    return views.partition_view(number, status, [TURNS], NOW_MS, last_transaction_s=0.0123)


def worker(*partitions: PartitionView, restoring: tuple[int, ...] = ()) -> WorkerView:
    return WorkerView(
        processor="feedback_align",
        application="group-1",
        version="1.2.3",
        now_ms=NOW_MS,
        restoring=restoring,
        partitions=partitions,
    )


class Reader(HTMLParser):
    """The text of a page, its tags, and that every tag is closed where it should be."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(*partitions: PartitionView, restoring: tuple[int, ...] = ()) -> str:
    """What a person reads."""
    return " ".join(Reader(views.as_html(worker(*partitions, restoring=restoring))).text.split())


def test_a_person_reads_where_each_partition_stands() -> None:
    text = shown(partition(), partition(number=4), restoring=(5, 6))
    assert "feedback_align worker" in text
    assert "clawstream 1.2.3 · group group-1 · 2 partitions" in text
    assert "restoring 5, 6" in text
    assert "Partition 3" in text
    assert "Partition 4" in text
    assert "2027-01-15 07:59:58" in text
    assert "1.5 s" in text
    assert "7 open of 12,345" in text
    assert "12,345 entries, 5.0 MiB" in text
    assert "12 ms" in text
    assert "dialogue.turns" in text
    assert (
        "Oldest open session: default / s1, since 2027-01-15 07:58:55 (1 min 5 s), due in 9.5 s."
    ) in text


def test_a_machine_reads_the_same() -> None:
    found = json.loads(views.as_json(worker(partition(), restoring=(5,))))
    assert (found["processor"], found["version"], found["restoring"]) == (
        "feedback_align",
        "1.2.3",
        [5],
    )
    (one,) = found["partitions"]
    assert one["partition"] == 3
    assert one["event_time_lag_ms"] == 1_500
    assert one["overdue_ms"] == 0
    assert one["status"]["oldest_open"] == {
        "policy": "default",
        "session_id": "s1",
        "since_ms": NOW_MS - 65_000,
        "due_ms": NOW_MS + 9_500,
    }
    assert one["topics"] == [
        {
            "topic": "dialogue.turns",
            "applied_offset": 41,
            "end_offset": 43,
            "lag_records": 1,
            "buffered_records": 0,
        }
    ]


def test_what_is_not_known_yet_is_not_shown_as_zero() -> None:
    empty = ProcessorStatus(
        clock_ms=None,
        sessions=0,
        open_sessions=0,
        oldest_open=None,
        next_due_ms=None,
        state_entries=0,
        state_bytes=0,
    )
    bare = replace(
        partition(empty),
        topics=(replace(TURNS, applied_offset=None, end_offset=None, lag_records=None),),
        last_transaction_s=None,
    )
    text = shown(bare)
    assert "clock–event-time lag–next due–" in text
    assert "state0 entries, 0 Blast transaction–" in text
    assert "No session is open." in text
    assert "dialogue.turns–––0" in text
    assert json.loads(views.as_json(worker(bare)))["partitions"][0]["event_time_lag_ms"] is None


def test_a_worker_without_partitions_says_so() -> None:
    assert "No partitions are assigned" in shown()


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "</b></section><h1>owned",
        '"><img src=x onerror=alert(1)>',
        "&lt;b&gt;",
        "a\u202egnp.exe\x00\n\u2028",
        "ü" * 5_000,
    ],
)
def test_ids_from_outside_stay_text(hostile: str) -> None:
    status = replace(STATUS, oldest_open=replace(OLDEST, session_id=hostile, policy=hostile))
    plain = Reader(views.as_html(worker(partition())))
    page = views.as_html(worker(partition(status)))
    read = Reader(page)
    assert read.tags == plain.tags
    assert not any(c in page for c in "\u202e\x00\u2028")
    assert len(read.text) < len(plain.text) + 2 * (views.MAX_ID_CHARACTERS * 6 + 1)
    if hostile.isprintable() and len(hostile) < views.MAX_ID_CHARACTERS:
        assert read.text.count(hostile) == 2
    ids = json.loads(views.as_json(worker(partition(status))))["partitions"][0]["status"]
    assert ids["oldest_open"]["session_id"] == hostile


def test_names_of_topics_and_groups_stay_text_too() -> None:
    one = replace(partition(), topics=(replace(TURNS, topic="<i>topic"),))
    page = views.as_html(replace(worker(one), application="<i>group", processor="<i>name"))
    assert Reader(page).tags.count("i") == 0
    for name in ("topic", "group", "name"):
        assert f"&lt;i&gt;{name}" in page


def test_what_is_long_overdue_is_marked() -> None:
    def page(late_ms: int) -> str:
        status = replace(STATUS, next_due_ms=NOW_MS - late_ms)
        assert views.overdue_ms(status, NOW_MS) == late_ms
        return views.as_html(worker(partition(status)))

    assert 'class="late"' not in page(views.LATE_MS)
    assert 'class="late"' in page(views.LATE_MS + 1)
    assert "1 h 1 min ago" in page(3_660_000)
    assert "0.0 s ago" in page(0)


def test_a_clock_that_is_behind_the_log_shows_no_negative_spans() -> None:
    early_ms = NOW_MS - 10_000_000
    assert views.oldest_open_ms(STATUS, early_ms) == 0
    assert views.event_time_lag_ms(STATUS, early_ms) == 0
    assert views.overdue_ms(STATUS, early_ms) == 0


@pytest.mark.parametrize(
    ("span_ms", "said"),
    [
        (0, "0.0 s"),
        (9_999, "10.0 s"),
        (10_000, "10 s"),
        (59_999, "59 s"),
        (60_000, "1 min 0 s"),
        (3_599_999, "59 min 59 s"),
        (3_600_000, "1 h 0 min"),
        (90_000_000, "1 d 1 h"),
        (86_400_000_000, "1,000 d 0 h"),
    ],
)
def test_spans_are_said_in_two_units(span_ms: int, said: str) -> None:
    status = replace(STATUS, clock_ms=NOW_MS - span_ms)
    assert f"event-time lag{said}next due" in shown(partition(status))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1_023, "1,023 B"),
        (1_024, "1.0 KiB"),
        (3 * 1024**2, "3.0 MiB"),
        (2_500 * 1024**3, "2,500.0 GiB"),
    ],
)
def test_sizes_are_said_in_a_fitting_unit(size: int, said: str) -> None:
    status = replace(STATUS, state_entries=1, state_bytes=size)
    assert f"state1 entry, {said}last" in shown(partition(status))


def test_times_that_no_calendar_has_are_shown_as_numbers() -> None:
    status = replace(STATUS, clock_ms=10**18)
    assert "1,000,000,000,000,000,000 ms" in shown(partition(status))
    assert views.event_time_lag_ms(status, NOW_MS) == 0


@pytest.mark.parametrize(
    ("accept", "query", "html"),
    [
        ("text/html,application/xhtml+xml,*/*;q=0.8", {}, True),
        ("*/*", {}, False),
        ("", {}, False),
        ("application/json", {}, False),
        ("application/json", {"format": "html"}, True),
        ("Text/HTML", {}, True),
        ("text/html", {"format": "json"}, False),
        ("text/html", {"format": "else"}, False),
    ],
)
def test_browsers_get_the_page_and_machines_json(
    accept: str, query: dict[str, str], html: bool
) -> None:
    assert views.wants_html(accept, query) is html


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = views.as_html(worker(partition()))
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    assert "viewport" in page
