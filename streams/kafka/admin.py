"""Describes a cluster's topics and carries topic plans out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from streams.errors import BrokerError, TopicError
from streams.kafka.clients import describe_error, make_admin
from streams.topics import (
    Inventory,
    TopicDescription,
    TopicPlan,
    plan,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from streams.settings import KafkaSettings

DEFAULT_TIMEOUT_S = 20.0
_ATTEMPT_S = 2.0
_POLL_S = 0.05


class Admin:
    """Topic administration of one cluster.

    Args:
        kafka: How to reach it.
        bootstrap_servers: Where it is.
        timeout_s: How long each call may take.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        bootstrap_servers: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._address = bootstrap_servers
        self._timeout_s = timeout_s
        self._client = make_admin(kafka, bootstrap_servers)

    def describe(self, names: tuple[str, ...]) -> dict[str, TopicDescription]:
        """Those of these topics that exist.

        Raises:
            BrokerError: The cluster cannot be reached or asked.
        """
        metadata = self._metadata()
        found = {name: metadata.topics[name] for name in names if name in metadata.topics}
        configs = self._configs(tuple(found))
        return {
            name: TopicDescription(
                partitions=len(topic.partitions),
                replication=min((len(p.replicas) for p in topic.partitions.values()), default=0),
                config=configs[name],
            )
            for name, topic in found.items()
        }

    def topic_ids(self, names: tuple[str, ...]) -> dict[str, str]:
        """Kafka's own ids of topics: one that is deleted and made again has another.

        Raises:
            TopicError: One does not exist.
            BrokerError: The cluster cannot be reached or asked.
        """
        from confluent_kafka import TopicCollection

        futures = self._call(
            lambda: self._client.describe_topics(
                TopicCollection(list(names)), request_timeout=self._timeout_s
            )
        )
        found = {name: self._result(future, f"describe {name}") for name, future in futures.items()}
        return {name: str(topic.topic_id) for name, topic in found.items()}

    def plan(self, inventory: Inventory) -> TopicPlan:
        """What it takes to make this cluster match the inventory; changes nothing.

        Raises:
            BrokerError: The cluster cannot be reached or asked.
        """
        return plan(inventory, self.describe(tuple(topic.name for topic in inventory)))

    def require(self, names: tuple[str, ...]) -> None:
        """See that topics exist.

        Raises:
            TopicError: One does not.
            BrokerError: The cluster cannot be reached or asked.
        """
        there = self._metadata().topics
        missing = [name for name in names if name not in there]
        if missing:
            raise TopicError(
                f"missing at {self._address}: {', '.join(missing)}; make them with: "
                "clawstream topics apply"
            )

    def create(
        self, name: str, partitions: int, replication: int, config: Mapping[str, str]
    ) -> None:
        """Create one topic; it can be used when this returns.

        Raises:
            TopicError: The cluster refuses it.
            BrokerError: The cluster cannot be reached.
        """
        from confluent_kafka.cimpl import NewTopic

        wanted = NewTopic(
            name,
            num_partitions=partitions,
            replication_factor=replication,
            config=dict(config),
        )
        futures = self._call(
            lambda: self._client.create_topics([wanted], request_timeout=self._timeout_s)
        )
        self._settle(futures, "create topic")
        self._wait_for_leaders(name, partitions)

    def apply(self, topic_plan: TopicPlan) -> None:
        """Carry a plan out: all of it or, where the cluster objects, nothing.

        The cluster is asked first whether it would take every change. Topics can be used
        when this returns.

        Raises:
            TopicError: The plan holds refused changes, or the cluster refuses one.
            BrokerError: The cluster cannot be reached; what was done before is kept, and
                a new plan goes on from there.
        """
        topic_plan.raise_if_refused()
        for validate_only in (True, False):
            self._create(topic_plan, validate_only)
            self._alter(topic_plan, validate_only)
        for topic in topic_plan.creates:
            self._wait_for_leaders(topic.name, topic.partitions)

    def delete(self, names: tuple[str, ...], *, group: str) -> tuple[str, ...]:
        """Delete a consumer group that nobody is in, and then these topics, as far as they exist.

        Returns:
            The topics that were deleted.

        Raises:
            TopicError: Somebody is in the group (nothing was deleted then), or the cluster
                refuses.
            BrokerError: The cluster cannot be reached.
        """
        from confluent_kafka import KafkaError, KafkaException

        (future,) = self._call(
            lambda: self._client.delete_consumer_groups([group], request_timeout=self._timeout_s)
        ).values()
        try:
            future.result()
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.NON_EMPTY_GROUP:
                raise TopicError(
                    f"group {group} still has members: stop what reads for it, and try again "
                    "after kafka.session_timeout_ms"
                ) from error
            if code != KafkaError.GROUP_ID_NOT_FOUND:
                self._result(future, f"delete group {group}")
        there = self._metadata().topics
        found = [name for name in names if name in there]
        if found:
            futures = self._call(
                lambda: self._client.delete_topics(found, request_timeout=self._timeout_s)
            )
            self._settle(futures, "delete topic")
        return tuple(found)

    def _configs(self, names: tuple[str, ...]) -> dict[str, Mapping[str, str]]:
        from confluent_kafka.admin import (  # type: ignore[attr-defined]
            ConfigResource,
            ResourceType,
        )

        if not names:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        futures = self._call(
            lambda: self._client.describe_configs(resources, request_timeout=self._timeout_s)
        )
        found: dict[str, Mapping[str, str]] = {}
        for resource, future in futures.items():
            entries = self._result(future, f"describe topic {resource.name}")
            found[resource.name] = {
                key: entry.value for key, entry in entries.items() if entry.value is not None
            }
        return found

    def _create(self, topic_plan: TopicPlan, validate_only: bool) -> None:
        from confluent_kafka.cimpl import NewTopic

        wanted = [
            NewTopic(
                topic.name,
                num_partitions=topic.partitions,
                replication_factor=topic.replication,
                config=topic.config,
            )
            for topic in topic_plan.creates
        ]
        if wanted:
            futures = self._call(
                lambda: self._client.create_topics(
                    wanted, request_timeout=self._timeout_s, validate_only=validate_only
                )
            )
            self._settle(futures, "create topic")

    def _alter(self, topic_plan: TopicPlan, validate_only: bool) -> None:
        resources = [_alteration(name, wanted) for name, wanted in topic_plan.alters.items()]
        if resources:
            futures = self._call(
                lambda: self._client.incremental_alter_configs(
                    resources, request_timeout=self._timeout_s, validate_only=validate_only
                )
            )
            self._settle({item.name: future for item, future in futures.items()}, "alter topic")

    def _settle(self, futures: Mapping[str, Future[Any]], doing: str) -> None:
        for name, future in futures.items():
            self._result(future, f"{doing} {name}")

    def _wait_for_leaders(self, name: str, partitions: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            metadata = self._metadata()
            found = metadata.topics[name].partitions if name in metadata.topics else {}
            if len(found) == partitions and all(item.leader >= 0 for item in found.values()):
                return
            time.sleep(_POLL_S)
        raise BrokerError(
            f"topic {name} was created at {self._address} but has no leaders after "
            f"{self._timeout_s:g} s; see the broker's log"
        )

    def _metadata(self) -> Any:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + self._timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return self._client.list_topics(timeout=min(left_s, _ATTEMPT_S))
            except KafkaException as error:
                if left_s <= _ATTEMPT_S:
                    raise self._broker_error(error) from error
                # Wrong credentials would time out, too; hear of them at once.
                self._client.poll(0)

    def _call(self, call: Callable[[], Any]) -> Any:
        from confluent_kafka import KafkaException

        try:
            return call()
        except KafkaException as error:
            raise self._broker_error(error) from error

    def _result(self, future: Future[Any], doing: str) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        try:
            return future.result()
        except KafkaException as error:
            kafka_error = error.args[0]
            if kafka_error.code() < 0 or kafka_error.code() == KafkaError.REQUEST_TIMED_OUT:
                raise self._broker_error(error) from error
            raise TopicError(
                f"Kafka at {self._address} refuses to {doing}: {kafka_error.str()}"
            ) from error

    def _broker_error(self, error: Exception) -> BrokerError:
        try:
            self._client.poll(0)
        except BrokerError as reported:
            # A timeout says less than what the error callback heard before it.
            return reported
        return describe_error(error.args[0], self._address)


def _alteration(name: str, wanted: Mapping[str, str]) -> Any:
    from confluent_kafka.admin import (  # type: ignore[attr-defined]
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
        ResourceType,
    )

    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in wanted.items()
    ]
    return ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)


def apply_inventory(
    kafka: KafkaSettings, bootstrap_servers: str, inventory: Inventory
) -> TopicPlan:
    """Make a cluster match an inventory where nothing is lost by it.

    Returns:
        What was done.

    Raises:
        TopicError: Something differs in a way that is refused; nothing was changed.
        BrokerError: The cluster cannot be reached.
    """
    admin = Admin(kafka, bootstrap_servers)
    topic_plan = admin.plan(inventory)
    admin.apply(topic_plan)
    return topic_plan


__all__ = ["Admin", "apply_inventory"]
