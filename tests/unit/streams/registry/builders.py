"""Versions and checkpoints for the registry's tests."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from streams.contracts import GateDecision, ModelVersion, OffsetRange, SourceRef, VersionStatus
from streams.registry import Checkpoint

FULL = ModelVersion(
    event_id="default-1",
    version=1,
    status=VersionStatus.LIVE,
    base_model_id="smollm2-135m",
    base_model_digest="b" * 64,
    tokenizer_digest="c" * 64,
    template_digest="d" * 64,
    event_time=1_700_000_000_000,
    policy="default",
    adapter_uri="file:///artifacts/default/policy-v1",
    adapter_files={"adapter_model.safetensors": "e" * 64},
    adapter_rank=8,
    adapter_alpha=16.0,
    source_offsets=(
        OffsetRange(topic="trajectory.scored", partition=0, start=0, end=9),
        OffsetRange(topic="trajectory.scored", partition=1, start=3, end=2**40),
    ),
    segment_count=2,
    segments_digest="f" * 64,
    behaviour_versions={"0": 3, "unknown": 1},
    optimizer_step=4,
    config_hash="0" * 64,
    metrics={"losses/approx_kl": 0.01, "rewards/mean": -0.25},
    gate=(GateDecision(name="kl", passed=True, value=0.01, threshold=1.0, detail="fine"),),
    reason="enough_segments",
    attributes={"note": "äß中"},
)


def version(number: int, **changes: Any) -> ModelVersion:
    """A full version with this number."""
    policy = changes.get("policy", "default")
    made = replace(FULL, version=number, event_id=f"{policy}-{number}")
    return replace(made, **changes)


def checkpoint(number: int) -> Checkpoint:
    """A checkpoint that differs from every other in everything."""
    return Checkpoint(
        version=number,
        state_uri=f"file:///artifacts/default/learner-v{number}",
        state_files={"state.pt": f"{number:064d}"},
        positions=(SourceRef(topic="scored", partition=0, offset=10 * number),),
        window=tuple(SourceRef(topic="scored", partition=1, offset=n) for n in (5, 2, number)),
        rng=bytes([number, 255]),
        sealed_at=1_000 + number,
    )
