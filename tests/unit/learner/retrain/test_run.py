from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from learner.publish import Publisher
from learner.retrain.run import BATCHES, Job, Retrain, base_of, plan
from learner.retrain.store import Made, Read, Store
from learner.trainer import PpoTrainer, make_trainer
from learner.window import pack
from streams.clock import ManualClock
from streams.contracts import Message, ModelVersion, Role, ScoredSegment, VersionStatus
from streams.errors import LearnerError, RegistryError
from streams.kafka.places import Range
from streams.registry import RETRAIN, ArtifactStore, Registry, SegmentUse
from streams.serde import build_codec
from streams.settings import LearnerSettings, ModelSettings, Settings
from tests.unit.learner.fakes import FakeTrainer, FakeWriter, at, finished, scored

LEARNER = LearnerSettings(
    epochs=1, learning_rate=1e-3, micro_batch_segments=2, batch_segments=3, min_sample_size=2
)
MODEL = ModelSettings(base="tiny-random", device="cpu", lora_rank=2, num_threads=1)


def segment(number: int, **fields: Any) -> ScoredSegment:
    """One reply of text to one message."""
    made = scored(f"s{number}", reward=1.0 if number % 2 else -1.0, **fields)
    (step,) = made.segment.steps
    asked = Message(turn_id="u", role=Role.USER, content=f"hello {number}", event_time=0)
    step = replace(step, context=(asked,), token_ids=None, policy_version=0)
    closed = 1_000 + number // 2
    return replace(made, segment=replace(made.segment, steps=(step,), first_closed_at=closed))


def read(made: ScoredSegment, offset: int) -> Read:
    return Read(
        policy=made.segment.policy,
        first_closed_at=made.segment.first_closed_at,
        packed=pack(at(offset), made, lambda one: one.trainable),
    )


class Bench:
    """A registry, artifacts and retrains in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = Registry.open(f"sqlite:///{folder}/registry.db")
        self.artifacts = ArtifactStore.open(str(folder / "artifacts"))
        self.writer = FakeWriter()
        self.shown: list[tuple[int, int]] = []

    def store(self, name: str, segments: Mapping[int, ScoredSegment] | None = None) -> Store:
        given = {n: segment(n) for n in range(8)} if segments is None else segments
        store = Store(self.folder / name)
        store.add([read(made, offset) for offset, made in given.items()])
        return store

    def job(self, name: str, **fields: Any) -> Job:
        given = {
            "name": name,
            "id": hashlib.sha256(name.encode()).hexdigest()[:16],
            "policy": "default",
            "base_version": 0,
            "updates": None,
            "begin": "earliest",
            "end": "latest",
            "ranges": (Range("scored", 0, 0, 8),),
            "config_hash": "c" * 64,
        }
        return Job(**{**given, **fields})

    def publisher(self, trainer: Any) -> Publisher:
        return Publisher(
            registry=self.registry,
            artifacts=self.artifacts,
            writer=self.writer,
            codec=build_codec(),
            topic="versions",
            policy="default",
            base=trainer.base,
            max_kl=1.0,
            keep_checkpoints=2,
            clock=ManualClock(1_000),
        )

    def retrain(
        self, store: Store, job: Job, learner: LearnerSettings = LEARNER, trainer: Any = None
    ) -> ModelVersion:
        trainer = trainer or self.trainer(learner)
        return Retrain(
            job=job,
            store=store,
            settings=learner,
            trainer=trainer,
            registry=self.registry,
            artifacts=self.artifacts,
            send=self.publisher(trainer).send_unpublished,
            clock=ManualClock(1_000),
            shown=lambda done, total: self.shown.append((done, total)),
        ).run()

    def trainer(self, learner: LearnerSettings = LEARNER) -> PpoTrainer:
        return make_trainer(Settings(data_dir=self.folder, learner=learner, model=MODEL))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.registry.close()


def test_the_same_input_gives_the_same_batches_and_the_same_adapter(bench: Bench) -> None:
    with bench.store("one") as store:
        first = bench.retrain(store, bench.job("one"))
        assert len(store.made()) == 3
    # Elsewhere in the log, and read in another order.
    elsewhere = {100 - n: segment(n) for n in range(8)}
    with bench.store("two", elsewhere) as store:
        second = bench.retrain(store, bench.job("two"))
    assert first.attributes[BATCHES] == second.attributes[BATCHES]
    assert first.adapter_files == second.adapter_files
    assert first.segments_digest == second.segments_digest
    assert (first.version, second.version) == (1, 2)
    # One reward more is another lesson.
    other = {n: segment(n) for n in range(8)}
    (reward,) = other[3].rewards
    other[3] = replace(other[3], rewards=(replace(reward, reward=0.5),))
    with bench.store("three", other) as store:
        third = bench.retrain(store, bench.job("three"))
    assert third.attributes[BATCHES] != first.attributes[BATCHES]
    assert third.adapter_files != first.adapter_files


def test_the_version_says_where_it_came_from(bench: Bench) -> None:
    with bench.store("november") as store:
        version = bench.retrain(store, bench.job("november", begin="30d", end="1d"))
    assert version.status is VersionStatus.CANDIDATE
    assert version.parent is None
    assert version.segment_count == 8
    (offsets,) = version.source_offsets
    assert (offsets.topic, offsets.partition, offsets.start, offsets.end) == ("scored", 0, 0, 8)
    assert version.behaviour_versions == {"0": 8}
    assert version.attributes[RETRAIN] == "november"
    assert version.attributes["retrain_updates"] == "3"
    assert version.reason == "retrain november: 30d to 1d"
    assert bench.registry.lineage("default", 1) == tuple(
        SegmentUse(segment_id=f"s{n}", revision=0) for n in range(8)
    )
    assert bench.writer.versions() == [version]
    assert bench.registry.live("default") is None
    assert bench.registry.latest_checkpoint("default") is None
    assert bench.shown == [(1, 3), (2, 3), (3, 3)]


def test_it_begins_at_the_base_version(bench: Bench) -> None:
    with bench.store("one") as store:
        first = bench.retrain(store, bench.job("one"))
    with bench.store("two") as store:
        second = bench.retrain(store, bench.job("two", base_version=1))
    assert second.parent == 1
    assert second.optimizer_step == first.optimizer_step + 3
    assert second.adapter_files != first.adapter_files
    # The base version's weights and nothing else decide: one update of a rate near 0 keeps them.
    slow = LEARNER.model_copy(update={"learning_rate": 1e-12, "learning_rate_floor": 1e-13})
    with bench.store("three") as store:
        bench.retrain(store, bench.job("three", base_version=1, updates=1), slow)
    weights = bench.trainer()
    weights.begin(Path(str(first.adapter_uri).removeprefix("file://")), seed=0, optimizer_step=0)
    kept = bench.trainer()
    third = bench.registry.get("default", 3)
    assert third is not None
    kept.begin(Path(str(third.adapter_uri).removeprefix("file://")), seed=0, optimizer_step=0)
    for name, tensor in weights.state_dict()["adapter"].items():
        assert tensor.sub(kept.state_dict()["adapter"][name]).abs().max() < 1e-9


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("updates_done", [0, 1, 2, 3])
def test_what_was_killed_goes_on_to_the_same_version(
    bench: Bench, updates_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench.store("whole") as store:
        whole = bench.retrain(store, bench.job("whole"))
    keep: Callable[..., None] = Store.keep

    def killed(self: Store, made: Made, state: Any) -> None:
        if made.number >= updates_done:
            raise _KilledError
        keep(self, made, state)

    def unpublished(*_: object, **__: object) -> Any:
        raise _KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Store, "keep", killed)
        patched.setattr(Registry, "record", unpublished)
        with bench.store("cut") as store, pytest.raises(_KilledError):
            bench.retrain(store, bench.job("cut"))
    assert bench.registry.next_version("default") == 2
    bench.shown.clear()
    with Store(bench.folder / "cut") as store:
        again = bench.retrain(store, bench.job("cut"))
        assert bench.retrain(store, bench.job("cut")) == again
    assert [done for done, _ in bench.shown] == list(range(updates_done + 1, 4))
    assert again.adapter_files == whole.adapter_files
    assert again.attributes[BATCHES] == whole.attributes[BATCHES]
    assert again.metrics == whole.metrics
    assert bench.registry.next_version("default") == 3
    assert not list((bench.folder / "cut").glob("state-*"))


def test_a_learner_beside_it_is_not_disturbed(bench: Bench) -> None:
    learner = FakeTrainer()
    publisher = bench.publisher(learner)
    publisher.recover()
    publisher.publish(finished(learner))
    with bench.store("beside") as store:
        beside = bench.retrain(store, bench.job("beside"))
    assert beside.version == 2
    assert bench.registry.live("default") == 1
    second = publisher.publish(finished(learner))
    assert (second.version, second.parent, second.previous_live) == (3, 1, 1)
    checkpoint = bench.registry.latest_checkpoint("default")
    assert checkpoint is not None
    assert checkpoint.version == 3
    # A start finds nothing to clear up, and nothing foreign.
    publisher.recover()
    assert Path(str(beside.adapter_uri).removeprefix("file://")).is_dir()
    assert bench.registry.versions_using("default", ["s1"]) == {}


def test_an_event_that_cannot_be_sent_waits(bench: Bench) -> None:
    bench.writer.failures = 1
    with bench.store("away") as store:
        version = bench.retrain(store, bench.job("away"))
        assert bench.registry.unpublished("default") == (version,)
        assert bench.retrain(store, bench.job("away")) == version
    assert bench.writer.versions() == [version]
    assert bench.registry.unpublished("default") == ()


def test_an_update_that_goes_too_far_is_undone(bench: Bench) -> None:
    strict = LEARNER.model_copy(update={"gate_max_kl": 1e-12})
    with bench.store("far") as store:
        with pytest.raises(LearnerError, match="none of the 3 updates could be made"):
            bench.retrain(store, bench.job("far"), strict)
        assert all(one.undone is not None for one in store.made())
    assert bench.registry.next_version("default") == 1
    trainer = bench.trainer()
    trained = trainer.train
    calls: list[int] = []

    def once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise LearnerError("not enough memory")
        return trained(*arguments)

    trainer.train = once  # type: ignore[assignment, method-assign]
    with bench.store("once") as store:
        version = bench.retrain(store, bench.job("once"), trainer=trainer)
    assert version.status is VersionStatus.CANDIDATE
    assert version.attributes["retrain_updates_undone"] == "1"
    assert version.segment_count < 8
    assert version.gate[-1].detail == "1 undone: not enough memory"


def test_what_cannot_be_trained_on_is_named(bench: Bench) -> None:
    others = {0: segment(0, policy="npc")}
    untrainable = {n: segment(n, trainable=False) for n in range(4)}
    for name, segments, message in (
        ("none", {}, "none of any"),
        ("other", others, r"npc \(1\).*set learner.policy"),
        ("untrainable", untrainable, "none of the 4 segments"),
        ("few", {0: segment(0)}, "only 1 segments .* asks for 2"),
    ):
        with bench.store(name, segments) as store, pytest.raises(LearnerError, match=message):
            plan(store, LEARNER, 0, None)


def test_the_newest_revision_counts_the_first_of_equal_ones(bench: Bench) -> None:
    with bench.store("revisions", {}) as store:
        for offset, (revision, trainable) in enumerate([(1, True), (0, True), (1, False)]):
            store.add([read(segment(0, revision=revision, trainable=trainable), offset)])
        (one,) = store.usable("default")
        assert one.revision == 1
        assert store.open_segment("default", "s0").ref == at(0)
        store.add([read(segment(0, revision=2, trainable=False), 3)])
        assert store.usable("default") == ()
        assert store.counts() == {"default": (1, 0)}


def test_a_base_version_must_be_there_and_good(bench: Bench) -> None:
    with pytest.raises(RegistryError, match="it has none yet"):
        base_of(bench.registry, "default", 3)
    learner = FakeTrainer()
    learner.kl = 5.0
    bench.publisher(learner).publish(finished(learner))
    with pytest.raises(RegistryError, match="was rejected"):
        base_of(bench.registry, "default", 1)
    with pytest.raises(RegistryError, match="its newest is 1"):
        base_of(bench.registry, "default", 3)
    learner.kl = 0.0
    bench.publisher(learner).publish(finished(learner))
    with bench.store("foreign") as store, pytest.raises(LearnerError, match="another base model"):
        bench.retrain(store, bench.job("foreign", base_version=2))
