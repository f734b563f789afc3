"""The inventory as shipped, what its loader refuses, and the planner as a table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams import topics
from streams.errors import TopicError
from streams.resources import resource_path
from streams.serde.schemas import load_schemas
from streams.settings import KafkaSettings
from streams.topics import (
    Change,
    ChangeKind,
    Inventory,
    Topic,
    TopicDescription,
    load_inventory,
    parse_inventory,
    plan,
    with_replication,
)


@pytest.fixture
def loaded() -> dict[str, Any]:
    """The shipped file, to be broken."""
    parsed: dict[str, Any] = yaml.safe_load(resource_path("topics.yaml").read_text("utf-8"))
    return parsed


def entry(loaded: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in loaded["topics"] if item["name"] == name)
    return found


def test_the_shipped_inventory_names_every_topic() -> None:
    assert {topic.name for topic in load_inventory()} == set(topics.NAMES)


def test_every_record_topic_has_a_schema_file() -> None:
    schemas = load_schemas()
    for topic in load_inventory():
        if topic.schema is not None:
            assert schemas.current(topic.schema).record == topic.schema


def test_internal_state_is_compacted_and_has_no_schema() -> None:
    inventory = load_inventory()
    for name in (topics.ALIGN_STATE, topics.REWARD_STATE):
        assert inventory[name].cleanup == "compact"
        assert inventory[name].record_type is None


def test_dialogue_is_stamped_on_arrival_and_nothing_else_is() -> None:
    stamped = {t.name for t in load_inventory() if t.timestamp_type == "LogAppendTime"}
    assert stamped == {topics.TURNS, topics.FEEDBACK}


def test_no_topic_takes_more_than_the_embedded_broker() -> None:
    limit = KafkaSettings().max_message_bytes
    for topic in load_inventory():
        assert int(topic.extra.get("max.message.bytes", "0")) <= limit


def test_a_dead_letter_has_room_for_any_dialogue_record_and_its_frame() -> None:
    inventory = load_inventory()
    room = int(inventory[topics.DEAD_LETTERS].extra["max.message.bytes"])
    for name in (topics.TURNS, topics.FEEDBACK):
        assert int(inventory[name].extra["max.message.bytes"]) * 2 <= room


def _set(name: str, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(loaded: dict[str, Any]) -> None:
        entry(loaded, name)[key] = value

    return edit


def _drop(name: str, key: str) -> Callable[[dict[str, Any]], None]:
    def edit(loaded: dict[str, Any]) -> None:
        del entry(loaded, name)[key]

    return edit


def _drop_topic(loaded: dict[str, Any]) -> None:
    loaded["topics"].remove(entry(loaded, topics.CONTROL))


def _double_topic(loaded: dict[str, Any]) -> None:
    loaded["topics"].append(entry(loaded, topics.CONTROL))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set(topics.TURNS, "partitions", 8), "partitions: must be the same for dialogue.turns"),
        (_set(topics.ALIGN_STATE, "partitions", 1), "feedback_align-state has 1"),
        (_set(topics.REWARD_STATE, "partitions", 2), "reward-state has 2"),
        (_set(topics.TURNS, "partitions", 0), "dialogue.turns: partitions: must be a whole number"),
        (_set(topics.TURNS, "replication", True), "dialogue.turns: replication: must be a whole"),
        (_set(topics.TURNS, "timestamp_type", "CreateTime"), "dialogue.turns: timestamp_type"),
        (_set(topics.TURNS, "timestamp_type", "Never"), "timestamp_type: must be one of"),
        (_set(topics.TURNS, "cleanup", "shred"), "dialogue.turns: cleanup: must be one of"),
        (_set(topics.TURNS, "schema", "Turn"), "dialogue.turns: schema: must be null or one of"),
        (_set(topics.TURNS, "retention_ms", 0), "dialogue.turns: retention_ms: must be"),
        (_set(topics.TURNS, "retention_ms", None), "dialogue.turns: retention_ms: must be"),
        (_set(topics.REWARD_STATE, "retention_ms", 5), "retention_ms: must be null"),
        (_set(topics.TURNS, "doc", "  "), "dialogue.turns: doc: must be text"),
        (_set(topics.TURNS, "retentoin_ms", 5), "dialogue.turns: unknown key retentoin_ms"),
        (_set(topics.TURNS, "config", {"segment.byte": 1}), "config.segment.byte: unknown"),
        (_set(topics.TURNS, "config", {"segment.ms": [1]}), "config.segment.ms: must be a number"),
        (
            _set(topics.TURNS, "config", {"max.message.bytes": "8 MB"}),
            "config.max.message.bytes: must be a whole number",
        ),
        (_set(topics.TURNS, "config", [1]), "config: must be a mapping"),
        (_drop(topics.TURNS, "key"), "dialogue.turns: missing key"),
        (_drop(topics.TURNS, "name"), r"topics\[0\]: missing name"),
        (_drop_topic, "missing topics: pipeline.control"),
        (_double_topic, "named twice: pipeline.control"),
    ],
)
def test_a_broken_inventory_is_refused_by_name(
    loaded: dict[str, Any], edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit(loaded)
    with pytest.raises(TopicError, match=message):
        parse_inventory(loaded)


@pytest.mark.parametrize("broken", [None, [], {"topics": {}}, {"topics": [1]}, {"topic": []}])
def test_a_file_of_another_shape_is_refused(broken: object) -> None:
    with pytest.raises(TopicError):
        parse_inventory(broken)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(TopicError, match=r"cannot read .*mine\.yaml"):
        load_inventory(path)
    path.write_text("topics: [")
    with pytest.raises(TopicError, match=r"mine\.yaml is not valid YAML"):
        load_inventory(path)
    path.write_text("topics: 3")
    with pytest.raises(TopicError, match=r"mine\.yaml: topics: must be a list"):
        load_inventory(path)


def test_parsing_keeps_its_input(loaded: dict[str, Any]) -> None:
    before = copy.deepcopy(loaded)
    parse_inventory(loaded)
    assert loaded == before


def test_an_unknown_topic_is_an_error_of_ours() -> None:
    with pytest.raises(TopicError, match=r"no topic nobody\.knows"):
        load_inventory()["nobody.knows"]


DAY_MS = 86_400_000
TOPIC = Topic(
    name="t",
    key="k",
    schema=None,
    partitions=4,
    replication=1,
    retention_ms=10 * DAY_MS,
    cleanup="delete",
    timestamp_type="CreateTime",
    doc="d",
    extra={"max.message.bytes": "1000000"},
)


def described(topic: Topic, **config: str) -> TopicDescription:
    """A cluster's topic that matches, but for some settings (``_`` for ``.``)."""
    changed = {key.replace("_", "."): value for key, value in config.items()}
    return TopicDescription(
        partitions=topic.partitions,
        replication=topic.replication,
        config={"segment.bytes": "1073741824"} | topic.config | changed,
    )


def changes(topic: Topic, found: TopicDescription) -> list[tuple[str, str | None]]:
    result = plan(Inventory((topic,)), {topic.name: found})
    return [(change.kind.value, change.setting) for change in result.changes]


def test_a_missing_topic_is_created() -> None:
    result = plan(Inventory((TOPIC,)), {})
    assert result.creates == (TOPIC,)
    assert result.alters == {}
    assert result.changes[0].after == "4 x 1, delete, kept 10 days, CreateTime"


def test_a_matching_topic_needs_nothing() -> None:
    assert changes(TOPIC, described(TOPIC)) == []


def test_topics_of_others_are_left_alone() -> None:
    found = {"t": described(TOPIC), "theirs": described(TOPIC)}
    assert plan(Inventory((TOPIC,)), found).changes == ()


FOREVER = replace(TOPIC, retention_ms=-1)
COMPACT = replace(TOPIC, cleanup="compact", retention_ms=None)
BOTH = replace(TOPIC, cleanup="compact,delete")
TUNED = replace(TOPIC, extra={"segment.bytes": "1000", "min.cleanable.dirty.ratio": "0.2"})


@pytest.mark.parametrize(
    ("topic", "found", "expected"),
    [
        (TOPIC, {"retention_ms": str(9 * DAY_MS)}, ("alter", "retention.ms")),
        (TOPIC, {"retention_ms": str(11 * DAY_MS)}, ("refuse", "retention.ms")),
        (TOPIC, {"retention_ms": "-1"}, ("refuse", "retention.ms")),
        (FOREVER, {"retention_ms": "5"}, ("alter", "retention.ms")),
        (TOPIC, {"max_message_bytes": "999"}, ("alter", "max.message.bytes")),
        (TOPIC, {"max_message_bytes": "1000001"}, ("refuse", "max.message.bytes")),
        (
            TOPIC,
            {"message_timestamp_type": "LogAppendTime"},
            ("refuse", "message.timestamp.type"),
        ),
        (TOPIC, {"cleanup_policy": "compact"}, ("refuse", "cleanup.policy")),
        (COMPACT, {"cleanup_policy": "delete"}, ("refuse", "cleanup.policy")),
        (BOTH, {"cleanup_policy": "delete"}, ("refuse", "cleanup.policy")),
        (BOTH, {"cleanup_policy": "compact"}, ("refuse", "cleanup.policy")),
        (TOPIC, {"cleanup_policy": "compact,delete"}, ("alter", "cleanup.policy")),
        (COMPACT, {"cleanup_policy": "delete,compact"}, ("alter", "cleanup.policy")),
        (BOTH, {"cleanup_policy": "delete,compact"}, None),
        (TUNED, {"segment_bytes": "2000"}, ("alter", "segment.bytes")),
        (TUNED, {"segment_bytes": "500"}, ("alter", "segment.bytes")),
        (TUNED, {"min_cleanable_dirty_ratio": "0.20"}, None),
    ],
)
def test_what_becomes_of_a_difference(
    topic: Topic, found: dict[str, str], expected: tuple[str, str] | None
) -> None:
    assert changes(topic, described(topic, **found)) == ([] if expected is None else [expected])


@pytest.mark.parametrize("partitions", [1, 3, 8])
def test_another_number_of_partitions_is_refused(partitions: int) -> None:
    found = replace(described(TOPIC), partitions=partitions)
    assert changes(TOPIC, found) == [("refuse", "partitions")]


def test_fewer_copies_are_noted_and_more_are_fine() -> None:
    assert changes(TOPIC, replace(described(TOPIC), replication=3)) == []
    tripled = replace(TOPIC, replication=3)
    assert changes(tripled, described(TOPIC)) == [("notice", "replication")]


def test_a_setting_that_the_cluster_does_not_show_is_set() -> None:
    found = TopicDescription(partitions=4, replication=1, config=TOPIC.config)
    tuned = replace(TOPIC, extra=dict(TOPIC.extra) | {"segment.ms": "5"})
    assert changes(tuned, found) == [("alter", "segment.ms")]


def test_three_copies_need_two_for_a_write() -> None:
    assert with_replication(Inventory((TOPIC,)), None) == Inventory((TOPIC,))
    assert "min.insync.replicas" not in with_replication(Inventory((TOPIC,)), 2)["t"].config
    tripled = with_replication(Inventory((TOPIC,)), 3)["t"]
    assert tripled.replication == 3
    assert tripled.config["min.insync.replicas"] == "2"
    assert tripled.extra["max.message.bytes"] == "1000000"


def test_more_insync_copies_than_there_are_would_stop_all_writes() -> None:
    tripled = with_replication(Inventory((TOPIC,)), 3)["t"]
    alone = described(TOPIC, min_insync_replicas="1")
    assert changes(tripled, alone) == [("notice", "replication"), ("notice", "min.insync.replicas")]
    assert changes(tripled, replace(alone, replication=3)) == [("alter", "min.insync.replicas")]


def test_one_refusal_refuses_the_plan_and_says_why() -> None:
    other = replace(TOPIC, name="other")
    result = plan(Inventory((other, TOPIC)), {"t": described(TOPIC, retention_ms="-1")})
    assert result.creates == (other,)
    with pytest.raises(TopicError, match=r"t: retention\.ms -1 -> 864000000: records would be"):
        result.raise_if_refused()


def test_a_plan_groups_what_it_alters() -> None:
    result = plan(
        Inventory((TOPIC,)), {"t": described(TOPIC, retention_ms="1", max_message_bytes="1")}
    )
    result.raise_if_refused()
    assert result.alters == {
        "t": {"retention.ms": str(10 * DAY_MS), "max.message.bytes": "1000000"}
    }
    assert result.of_kind(ChangeKind.REFUSE) == ()
    assert (
        Change(
            topic="t",
            kind=ChangeKind.ALTER,
            setting="retention.ms",
            before="1",
            after=str(10 * DAY_MS),
        )
        in result.changes
    )
