"""Builds the reward processor's worker."""

from __future__ import annotations

from processors.reward import signals
from processors.reward.agent import STAGE, RewardProcessor, RewardTopics
from processors.reward.plugins import load
from processors.runtime.spec import WorkerSpec
from processors.runtime.topics import Cluster
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import Settings
from streams.topics import REWARD_STATE

APP_ID = "reward"


def build_spec(
    settings: Settings,
    metrics: ProcessorMetrics,
    *,
    app_id: str = APP_ID,
    topics: RewardTopics | None = None,
    changelog: str = REWARD_STATE,
) -> WorkerSpec:
    """The reward processor as the runtime runs it.

    Args:
        settings: All settings.
        metrics: Counters.
        app_id: Consumer group, and prefix of its transactional ids.
        topics: Other topics than the inventory's, for a shadow run.
        changelog: Its state topic; a shadow run needs its own.

    Raises:
        SchemaError: A schema file is missing or broken.
        SettingsError: A plugin that the settings name is not installed.
        PluginError: A plugin cannot be imported.
    """
    plugins = load(settings.reward)
    names = topics or RewardTopics()
    codec = build_codec(settings.schema_registry_url)

    def make(_partition: int, cluster: Cluster) -> RewardProcessor:
        room = cluster.room(
            settings.kafka.max_message_bytes, names.scored, names.reviews, names.dead_letters
        )
        if settings.reward.text_signals:
            signals.prepare()
        return RewardProcessor(settings.reward, codec, metrics, room, names, plugins)

    return WorkerSpec(
        app_id=app_id,
        processor=STAGE,
        inputs=(names.segments,),
        outputs=(names.scored, names.reviews, names.dead_letters),
        changelog=changelog,
        ticks=False,
        web_port=settings.worker.reward_web_port,
        make_processor=make,
    )
