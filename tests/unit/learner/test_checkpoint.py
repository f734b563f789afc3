from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from learner.checkpoint import LearnerState, pack_rng, unpack_rng
from streams.errors import ArtifactError, RegistryError
from streams.registry import ArtifactStore, Checkpoint, StoredFolder
from tests.unit.learner.fakes import FakeTrainer, no_adapter, scored

SEGMENTS = [scored("a"), scored("b", reward=-0.5)]


def checkpoint(stored: StoredFolder) -> Checkpoint:
    return Checkpoint(
        version=1,
        state_uri=stored.uri,
        state_files=stored.files,
        positions=(),
        window=(),
        rng=b"",
        sealed_at=0,
    )


def test_a_resumed_update_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    torch.manual_seed(11)
    straight = FakeTrainer()
    straight.train(SEGMENTS, 0, no_adapter)
    store = ArtifactStore.open(str(tmp_path))
    stored = store.write("p", "learner-v1", LearnerState.capture(straight.state_dict()).write)
    straight.train(SEGMENTS, 0, no_adapter)

    torch.manual_seed(99)
    resumed = FakeTrainer()
    resumed.load_state_dict(LearnerState.read(checkpoint(stored)).restore())
    resumed.train(SEGMENTS, 0, no_adapter)
    assert torch.equal(resumed.weights, straight.weights)
    assert resumed.steps == straight.steps


def test_what_was_captured_does_not_change() -> None:
    trainer = FakeTrainer()
    state = LearnerState.capture(trainer.state_dict())
    trainer.train(SEGMENTS, 0, no_adapter)
    assert torch.equal(state.restore()["weights"], torch.zeros(3))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = ArtifactStore.open(str(tmp_path))
    state = LearnerState.capture(FakeTrainer().state_dict())
    stored = store.write("p", "learner-v1", state.write)
    file = tmp_path / "p" / "learner-v1" / "state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"state\.pt is damaged"):
        LearnerState.read(checkpoint(stored))


def test_bytes_of_another_kind_are_refused() -> None:
    with pytest.raises(ArtifactError, match="no learner state"):
        LearnerState(b"something else").restore()


def test_the_sampler_goes_on_where_it_was() -> None:
    rng = random.Random(4)
    rng.gauss()
    again = unpack_rng(pack_rng(rng))
    assert [again.random() for _ in range(5)] == [rng.random() for _ in range(5)]
    assert again.gauss() == rng.gauss()


@pytest.mark.parametrize("packed", [b"", b"[]", b"[3, [1, 2], null]", b'{"a": 1}'])
def test_a_damaged_sampler_state_is_refused(packed: bytes) -> None:
    with pytest.raises(RegistryError, match="damaged"):
        unpack_rng(packed)
