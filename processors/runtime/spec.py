"""What makes one processor of the shared runtime; imports nothing of Faust."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from processors.runtime.records import PartitionProcessor
from processors.runtime.topics import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What makes one processor of the shared runtime.

    Attributes:
        app_id: Consumer group and prefix of the transactional ids.
        processor: Name in logs and metrics.
        inputs: Co-partitioned input topics, in merge order.
        outputs: Topics that must exist.
        changelog: The compacted state topic.
        ticks: Whether idle partitions are moved by ticks; the inputs must then be
            LogAppendTime.
        web_port: Port of the web views (``/``: the worker, ``/metrics``), 0 for none.
        read_back_ms: How long the inputs must keep records that may be read back; 0 if none are.
        make_processor: Builds the logic of a partition; is given the partition and what the
            topics are like.
    """

    app_id: str
    processor: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    changelog: str
    ticks: bool
    web_port: int
    make_processor: Callable[[int, Cluster], PartitionProcessor]
    read_back_ms: int = 0


__all__ = ["WorkerSpec"]
