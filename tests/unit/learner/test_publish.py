from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from learner.checkpoint import LearnerState
from learner.publish import (
    KL_METRIC,
    Publisher,
    behaviour_versions,
    event_id,
    offset_ranges,
    sanity_gate,
    segments_digest,
    settings_hash,
)
from learner.window import Candidate
from streams.clock import ManualClock
from streams.contracts import GateDecision, ModelVersion, OffsetRange, VersionStatus
from streams.errors import ArtifactError, RegistryError
from streams.registry import ArtifactStore, Registry, verify
from streams.serde import build_codec
from streams.settings import LearnerSettings, ModelSettings
from tests.unit.learner.crash_driver import FileWriter, open_publisher
from tests.unit.learner.fakes import (
    BASE,
    FakeTrainer,
    FakeWriter,
    at,
    candidates,
    finished,
    scored,
    stored_weights,
)

MakePublisher = Callable[[], Publisher]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry.open(f"sqlite:///{tmp_path}/registry.db")


@pytest.fixture
def writer() -> FakeWriter:
    return FakeWriter()


@pytest.fixture
def publisher(tmp_path: Path, registry: Registry, writer: FakeWriter) -> Publisher:
    return Publisher(
        registry=registry,
        artifacts=ArtifactStore.open(str(tmp_path / "artifacts")),
        writer=writer,
        codec=build_codec(),
        topic="versions",
        policy="default",
        base=BASE,
        max_kl=0.5,
        keep_checkpoints=2,
        clock=ManualClock(1_000),
    )


def test_a_good_update_goes_live(
    publisher: Publisher, registry: Registry, writer: FakeWriter
) -> None:
    trainer = FakeTrainer()
    first = publisher.publish(finished(trainer))
    second = publisher.publish(finished(trainer, since=(at(2),), positions=(at(9),)))
    assert [first.status, second.status] == [VersionStatus.LIVE, VersionStatus.LIVE]
    assert (first.version, first.parent, first.previous_live) == (1, None, None)
    assert (second.version, second.parent, second.previous_live) == (2, 1, 1)
    assert second.source_offsets == (OffsetRange(topic="scored", partition=0, start=2, end=9),)
    assert all(decision.passed for decision in second.gate)
    assert (first.reason, first.attributes) == ("enough_segments", {})
    assert registry.live("default") == 2
    assert writer.versions() == [first, second]
    assert [record.key for record in writer.records] == [b"default", b"default"]
    assert registry.unpublished() == ()


def test_the_adapter_can_be_read_from_the_event(publisher: Publisher, writer: FakeWriter) -> None:
    trainer = FakeTrainer()
    publisher.publish(finished(trainer))
    (event,) = writer.versions()
    assert event.adapter_uri is not None
    folder = verify(event.adapter_uri, event.adapter_files)
    assert stored_weights(folder) == trainer.weights.tolist()
    assert sorted(event.adapter_files) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("poison", [True, False])
def test_a_bad_update_is_rejected_and_leaves_the_live_one(
    poison: bool, publisher: Publisher, registry: Registry, writer: FakeWriter
) -> None:
    trainer = FakeTrainer()
    publisher.publish(finished(trainer))
    good = trainer.weights.tolist()
    trainer.poison, trainer.kl = poison, 0.01 if poison else 0.6
    rejected = publisher.publish(finished(trainer))
    failed = [decision.name for decision in rejected.gate if not decision.passed]
    assert rejected.status is VersionStatus.REJECTED
    assert failed == ["finite_weights" if poison else "kl"]
    why = "finite_weights (not finite: weights)" if poison else "kl (kl/update_k3=0.6)"
    assert rejected.reason == f"rejected by {why}"
    assert registry.live("default") == 1
    assert writer.versions()[-1] == rejected
    resumed = registry.latest_checkpoint("default")
    assert resumed is not None
    assert resumed.version == 2
    assert LearnerState.read(resumed).restore()["weights"].tolist() == good


def test_the_parent_is_the_newest_that_was_not_rejected(publisher: Publisher) -> None:
    trainer = FakeTrainer()
    publisher.publish(finished(trainer))
    trainer.kl = 9.0
    publisher.publish(finished(trainer))
    trainer.kl = 0.0
    third = publisher.publish(finished(trainer))
    assert (third.version, third.parent, third.previous_live) == (3, 1, 1)


def test_a_metric_that_is_not_finite_rejects_and_is_not_stored(publisher: Publisher) -> None:
    metrics = {KL_METRIC: 0.0, "loss": float("nan"), "other": float("inf")}
    version = publisher.publish(replace(finished(FakeTrainer()), metrics=metrics))
    (decision,) = [d for d in version.gate if not d.passed]
    assert decision.detail == "not finite: loss=nan, other=inf"
    assert version.metrics == {KL_METRIC: 0.0}


def test_an_event_waits_while_kafka_is_away(
    publisher: Publisher, registry: Registry, writer: FakeWriter
) -> None:
    writer.failures = 1
    version = publisher.publish(finished(FakeTrainer()))
    assert registry.unpublished() == (version,)
    assert publisher.send_unpublished() == 1
    assert writer.versions() == [version]
    assert publisher.send_unpublished() == 0


def test_only_the_newest_checkpoints_keep_their_files(
    tmp_path: Path, publisher: Publisher, registry: Registry
) -> None:
    trainer = FakeTrainer()
    for _ in range(4):
        publisher.publish(finished(trainer))
    names = sorted(path.name for path in (tmp_path / "artifacts" / "default").glob("[!.]*"))
    assert names == ["learner-v3", "learner-v4", *(f"policy-v{n}" for n in range(1, 5))]
    publisher.recover()
    assert len(registry.versions("default")) == 4


def test_recover_prunes_what_a_crash_after_the_record_left(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = FakeTrainer()
    monkeypatch.setattr(publisher, "_prune", lambda: None)
    for _ in range(3):
        publisher.publish(finished(trainer))
    monkeypatch.undo()
    publisher.recover()
    states = sorted(path.name for path in (tmp_path / "artifacts" / "default").glob("learner-*"))
    assert states == ["learner-v2", "learner-v3"]


def test_recover_removes_what_nobody_refers_to(tmp_path: Path, publisher: Publisher) -> None:
    publisher.publish(finished(FakeTrainer()))
    folder = tmp_path / "artifacts" / "default"
    (folder / ".writing-policy-v2").mkdir()
    (folder / "policy-v2").mkdir()
    publisher.recover()
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["learner-v1", "policy-v1"]


def test_a_crash_before_any_operation_leaves_exactly_one_version(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.unit.learner.crash_driver", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    complete = int(result.stdout)
    # Two folders of one or two files, a commit for the record and one for the mark, a send.
    assert complete > 12
    outcomes = [_restart(tmp_path / str(n)) for n in range(1, complete + 1)]
    assert set(outcomes) == {"published", "to do again"}
    assert outcomes == sorted(outcomes, reverse=True), "the crash after the commit is the divide"


def _restart(folder: Path) -> str:
    """Recover from one crash and check what is there; what had become of the update."""
    registry, publisher = open_publisher(folder)
    publisher.recover()
    outcome = "published"
    if registry.next_version("default") == 2:
        outcome = "to do again"
        publisher.publish(finished(FakeTrainer()))
    assert [v.version for v in registry.versions("default")] == [1, 2]
    assert registry.live("default") == 2
    assert registry.unpublished() == ()
    assert [use.segment_id for use in registry.lineage("default", 2)] == ["a", "b"]
    checkpoint = registry.latest_checkpoint("default")
    assert checkpoint is not None
    assert checkpoint.version == 2
    LearnerState.read(checkpoint).restore()
    _check_events(folder, registry)
    folders = sorted(path.name for path in (folder / "artifacts" / "default").glob("[!.]*"))
    assert folders == ["learner-v2", "policy-v1", "policy-v2"]
    registry.close()
    return outcome


def _check_events(folder: Path, registry: Registry) -> None:
    values = FileWriter(folder / "topic").values()
    events = [build_codec().decode(value, ModelVersion) for value in values]
    assert len(set(values)) == len({event.event_id for event in events}) == 2
    assert [event.version for event in events] == sorted(event.version for event in events)
    for event in events:
        assert event.adapter_uri is not None
        verify(event.adapter_uri, event.adapter_files)
    assert registry.get("default", 2) == events[-1]


def test_the_gate_needs_its_metric_and_weights(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no weights"):
        sanity_gate({KL_METRIC: 0.0}, tmp_path, max_kl=1.0)
    FakeTrainer().save_adapter(tmp_path)
    gate = sanity_gate({}, tmp_path, max_kl=1.0)
    assert [d.name for d in gate if not d.passed] == ["kl"]


def test_decisions_name_what_was_wrong(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    trainer.save_adapter(tmp_path)
    good = sanity_gate({KL_METRIC: 0.5}, tmp_path, max_kl=1.0)
    trainer.weights[0] = float("nan")
    trainer.save_adapter(tmp_path)
    bad = sanity_gate({KL_METRIC: 0.5, "a": float("inf")}, tmp_path, max_kl=1.0)
    bound = GateDecision(
        name="kl", passed=True, value=0.5, threshold=1.0, detail="kl/update_k3=0.5"
    )
    named = {"finite_metrics": "not finite: a=inf", "finite_weights": "not finite: weights"}
    assert good == (
        *(GateDecision(name=name, passed=True, value=0.0, threshold=0.0) for name in named),
        bound,
    )
    assert bad == (
        *(
            GateDecision(name=name, passed=False, value=1.0, threshold=0.0, detail=detail)
            for name, detail in named.items()
        ),
        bound,
    )


@pytest.mark.parametrize(("kl", "passed"), [(1.0, True), (1.001, False), (float("nan"), False)])
def test_the_kl_bound_is_inclusive(kl: float, passed: bool, tmp_path: Path) -> None:
    FakeTrainer().save_adapter(tmp_path)
    gate = sanity_gate({KL_METRIC: kl}, tmp_path, max_kl=1.0)
    assert gate[-1].passed is passed
    assert gate[-1].value == (None if math.isnan(kl) else kl)


def test_the_digest_depends_on_ids_and_revisions_not_on_order() -> None:
    used = candidates(("a", "b"))
    changed = Candidate(ref=at(0), scored=scored("a", revision=1))
    assert segments_digest(used) == segments_digest(used[::-1])
    assert segments_digest(used) != segments_digest((changed, used[1]))


def test_behaviour_versions_count_steps() -> None:
    used = [
        Candidate(ref=at(n), scored=scored(str(n), policy_version=version))
        for n, version in enumerate([0, 3, None, 3])
    ]
    assert behaviour_versions(used) == {"0": 1, "3": 2, "unknown": 1}


def test_offset_ranges_join_up() -> None:
    ranges = offset_ranges((at(4, 0), at(2, 1)), (at(7, 1), at(4, 0), at(3, 2)))
    assert [(r.partition, r.start, r.end) for r in ranges] == [(0, 4, 4), (1, 2, 7), (2, 0, 3)]


def test_event_ids_differ_by_policy_version_and_ordinal() -> None:
    made = {event_id(p, v, o) for p in ("a", "b") for v in (1, 2) for o in (0, 1)}
    assert len(made) == 8
    # Readers drop what they know by it: it must never come out otherwise.
    expected = hashlib.sha256('["é",1,0]'.encode()).hexdigest()[:32]
    assert event_id("é", 1, 0) == expected


def test_the_digest_of_segments_is_that_of_their_names() -> None:
    packed = '[["a",0],["é",0]]'.encode()
    assert segments_digest(candidates(("é", "a"))) == hashlib.sha256(packed).hexdigest()


def test_the_settings_hash_follows_the_values() -> None:
    same = settings_hash(LearnerSettings(), ModelSettings())
    assert same == settings_hash(LearnerSettings(seed=0), ModelSettings())
    assert same != settings_hash(LearnerSettings(seed=1), ModelSettings())


def test_artifacts_of_another_registry_are_left_alone(
    publisher: Publisher, registry: Registry, tmp_path: Path
) -> None:
    trainer = FakeTrainer()
    kept = [publisher.publish(finished(trainer)) for _ in range(3)]
    stranger = Registry.open(f"sqlite:///{tmp_path}/other.db")
    publisher._registry = stranger
    with pytest.raises(RegistryError, match=r"policy-v2.*do not belong together"):
        publisher.recover()
    for version in kept:
        verify(str(version.adapter_uri), version.adapter_files)
    publisher._registry = registry
    publisher.recover()
    stranger.close()


def test_a_moved_artifact_folder_is_not_taken_for_orphans(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(finished(FakeTrainer()))
    (tmp_path / "artifacts").rename(tmp_path / "moved")
    publisher._artifacts = ArtifactStore.open(str(tmp_path / "moved"))
    with pytest.raises(RegistryError, match="the folder was moved"):
        publisher.recover()
    assert (tmp_path / "moved" / "default" / "learner-v1").is_dir()
    assert (tmp_path / "moved" / "default" / "policy-v1" / "adapter_model.safetensors").is_file()


def test_leftovers_of_the_next_version_go_and_files_of_others_stay(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(finished(FakeTrainer()))
    folder = tmp_path / "artifacts" / "default"
    for name in ("policy-v2", "learner-v2", ".writing-learner-v2", "notes"):
        (folder / name).mkdir()
    publisher.recover()
    assert sorted(path.name for path in folder.glob("[!.]*")) == [
        "learner-v1",
        "notes",
        "policy-v1",
    ]


def test_a_state_that_cannot_be_removed_does_not_stop_a_publication(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ArtifactError("cannot remove it")

    trainer = FakeTrainer()
    for _ in range(2):
        publisher.publish(finished(trainer))
    monkeypatch.setattr(publisher._artifacts, "remove", refuse)
    assert publisher.publish(finished(trainer)).version == 3
    assert "stays until the next start: cannot remove it" in caplog.text
    monkeypatch.undo()
    publisher.recover()
