"""What the learner must remember to go on as if it had never stopped.

The updater's state (adapter, value head, optimizer, its own counters) and torch's random
generators are one file beside the adapters; the sampler's generator, the window and the
positions are rows of the registry. Both become visible with the version's transaction.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streams.errors import ArtifactError, RegistryError
from streams.registry import Checkpoint, verify

STATE_FILE = "state.pt"


@dataclass(frozen=True, slots=True)
class LearnerState:
    """An updater's state and torch's generators at one moment, as bytes that nothing changes."""

    data: bytes

    @classmethod
    def capture(cls, updater_state: Mapping[str, Any]) -> LearnerState:
        """Copy a ``state_dict`` of tensors, numbers and text, and torch's generators."""
        buffer = io.BytesIO()
        torch.save(
            {
                "updater": dict(updater_state),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            },
            buffer,
        )
        return cls(buffer.getvalue())

    def restore(self) -> dict[str, Any]:
        """Set torch's generators back and return the updater's state.

        A generator of a GPU that this machine lacks is left out.

        Raises:
            ArtifactError: The bytes hold no learner state.
        """
        try:
            # Only tensors and plain values are loaded: a state file runs no code.
            state = torch.load(io.BytesIO(self.data), map_location="cpu", weights_only=True)
            torch.set_rng_state(state["rng"])
            for device, rng in zip(
                range(torch.cuda.device_count()), state["cuda_rng"], strict=False
            ):
                torch.cuda.set_rng_state(rng, device)
            updater: dict[str, Any] = state["updater"]
        except Exception as error:  # torch raises whatever the damaged bytes lead to
            raise ArtifactError(
                f"this is no learner state of this version of clawstream: {error}"
            ) from error
        return updater

    def write(self, folder: Path) -> None:
        """Write the state into a folder, as ``read`` expects it."""
        (folder / STATE_FILE).write_bytes(self.data)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> LearnerState:
        """The state that a checkpoint refers to.

        Raises:
            ArtifactError: Its file is missing or damaged.
        """
        folder = verify(checkpoint.state_uri, checkpoint.state_files)
        return cls((folder / STATE_FILE).read_bytes())


def pack_rng(rng: random.Random) -> bytes:
    """The generator's state as JSON."""
    return json.dumps(rng.getstate()).encode()


def unpack_rng(packed: bytes) -> random.Random:
    """A generator that goes on where ``pack_rng`` was called.

    Raises:
        RegistryError: The bytes are none of ``pack_rng``.
    """
    rng = random.Random()
    try:
        version, internal, gauss_next = json.loads(packed)
        rng.setstate((version, tuple(internal), gauss_next))
    except (ValueError, TypeError) as error:
        raise RegistryError(f"the checkpoint's sampler state is damaged: {error}") from error
    return rng
