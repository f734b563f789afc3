"""Builds the aligner's worker."""

from __future__ import annotations

from processors.feedback_align.agent import STAGE, AlignProcessor, AlignTopics
from processors.runtime.readback import ReadBack
from processors.runtime.records import LogReader
from processors.runtime.spec import WorkerSpec
from processors.runtime.topics import Cluster
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import Settings
from streams.topics import ALIGN_STATE

APP_ID = "feedback_align"


def build_spec(
    settings: Settings,
    metrics: ProcessorMetrics,
    *,
    app_id: str = APP_ID,
    topics: AlignTopics | None = None,
    changelog: str = ALIGN_STATE,
    log: LogReader | None = None,
) -> WorkerSpec:
    """The aligner as the runtime runs it.

    Args:
        settings: All settings.
        metrics: Counters.
        app_id: Consumer group, and prefix of its transactional ids.
        topics: Other topics than the inventory's, for a shadow run.
        changelog: Its state topic; a shadow run needs its own.
        log: Reads content back; from Kafka if None.

    Raises:
        SchemaError: A schema file is missing or broken.
    """
    names = topics or AlignTopics()
    rules = settings.align
    codec = build_codec(settings.schema_registry_url)

    readers: list[LogReader] = [] if log is None else [log]

    def make(partition: int, cluster: Cluster) -> AlignProcessor:
        if not readers:
            readers.append(ReadBack(cluster.kafka))
        most = settings.kafka.max_message_bytes
        return AlignProcessor(
            partition,
            cluster.partitions,
            settings.align,
            codec,
            metrics,
            cluster.room(most, names.segments, names.dead_letters),
            readers[0],
            names,
            input_max_bytes=cluster.room(most, names.turns, names.feedback),
            body_cache_bytes=settings.worker.body_cache_bytes,
            hot_sessions=settings.worker.hot_sessions,
        )

    return WorkerSpec(
        app_id=app_id,
        processor=STAGE,
        inputs=(names.turns, names.feedback),
        outputs=(names.segments, names.dead_letters),
        changelog=changelog,
        ticks=True,
        web_port=settings.worker.align_web_port,
        make_processor=make,
        read_back_ms=rules.horizon_ms
        + rules.max_open_ms
        + max(rules.orphan_wait_ms, rules.max_skew_ms + rules.settle_ms),
    )
