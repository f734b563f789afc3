"""The version registry and the artifact store: what was learned, from what, and where it is."""

from streams.registry.artifacts import ArtifactStore, StoredFolder, verify
from streams.registry.rows import (
    LIVE,
    RETRAIN,
    AliasMove,
    Checkpoint,
    SegmentUse,
    StatusChange,
)
from streams.registry.store import Registry

__all__ = [
    "LIVE",
    "RETRAIN",
    "AliasMove",
    "ArtifactStore",
    "Checkpoint",
    "Registry",
    "SegmentUse",
    "StatusChange",
    "StoredFolder",
    "verify",
]
