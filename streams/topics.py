"""The topic inventory (``topics.yaml``) and what it would take to make a cluster match it.

Everything here is pure but :func:`load_inventory`, which reads the file.
:mod:`streams.kafka.admin` describes clusters and carries plans out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from streams.contracts import RECORD_TYPES, Record
from streams.errors import SettingsError, TopicError
from streams.resources import resource_path
from streams.yamlfile import read_yaml

TURNS = "dialogue.turns"
FEEDBACK = "dialogue.feedback"
SEGMENTS = "trajectory.segments"
SCORED = "trajectory.scored"
REVIEWS = "reward.reviews"
VERSIONS = "model.versions"
DEAD_LETTERS = "pipeline.dead_letters"
CONTROL = "pipeline.control"
ALIGN_STATE = "feedback_align-state"
REWARD_STATE = "reward-state"

NAMES: tuple[str, ...] = (
    TURNS,
    FEEDBACK,
    SEGMENTS,
    SCORED,
    REVIEWS,
    VERSIONS,
    DEAD_LETTERS,
    CONTROL,
    ALIGN_STATE,
    REWARD_STATE,
)
"""Every topic that clawstream's processes name."""

COPARTITIONED: tuple[tuple[str, ...], ...] = (
    (TURNS, FEEDBACK, ALIGN_STATE),
    (SEGMENTS, SCORED, REWARD_STATE),
)
"""Groups of topics that are handled partition by partition, so must have as many each."""

ARRIVAL_STAMPED: tuple[str, ...] = (TURNS, FEEDBACK)
"""Topics whose Kafka timestamp is the arrival: it is the aligner's clock."""

RETENTION_MS = "retention.ms"
CLEANUP_POLICY = "cleanup.policy"
TIMESTAMP_TYPE = "message.timestamp.type"
MIN_INSYNC_REPLICAS = "min.insync.replicas"

_FOREVER = -1
_TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")
_CLEANUPS = ("delete", "compact", "compact,delete")

# Settings that lose records, or refuse records that are taken now, when they shrink.
_GROW_ONLY: Mapping[str, str] = {
    RETENTION_MS: "records would be deleted",
    "retention.bytes": "records would be deleted",
    "delete.retention.ms": "a slow reader could miss deletions",
    "max.message.bytes": "records that fit now would be refused",
}
_FREE = frozenset(
    {
        "compression.type",
        "max.compaction.lag.ms",
        "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms",
        MIN_INSYNC_REPLICAS,
        "segment.bytes",
        "segment.ms",
    }
)
_EXTRA = (_FREE | _GROW_ONLY.keys()) - {RETENTION_MS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic as it should be.

    Attributes:
        name: Its name.
        key: What its records are keyed by, in words.
        schema: The record class its values hold; None for internal state.
        partitions: How many, for its whole life.
        replication: Copies of each partition.
        retention_ms: How long records are kept; -1 for ever; None if compacted only.
        cleanup: ``delete``, ``compact`` or ``compact,delete``.
        timestamp_type: ``CreateTime`` or ``LogAppendTime``.
        doc: What it is for.
        extra: Further settings, by Kafka's names.
    """

    name: str
    key: str
    schema: str | None
    partitions: int
    replication: int
    retention_ms: int | None
    cleanup: str
    timestamp_type: str
    doc: str
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, str]:
        """All of its settings, by Kafka's names."""
        config = {CLEANUP_POLICY: self.cleanup, TIMESTAMP_TYPE: self.timestamp_type}
        if self.retention_ms is not None:
            config[RETENTION_MS] = str(self.retention_ms)
        return config | dict(self.extra)

    @property
    def record_type(self) -> type[Record] | None:
        """The class of its values; None for internal state."""
        return _RECORDS[self.schema] if self.schema is not None else None


@dataclass(frozen=True, slots=True)
class Inventory:
    """Every topic, in the file's order."""

    topics: tuple[Topic, ...]

    def __iter__(self) -> Iterator[Topic]:
        return iter(self.topics)

    def __getitem__(self, name: str) -> Topic:
        for topic in self.topics:
            if topic.name == name:
                return topic
        raise TopicError(f"no topic {name} in the inventory")


_RECORDS: Mapping[str, type[Record]] = {record.__name__: record for record in RECORD_TYPES}


def load_inventory(path: Path | None = None) -> Inventory:
    """Read the inventory.

    Args:
        path: A file of this form; the one that is shipped if None.

    Raises:
        TopicError: It cannot be read, a key is missing, unknown or unusable (the message
            names it), or topics that belong together differ in partitions.
    """
    source = path or Path("topics.yaml")
    try:
        source = path or resource_path("topics.yaml")
        loaded = read_yaml(source)
    except OSError as error:
        raise TopicError(f"cannot read {source}: {error.strerror or error}") from error
    except SettingsError as error:
        raise TopicError(str(error)) from error
    try:
        return parse_inventory(loaded)
    except TopicError as error:
        raise TopicError(f"{source}: {error}") from None


def parse_inventory(loaded: object) -> Inventory:
    """The inventory that a loaded file describes.

    Raises:
        TopicError: As :func:`load_inventory`.
    """
    if not isinstance(loaded, dict) or loaded.keys() != {"topics"}:
        raise TopicError("must hold one key, topics")
    entries = loaded["topics"]
    if not isinstance(entries, list):
        raise TopicError("topics: must be a list")
    topics = tuple(_Entry(index, entry).topic() for index, entry in enumerate(entries))
    _check_names([topic.name for topic in topics])
    inventory = Inventory(topics)
    _check_clock(inventory)
    _check_copartitioning(inventory)
    return inventory


class _Entry:
    """One entry of the file, checked key by key."""

    _REQUIRED = frozenset(
        {
            "name",
            "key",
            "schema",
            "partitions",
            "replication",
            "retention_ms",
            "cleanup",
            "timestamp_type",
            "doc",
        }
    )

    def __init__(self, index: int, entry: object) -> None:
        if not isinstance(entry, dict):
            raise TopicError(f"topics[{index}]: must be a mapping")
        self._entry: dict[Any, Any] = entry
        self._where = str(entry.get("name", f"topics[{index}]"))
        missing = self._REQUIRED - entry.keys()
        if missing:
            raise TopicError(f"{self._where}: missing {', '.join(sorted(missing))}")
        unknown = entry.keys() - self._REQUIRED - {"config"}
        if unknown:
            raise TopicError(f"{self._where}: unknown key {', '.join(sorted(map(str, unknown)))}")

    def topic(self) -> Topic:
        cleanup = self._choice("cleanup", _CLEANUPS)
        return Topic(
            name=self._text("name"),
            key=self._text("key"),
            schema=self._schema(),
            partitions=self._count("partitions"),
            replication=self._count("replication"),
            retention_ms=self._retention(cleanup),
            cleanup=cleanup,
            timestamp_type=self._choice("timestamp_type", _TIMESTAMP_TYPES),
            doc=self._text("doc"),
            extra=self._config(),
        )

    def _error(self, key: str, problem: str) -> TopicError:
        return TopicError(f"{self._where}: {key}: {problem}")

    def _text(self, key: str) -> str:
        value = self._entry[key]
        if not isinstance(value, str) or not value.strip():
            raise self._error(key, f"must be text, not {value!r}")
        return value

    def _count(self, key: str) -> int:
        value = self._entry[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(key, f"must be a whole number above 0, not {value!r}")
        return value

    def _choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self._entry[key]
        if value not in allowed:
            raise self._error(key, f"must be one of {' | '.join(allowed)}, not {value!r}")
        return str(value)

    def _schema(self) -> str | None:
        value = self._entry["schema"]
        if value is not None and value not in _RECORDS:
            raise self._error("schema", f"must be null or one of {', '.join(_RECORDS)}")
        return value if value is None else str(value)

    def _retention(self, cleanup: str) -> int | None:
        value = self._entry["retention_ms"]
        if "delete" not in cleanup:
            if value is not None:
                raise self._error("retention_ms", "must be null where cleanup is compact")
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < _FOREVER or value == 0:
            raise self._error("retention_ms", f"must be milliseconds or -1, not {value!r}")
        return value

    def _config(self) -> dict[str, str]:
        value = self._entry.get("config", {})
        if not isinstance(value, dict):
            raise self._error("config", "must be a mapping")
        for key, setting in value.items():
            if key not in _EXTRA:
                raise self._error(
                    f"config.{key}", f"unknown; known are {', '.join(sorted(_EXTRA))}"
                )
            if isinstance(setting, bool) or not isinstance(setting, int | float | str):
                raise self._error(f"config.{key}", f"must be a number or text, not {setting!r}")
            if key in _GROW_ONLY and not isinstance(setting, int):
                raise self._error(f"config.{key}", f"must be a whole number, not {setting!r}")
        return {str(key): str(setting) for key, setting in value.items()}


def _check_names(names: list[str]) -> None:
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise TopicError(f"named twice: {', '.join(doubled)}")
    missing = [name for name in NAMES if name not in names]
    if missing:
        raise TopicError(f"missing topics: {', '.join(missing)}")


def _check_clock(inventory: Inventory) -> None:
    for name in ARRIVAL_STAMPED:
        if inventory[name].timestamp_type != "LogAppendTime":
            raise TopicError(
                f"{name}: timestamp_type: must be LogAppendTime, for arrival is the aligner's clock"
            )


def _check_copartitioning(inventory: Inventory) -> None:
    for group in COPARTITIONED:
        counts = {name: inventory[name].partitions for name in group}
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{name} has {count}" for name, count in counts.items())
            raise TopicError(f"partitions: must be the same for {', '.join(group)}; {found}")


class ChangeKind(StrEnum):
    """What becomes of one difference between inventory and cluster."""

    CREATE = "create"
    ALTER = "alter"
    REFUSE = "refuse"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        topic: Where.
        kind: What becomes of it.
        setting: Kafka's name of the setting, ``partitions`` or ``replication``; None for a
            topic to be created.
        before: The cluster's value.
        after: The inventory's value; for a topic to be created, what it will be, in words.
        reason: Why it is refused or only noted.
    """

    topic: str
    kind: ChangeKind
    setting: str | None = None
    before: str | None = None
    after: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """One topic as the cluster has it; ``config`` holds every effective setting."""

    partitions: int
    replication: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """What it takes to make a cluster match an inventory."""

    inventory: Inventory
    changes: tuple[Change, ...]

    def of_kind(self, kind: ChangeKind) -> tuple[Change, ...]:
        """The changes of one kind, in order."""
        return tuple(change for change in self.changes if change.kind is kind)

    @property
    def creates(self) -> tuple[Topic, ...]:
        """The topics to create, as they should be."""
        return tuple(self.inventory[change.topic] for change in self.of_kind(ChangeKind.CREATE))

    @property
    def alters(self) -> dict[str, dict[str, str]]:
        """Settings to change, by topic."""
        found: dict[str, dict[str, str]] = {}
        for change in self.of_kind(ChangeKind.ALTER):
            assert change.setting is not None
            assert change.after is not None
            found.setdefault(change.topic, {})[change.setting] = change.after
        return found

    def raise_if_refused(self) -> None:
        """Let nothing be applied while something is refused.

        Raises:
            TopicError: Something is; names each with its reason.
        """
        refused = self.of_kind(ChangeKind.REFUSE)
        if refused:
            lines = [
                f"  {item.topic}: {item.setting} {item.before} -> {item.after}: {item.reason}"
                for item in refused
            ]
            raise TopicError(
                "nothing was changed, for the cluster differs from the inventory in what cannot "
                "be changed without loss:\n" + "\n".join(lines) + "\nGive the inventory the "
                "cluster's values, or move to new topics"
            )


def with_replication(inventory: Inventory, replication: int | None) -> Inventory:
    """The inventory with this replication for all topics (as it is if None).

    From three copies on, a write needs two of them, so that the loss of one broker neither
    loses an acknowledged record nor stops the pipeline.
    """
    if replication is None:
        return inventory
    insync = {MIN_INSYNC_REPLICAS: "2"} if replication >= 3 else {}
    return Inventory(
        tuple(
            replace(topic, replication=replication, extra=insync | dict(topic.extra))
            for topic in inventory
        )
    )


def plan(inventory: Inventory, cluster: Mapping[str, TopicDescription]) -> TopicPlan:
    """Compare an inventory with what a cluster has.

    Topics that the inventory does not name are left alone and not mentioned.

    Args:
        inventory: How it should be.
        cluster: The topics there are, by name.
    """
    changes: list[Change] = []
    for topic in inventory:
        found = cluster.get(topic.name)
        if found is None:
            changes.append(Change(topic=topic.name, kind=ChangeKind.CREATE, after=_summary(topic)))
        else:
            changes.extend(_compare(topic, found))
    return TopicPlan(inventory, tuple(changes))


def _summary(topic: Topic) -> str:
    kept = {None: "", _FOREVER: ", kept for ever"}.get(
        topic.retention_ms, f", kept {(topic.retention_ms or 0) / 86_400_000:g} days"
    )
    return (
        f"{topic.partitions} x {topic.replication}, {topic.cleanup}{kept}, {topic.timestamp_type}"
    )


def _compare(topic: Topic, found: TopicDescription) -> Iterator[Change]:
    if topic.partitions != found.partitions:
        yield _change(
            topic,
            "partitions",
            found.partitions,
            topic.partitions,
            ChangeKind.REFUSE,
            "keys would move to other partitions and co-partitioned topics would part",
        )
    if found.replication < topic.replication:
        yield _change(
            topic,
            "replication",
            found.replication,
            topic.replication,
            ChangeKind.NOTICE,
            "add copies with Kafka's own reassignment tool",
        )
    for setting, after in topic.config.items():
        before = found.config.get(setting)
        if before is None or not _same(before, after):
            reason = _objection(setting, before, after)
            kind = ChangeKind.ALTER if reason is None else ChangeKind.REFUSE
            if setting == MIN_INSYNC_REPLICAS and int(after) > found.replication:
                kind, reason = ChangeKind.NOTICE, "more than its copies; no write would be taken"
            yield _change(topic, setting, before, after, kind, reason)


def _change(
    topic: Topic,
    setting: str,
    before: object,
    after: object,
    kind: ChangeKind,
    reason: str | None,
) -> Change:
    return Change(
        topic=topic.name,
        kind=kind,
        setting=setting,
        before=None if before is None else str(before),
        after=str(after),
        reason=reason,
    )


def _same(before: str, after: str) -> bool:
    if before == after:
        return True
    try:
        return float(before) == float(after)
    except ValueError:
        return _policies(before) == _policies(after)


def _policies(value: str) -> frozenset[str]:
    return frozenset(part.strip() for part in value.split(","))


def _objection(setting: str, before: str | None, after: str) -> str | None:
    """Why a setting must not change so; None if nothing is lost by it."""
    if setting == TIMESTAMP_TYPE:
        return "timestamps would mean two things in one log; make a new topic"
    if before is None:
        return None
    if setting == CLEANUP_POLICY:
        added = _policies(after) - _policies(before)
        return f"records would be lost to {' and '.join(sorted(added))}" if added else None
    if setting in _GROW_ONLY and _amount(after) < _amount(before):
        return _GROW_ONLY[setting]
    return None


def _amount(value: str) -> float:
    amount = float(value)
    return float("inf") if amount == _FOREVER else amount


__all__ = [
    "ALIGN_STATE",
    "ARRIVAL_STAMPED",
    "CONTROL",
    "COPARTITIONED",
    "Change",
    "ChangeKind",
    "DEAD_LETTERS",
    "FEEDBACK",
    "Inventory",
    "NAMES",
    "REVIEWS",
    "REWARD_STATE",
    "SCORED",
    "SEGMENTS",
    "TURNS",
    "Topic",
    "TopicDescription",
    "TopicPlan",
    "VERSIONS",
    "load_inventory",
    "parse_inventory",
    "plan",
    "with_replication",
]
