"""``clawstream reward shadow``: another formula beside the real one, on the same segments.

A shadow is a reward worker with other settings, or of another version of clawstream, in a group
of its own, with a state of its own and topics of its own (``trajectory.scored-shadow-NAME`` and
so on): nothing it does reaches the learner. ``clawstream reward compare NAME`` says how its
rewards differ.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from processors.reward.agent import STAGE, RewardTopics
from processors.reward.app import build_spec
from processors.reward.explain import read_weights
from processors.runtime.process import run_worker
from streams.errors import ClawstreamError, RewardError
from streams.kafka.admin import Admin, apply_inventory
from streams.kafka.clients import resolve_bootstrap
from streams.metrics import ProcessorMetrics
from streams.process import argument_parser, configure_logging, report
from streams.settings import Settings, load_settings
from streams.topics import (
    DEAD_LETTERS,
    REVIEWS,
    REWARD_STATE,
    SCORED,
    SEGMENTS,
    Inventory,
    load_inventory,
    with_replication,
)

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


@dataclass(frozen=True, slots=True)
class Shadow:
    """The names of one shadow.

    Raises:
        RewardError: The name cannot be part of a topic's.
    """

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RewardError(
                f"a shadow's name is of a-z, 0-9 and -, at most 41 of them, not {self.name!r}"
            )

    @property
    def group(self) -> str:
        """Its consumer group, and the beginning of its transactional ids."""
        return f"reward-shadow-{self.name}"

    @property
    def changelog(self) -> str:
        """Its state."""
        return self._of(REWARD_STATE)

    @property
    def topics(self) -> RewardTopics:
        """What it reads, and where it writes."""
        return RewardTopics(
            segments=SEGMENTS,
            scored=self._of(SCORED),
            reviews=self._of(REVIEWS),
            dead_letters=self._of(DEAD_LETTERS),
        )

    def inventory(self, whole: Inventory, partitions: int) -> Inventory:
        """The topics of its own, like those of the real worker."""
        own = (SCORED, REVIEWS, DEAD_LETTERS, REWARD_STATE)
        return Inventory(
            tuple(
                replace(whole[topic], name=self._of(topic), partitions=partitions) for topic in own
            )
        )

    @property
    def owned(self) -> tuple[str, ...]:
        """The topics of its own."""
        return tuple(map(self._of, (SCORED, REVIEWS, DEAD_LETTERS, REWARD_STATE)))

    def _of(self, topic: str) -> str:
        return f"{topic}-shadow-{self.name}"


def main(arguments: Sequence[str]) -> int:
    """Run a shadow until SIGTERM or SIGINT.

    Returns:
        The exit code, as the reward worker's.
    """
    parser = argument_parser("reward shadow", "Score all segments with other settings as well.")
    parser.add_argument("name", help="names its topics, its group and its state")
    parser.add_argument(
        "--weights", type=Path, default=None, help="YAML with keys of reward: that differ"
    )
    parser.add_argument(
        "--remove", action="store_true", help="delete its topics and its group instead of running"
    )
    given = parser.parse_args(list(arguments))
    configure_logging()
    for chatty in ("aiokafka", "faust", "mode"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    metrics = ProcessorMetrics(STAGE)
    try:
        settings = with_weights(load_settings(given.config), given.weights)
        shadow = Shadow(given.name)
        if given.remove:
            return remove(shadow, settings)
        make_topics(shadow, settings)
        spec = build_spec(
            settings,
            metrics,
            app_id=shadow.group,
            topics=shadow.topics,
            changelog=shadow.changelog,
        )
    except ClawstreamError as error:
        return report(error)
    return run_worker(spec, settings, metrics)


def with_weights(settings: Settings, weights: Path | None) -> Settings:
    """``settings`` for a shadow: other weights, and no port or name of the real worker's."""
    # A static member of the same name in another group is fine; a port can be had once only.
    worker = settings.worker.model_copy(update={"reward_web_port": 0})
    changed: dict[str, object] = {"worker": worker}
    if weights is not None:
        changed["reward"] = read_weights(weights, settings.reward)
    return settings.model_copy(update=changed)


def remove(shadow: Shadow, settings: Settings) -> int:
    """Delete what a shadow that no longer runs has left in Kafka.

    Returns:
        The exit code.

    Raises:
        TopicError: It still runs, or Kafka refuses.
        BrokerError: Kafka cannot be reached.
    """
    admin = Admin(settings.kafka, resolve_bootstrap(settings))
    gone = admin.delete(shadow.owned, group=shadow.group)
    print(f"deleted {', '.join(gone)}" if gone else f"there is nothing of a shadow {shadow.name}")
    return 0


def make_topics(shadow: Shadow, settings: Settings) -> None:
    """Make the shadow's topics, as many partitions as there are segments' ones."""
    bootstrap = resolve_bootstrap(settings)
    admin = Admin(settings.kafka, bootstrap)
    admin.require((SEGMENTS, SCORED))
    segments = admin.describe((SEGMENTS,))[SEGMENTS]
    whole = with_replication(load_inventory(), segments.replication)
    # Its state has a partition for each of the segments'; trajectory.scored may have been widened.
    apply_inventory(settings.kafka, bootstrap, shadow.inventory(whole, segments.partitions))


__all__ = ["Shadow", "main", "make_topics", "with_weights"]
