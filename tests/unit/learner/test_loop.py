from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from learner.examples import ExampleFile
from learner.feed import Feed, FeedStatus
from learner.loop import (
    Learner,
    Topics,
    Trained,
    Trainer,
    _connect,
    _make_feed,
    _Progress,
    run,
)
from learner.publish import BaseIdentity, Publisher, settings_hash
from learner.trackers import Trackers
from learner.warming import Warming
from learner.window import Arrival, Window
from streams.clock import ManualClock
from streams.contracts import DeadLetter, DeadLetterReason, ScoredSegment, VersionStatus
from streams.errors import ArtifactError, ClawstreamError, LearnerError, RegistryError
from streams.registry import ArtifactStore, Registry, StoredFolder
from streams.serde import build_codec
from streams.settings import KafkaSettings, LearnerSettings, Settings
from tests.unit.learner.fakes import (
    BASE,
    Entry,
    FakeConsumer,
    FakeTrainer,
    FakeWriter,
    add,
    at,
    encoded,
    never,
    scored,
    stored_weights,
)

SETTINGS = LearnerSettings(
    min_sample_size=2,
    update_segments=4,
    update_interval_ms=0,
    batch_segments=3,
    max_updates=1,
    max_updates_per_segment=8,
    max_version_gap=2,
)


class Bench:
    """A learner over a log in memory, that can be run, stopped and run again."""

    def __init__(self, folder: Path) -> None:
        self.log: list[Entry] = []
        self.registry = Registry.open(f"sqlite:///{folder}/registry.db")
        self.artifacts = ArtifactStore.open(str(folder / "artifacts"))
        self.writer = FakeWriter()
        self.clock = ManualClock(1_000_000)
        self.stopping = threading.Event()
        self.trackers: Trackers | None = None

    def arrive(self, *segments: ScoredSegment) -> None:
        """Append segments to the log."""
        self.log.extend(encoded(segment) for segment in segments)

    def run(self, trainer: Trainer, **changes: Any) -> int:
        """Start a new learner on what is there and let it run to its end."""
        return self.learner(trainer, None, **changes)()

    def learner(
        self, trainer: Trainer, file: ExampleFile | None, *, only: bool = False, **changes: Any
    ) -> Callable[[], int]:
        """A new learner on what is there, to be run to its end."""
        settings = SETTINGS.model_copy(update=changes)
        self.stopping = threading.Event()
        feed = Feed(
            consumer=FakeConsumer(self.log, "scored"),
            topic="scored",
            policy=settings.policy,
            window=Window(
                max_segments=settings.window_segments,
                max_tokens=settings.window_tokens,
                max_uses=settings.max_updates_per_segment,
                max_session_uses=settings.max_updates_per_session,
            ),
            codec=build_codec(),
            writer=self.writer,
            dead_letters="dead",
            clock=self.clock,
            stopping=self.stopping,
        )
        publisher = Publisher(
            registry=self.registry,
            artifacts=self.artifacts,
            writer=self.writer,
            codec=build_codec(),
            topic="versions",
            policy=settings.policy,
            base=BASE,
            max_kl=0.5,
            keep_checkpoints=2,
            clock=self.clock,
        )
        warming = None
        if file is not None:
            warming = Warming(
                file=file,
                policy=settings.policy,
                registry=self.registry,
                artifacts=self.artifacts,
                publisher=publisher,
                config_hash=settings_hash(settings),
                clock=self.clock,
                stopping=self.stopping,
            )
        learner = Learner(
            settings=settings,
            trainer=trainer,
            registry=self.registry,
            feed=feed,
            publisher=publisher,
            config_hash=settings_hash(settings),
            clock=self.clock,
            stopping=self.stopping,
            warming=warming,
            trackers=self.trackers,
        )

        def run_to_its_end() -> int:
            try:
                return learner.warm() if only else learner.run()
            finally:
                feed.stop()

        return run_to_its_end

    def offsets(self) -> list[tuple[int, int]]:
        """The source offsets of every version."""
        return [
            (ranges.start, ranges.end)
            for version in self.registry.versions()
            for ranges in version.source_offsets
        ]

    def adapter(self, version: int) -> list[float]:
        """The weights a version was published with."""
        return stored_weights(
            Path(str(self.registry.get("default", version).adapter_uri).removeprefix("file://"))  # type: ignore[union-attr]
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.registry.close()


def segments(*numbers: int, version: int | None = None) -> list[ScoredSegment]:
    return [scored(f"s{n}", reward=1.0 / (n + 1), policy_version=version) for n in numbers]


def test_learns_publishes_and_stops_after_max_updates(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3, 4))
    assert bench.run(FakeTrainer()) == 1
    (version,) = bench.writer.versions()
    assert (version.version, version.status) == (1, VersionStatus.LIVE)
    assert version.parent is None
    assert version.segment_count == 3
    assert version.source_offsets[0].end == 5
    assert len(bench.registry.lineage("default", 1)) == 3


def test_a_version_says_what_it_was_made_of_and_that_it_leans(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.arrive(*(scored(f"s{n}", reward=1.0, policy_version=0) for n in range(18)))
    with caplog.at_level("WARNING"):
        assert bench.run(FakeTrainer(), batch_segments=17, imbalance_min_sign_share=0.0) == 1
        assert "unbalanced" not in caplog.text
        bench.arrive(*(scored(f"t{n}", reward=1.0) for n in range(4)))
        assert bench.run(FakeTrainer(), batch_segments=30) == 1
    first, second = bench.writer.versions()
    assert json.loads(first.attributes["make_up_source"]) == {"test": 17}
    assert json.loads(second.attributes["make_up_version"]) == {"0": 18, "unknown": 4}
    assert "imbalance" not in first.attributes
    assert second.attributes["imbalance"] == "sign negative: 0 of 22 replies with a reward"
    assert second.metrics["makeup/positive_share"] == 1.0
    assert (first.metrics["makeup/imbalances"], second.metrics["makeup/imbalances"]) == (0.0, 1.0)
    assert f"update unbalanced version=2: {second.attributes['imbalance']}" in caplog.text


class _Slow(FakeTrainer):
    """An update that ends only once segments that come meanwhile are in the window."""

    def __init__(self, bench: Bench, feed: Callable[[], FeedStatus]) -> None:
        super().__init__()
        self._bench, self._status = bench, feed

    def train(self, *arguments: Any) -> Trained | None:
        before = self._status()
        self._bench.arrive(*segments(*range(100, 110)))
        deadline = time.monotonic() + 60.0
        while self._status().arrivals["added"] < before.arrivals["added"] + 10:
            assert time.monotonic() < deadline, "arrivals wait for the update"
            time.sleep(0.01)
        assert self._status().new_segments == before.new_segments + 10
        return super().train(*arguments)


def test_arrivals_do_not_wait_for_an_update_and_are_not_in_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds: list[Feed] = []
    start = Feed.start

    def started(self: Feed, *arguments: Any) -> Any:
        feeds.append(self)
        return start(self, *arguments)

    monkeypatch.setattr(Feed, "start", started)
    bench.arrive(*segments(0, 1, 2, 3))
    trainer = _Slow(bench, lambda: feeds[0].status())
    assert bench.run(trainer, batch_segments=50) == 1
    assert sorted(trainer.trained_on[0]) == ["s0", "s1", "s2", "s3"]
    assert bench.offsets() == [(0, 4)]


def test_an_empty_registry_and_topic_publish_nothing(bench: Bench) -> None:
    stopper = threading.Timer(0.5, lambda: bench.stopping.set())
    stopper.start()
    assert bench.run(FakeTrainer(), max_updates=0) == 0
    stopper.join()
    assert bench.writer.records == []
    assert bench.registry.versions() == ()


def test_a_resumed_learner_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    straight, resumed = Bench(tmp_path / "a"), Bench(tmp_path / "b")
    batches = [segments(0, 1, 2, 3), segments(4, 5, 6, 7), segments(8, 9, 10, 11)]

    class Delivering(FakeTrainer):
        """Lets the next batch arrive during each update."""

        def train(
            self,
            segments: Sequence[ScoredSegment],
            current_version: int,
            adapter_of: Callable[[int], Path],
            should_stop: Callable[[], bool] = never,
        ) -> Trained | None:
            if self.steps < 2:
                straight.arrive(*batches[self.steps + 1])
            return super().train(segments, current_version, adapter_of, should_stop)

    straight.arrive(*batches[0])
    trainer = Delivering()
    assert straight.run(trainer, max_updates=3) == 3
    again: list[tuple[str, ...]] = []
    for batch in batches:
        resumed.arrive(*batch)
        other = FakeTrainer()
        assert resumed.run(other) == 1
        again.extend(other.trained_on)
    assert again == trainer.trained_on
    assert resumed.offsets() == straight.offsets() == [(0, 4), (4, 8), (8, 12)]
    assert [resumed.adapter(n) for n in (1, 2, 3)] == [straight.adapter(n) for n in (1, 2, 3)]


def test_a_rejected_update_goes_back_and_the_next_goes_on(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.run(FakeTrainer())
    good = bench.adapter(1)

    class Poisoned(FakeTrainer):
        """Breaks its weights once, and notes what it begins the next update with."""

        began: list[list[float]]

        def train(
            self,
            segments: Sequence[ScoredSegment],
            current_version: int,
            adapter_of: Callable[[int], Path],
            should_stop: Callable[[], bool] = never,
        ) -> Trained | None:
            self.began = [*getattr(self, "began", []), self.weights.tolist()]
            self.poison = len(self.began) == 1
            if self.poison:
                bench.arrive(*[scored(f"t{n}") for n in range(4)])
            return super().train(segments, current_version, adapter_of, should_stop)

    bench.arrive(*segments(4, 5, 6, 7))
    trainer = Poisoned()
    assert bench.run(trainer, max_updates=2) == 2
    assert trainer.began == [good, good]
    found = bench.registry.versions()
    assert [v.status for v in found] == [
        VersionStatus.RETIRED,
        VersionStatus.REJECTED,
        VersionStatus.LIVE,
    ]
    assert [v.parent for v in found] == [None, 1, 1]
    assert bench.offsets() == [(0, 4), (4, 8), (8, 12)]


def test_a_rejected_version_is_not_resumed_from(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.run(FakeTrainer())
    bench.arrive(*segments(4, 5, 6, 7))
    bad = FakeTrainer()
    bad.kl = 2.0
    bench.run(bad)
    bench.arrive(*segments(8, 9, 10, 11))
    last = FakeTrainer()
    bench.run(last)
    assert last.steps == 2
    assert bench.registry.live("default") == 3


def test_a_segment_is_used_no_more_often_than_allowed_across_restarts(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2))
    for first in (10, 20, 30):
        bench.arrive(*segments(*range(first, first + 4)))
        bench.run(FakeTrainer(), max_updates_per_segment=1, batch_segments=100)
    uses = bench.registry.versions_using("default", [f"s{n}" for n in range(40)])
    assert all(len(versions) == 1 for versions in uses.values())
    assert len(uses) == 15


def test_a_session_is_used_no_more_often_than_allowed_across_restarts(bench: Bench) -> None:
    """Whichever of its segments an update drew, and however often the learner begins anew."""
    bench.arrive(*(scored(f"a{n}", session="long") for n in range(3)))
    for round_ in range(4):
        bench.arrive(*(scored(f"b{round_}{n}") for n in range(4)))
        bench.run(FakeTrainer(), max_updates_per_session=2, batch_segments=100)
    used = [{use.segment_id for use in bench.registry.lineage("default", n)} for n in (1, 2, 3, 4)]
    long = {"a0", "a1", "a2"}
    assert [long <= of_one for of_one in used] == [True, True, False, False]
    assert not long & (used[2] | used[3])


def test_replies_of_old_versions_are_not_trained_on(bench: Bench) -> None:
    for round_ in range(4):
        first = 10 * round_
        bench.arrive(*segments(*range(first, first + 4), version=round_))
        trainer = FakeTrainer()
        bench.run(trainer, batch_segments=100)
    versions = bench.registry.get("default", 4)
    assert versions is not None
    assert versions.behaviour_versions == {"1": 4, "2": 4, "3": 4}
    # Four of the window's sixteen segments were too old.
    assert versions.metrics["stale/dropped_share"] == 0.25


def test_what_cannot_be_used_is_a_dead_letter_and_the_stream_goes_on(bench: Bench) -> None:
    bench.arrive(*segments(0, 1))
    bench.log.extend([b"\xff", None])
    bench.arrive(scored("other", policy="other"), *segments(2, 3))
    bench.run(FakeTrainer(), batch_segments=100)
    letters = [
        build_codec().decode(record.value, DeadLetter)
        for record in bench.writer.records
        if record.topic == "dead"
    ]
    assert [(x.reason, x.topic, x.partition, x.offset, x.value) for x in letters] == [
        (DeadLetterReason.UNDECODABLE, "scored", 0, 2, b"\xff"),
        (DeadLetterReason.NULL_VALUE, "scored", 0, 3, None),
    ]
    assert letters[0].stage == "learner"
    assert [use.segment_id for use in bench.registry.lineage("default", 1)] == [
        "s0",
        "s1",
        "s2",
        "s3",
    ]
    assert bench.offsets() == [(0, 7)]


def test_learners_of_two_policies_share_a_topic(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.arrive(*[scored(f"n{n}", policy="npc") for n in range(5)])
    bench.arrive(*segments(4))
    for policy, names, opened in (
        ("default", ["s0", "s1", "s2", "s3", "s4"], (0, 10)),
        ("npc", ["n0", "n1", "n2", "n3", "n4"], (0, 10)),
    ):
        trainer = FakeTrainer()
        assert bench.run(trainer, policy=policy, batch_segments=100) == 1
        assert sorted(trainer.trained_on[0]) == names
        assert [use.segment_id for use in bench.registry.lineage(policy, 1)] == names
        (version,) = bench.registry.versions(policy)
        assert [(r.start, r.end) for r in version.source_offsets] == [opened]
        checkpoint = bench.registry.latest_checkpoint(policy)
        assert checkpoint is not None
        # The window names records of its own policy alone.
        own = {0, 1, 2, 3, 9} if policy == "default" else {4, 5, 6, 7, 8}
        assert {ref.offset for ref in checkpoint.window} == own
    assert [(v.policy, v.version, v.parent) for v in bench.writer.versions()] == [
        ("default", 1, None),
        ("npc", 1, None),
    ]
    assert {policy: bench.registry.live(policy) for policy in ("default", "npc")} == {
        "default": 1,
        "npc": 1,
    }


def test_records_of_others_are_read_past(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.run(FakeTrainer())
    bench.arrive(*[scored(f"n{n}", policy="npc", revision=3) for n in range(9)])
    # The same ids under another policy replace nothing.
    bench.arrive(*[scored(f"s{n}", policy="npc", revision=3) for n in range(4)])
    bench.arrive(*segments(4, 5, 6))
    bench.arrive(*segments(7))
    trainer = FakeTrainer()
    assert bench.run(trainer, batch_segments=100) == 1
    assert sorted(trainer.trained_on[0]) == [f"s{n}" for n in range(8)]
    assert bench.offsets() == [(0, 4), (4, 21)]


def test_an_update_without_usable_segments_is_skipped(bench: Bench) -> None:
    bench.arrive(*[scored(f"z{n}", reward=0.0) for n in range(4)])
    trainer = FakeTrainer()
    arrived = threading.Event()

    class Empty(FakeTrainer):
        """Lets usable segments arrive once it was asked in vain."""

        def train(
            self,
            segments: Sequence[ScoredSegment],
            current_version: int,
            adapter_of: Callable[[int], Path],
            should_stop: Callable[[], bool] = never,
        ) -> Trained | None:
            trained = super().train(segments, current_version, adapter_of, should_stop)
            if trained is None and not arrived.is_set():
                arrived.set()
                bench.arrive(*[scored(f"s{n}") for n in range(4)])
            return trained

    trainer = Empty()
    assert bench.run(trainer, batch_segments=100) == 1
    assert arrived.is_set()
    assert bench.offsets() == [(0, 8)]


def test_a_failed_update_is_logged_and_another_sample_tried(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(FakeTrainer):
        """Fails once, while more arrives."""

        failed = False

        def train(
            self,
            segments: Sequence[ScoredSegment],
            current_version: int,
            adapter_of: Callable[[int], Path],
            should_stop: Callable[[], bool] = never,
        ) -> Trained | None:
            if not self.failed:
                self.failed = True
                bench.arrive(*[scored(f"t{n}") for n in range(4)])
                raise LearnerError("the loss is not finite")
            return super().train(segments, current_version, adapter_of, should_stop)

    bench.arrive(*segments(0, 1, 2, 3))
    assert bench.run(Failing()) == 1
    assert "the loss is not finite" in caplog.text
    assert bench.offsets() == [(0, 8)]


def test_a_stop_ends_the_wait_at_once_and_leaves_the_outbox(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))

    class Stopping(FakeTrainer):
        """Is interrupted in the middle of an update, while Kafka is away."""

        def train(
            self,
            segments: Sequence[ScoredSegment],
            current_version: int,
            adapter_of: Callable[[int], Path],
            should_stop: Callable[[], bool] = never,
        ) -> Trained | None:
            bench.stopping.set()
            bench.writer.failures = 1
            # Too late to interrupt: the last micro-batch is done.
            return super().train(segments, current_version, adapter_of)

    assert bench.run(Stopping(), max_updates=0) == 1
    assert [v.version for v in bench.registry.unpublished()] == [1]
    bench.arrive(*segments(4, 5, 6, 7))
    bench.run(FakeTrainer())
    assert [v.version for v in bench.writer.versions()] == [1, 2]


def test_waiting_events_are_sent_before_leaving(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.writer.failures = 1
    assert bench.run(FakeTrainer()) == 1
    assert [v.version for v in bench.writer.versions()] == [1]


def test_waiting_events_are_sent_while_waiting_for_news(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.writer.failures = 2
    calls: list[int] = []

    def on_write() -> None:
        calls.append(bench.clock.now_ms())
        # The first is the publication's; the next come with the wait, five seconds apart. It may
        # have looked for some before the segments were read, too.
        bench.clock.advance(5_000)
        if len(calls) == 3:
            bench.stopping.set()

    bench.writer.on_write = on_write
    assert bench.run(FakeTrainer(), max_updates=0) == 1
    assert [v.version for v in bench.writer.versions()] == [1]
    assert calls == [1_000_000, 1_005_000, 1_010_000]


def test_progress_is_logged_when_it_changed_and_not_too_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = ManualClock(100_000)
    progress = _Progress(clock, SETTINGS)

    def show(new: int) -> int:
        arrivals = {"added": new}
        progress.show(
            FeedStatus(
                new_segments=new,
                available_segments=9,
                segments=9,
                tokens=36,
                held_bytes=4_500,
                arrivals=arrivals,
            )
        )
        return len(caplog.records)

    assert show(1) == 1
    assert "waiting new=1/4 available=9/2 window=9 tokens=36 kb=5 arrived=" in caplog.text
    clock.advance(10_000)
    assert show(1) == 1
    assert show(2) == 2
    clock.advance(9_999)
    assert show(3) == 2
    clock.advance(1)
    assert show(3) == 3
    clock.advance(-50_000)
    # A clock that was set back does not silence it.
    assert show(4) == 4


def test_a_recreated_topic_is_refused(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.run(FakeTrainer())
    del bench.log[1:]
    with pytest.raises(LearnerError, match="the topic was recreated"):
        bench.run(FakeTrainer())


def test_a_reading_that_failed_ends_the_learner(bench: Bench) -> None:
    bench.arrive(*segments(0, 1))
    consumer_error = RuntimeError("broken")

    def fail(*_: object) -> None:
        raise consumer_error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeConsumer, "consume", fail)
        with pytest.raises(ClawstreamError, match="broken"):
            bench.run(FakeTrainer())


def test_the_trainer_can_load_the_adapter_of_any_version(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.run(FakeTrainer())
    seen: list[Path] = []

    class Looking(FakeTrainer):
        """Asks for an adapter that is there and for one that is not."""

        def train(
            self,
            segments: Sequence[ScoredSegment],
            current_version: int,
            adapter_of: Callable[[int], Path],
            should_stop: Callable[[], bool] = never,
        ) -> Trained | None:
            seen.append(adapter_of(1))
            with pytest.raises(RegistryError, match="no version 7"):
                adapter_of(7)
            return super().train(segments, current_version, adapter_of, should_stop)

    bench.arrive(*segments(4, 5, 6, 7))
    bench.run(Looking())
    assert stored_weights(seen[0]) == bench.adapter(1)


def test_an_adapter_for_another_base_model_is_not_taken_for_one_of_ours(bench: Bench) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.run(FakeTrainer())
    refused: list[str] = []

    class OnAnother(FakeTrainer):
        @property
        def base(self) -> BaseIdentity:
            return dataclasses.replace(super().base, model_digest="f" * 64)

        def train(self, segments: Any, current_version: int, adapter_of: Any, *_: Any) -> None:
            with pytest.raises(RegistryError, match="is an adapter for fake, not for") as caught:
                adapter_of(1)
            refused.append(str(caught.value))
            bench.stopping.set()

    bench.arrive(*segments(4, 5, 6, 7))
    bench.run(OnAnother())
    assert len(refused) == 1


def test_a_stop_interrupts_an_update_and_the_next_start_makes_it(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    class Interrupted(FakeTrainer):
        def train(
            self,
            segments: Sequence[ScoredSegment],
            current_version: int,
            adapter_of: Callable[[int], Path],
            should_stop: Callable[[], bool] = never,
        ) -> Trained | None:
            assert not should_stop()
            if self.steps == 1:
                bench.stopping.set()
            return super().train(segments, current_version, adapter_of, should_stop)

    whole = Bench(tmp_path_factory.mktemp("whole"))
    for one in (bench, whole):
        one.arrive(*segments(0, 1, 2, 3))
        assert one.run(FakeTrainer()) == 1
        one.arrive(*segments(4, 5, 6, 7))
    trainer = Interrupted()
    assert bench.run(trainer, max_updates=0) == 0
    assert trainer.steps == 1
    assert [v.version for v in bench.registry.versions()] == [1]
    assert [bench.run(FakeTrainer()), whole.run(FakeTrainer())] == [1, 1]
    assert bench.offsets() == whole.offsets() == [(0, 4), (4, 8)]
    assert bench.adapter(2) == whole.adapter(2)
    assert bench.registry.lineage("default", 2) == whole.registry.lineage("default", 2)
    whole.registry.close()


@pytest.mark.parametrize("place", ["adapter", "state", "registry"])
def test_what_cannot_be_written_is_made_again_by_the_next_start(
    place: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    writing = ArtifactStore.write

    def full(
        store: ArtifactStore, policy: str, name: str, fill: Callable[[Path], object]
    ) -> StoredFolder:
        if name.startswith("policy" if place == "adapter" else "learner"):
            raise ArtifactError("no space left")
        return writing(store, policy, name, fill)

    def locked(*_: object, **__: object) -> None:
        raise RegistryError("database is locked")

    if place == "registry":
        monkeypatch.setattr(Registry, "record", locked)
    else:
        monkeypatch.setattr(ArtifactStore, "write", full)
    with pytest.raises((ArtifactError, RegistryError), match=r"no space left|locked"):
        bench.run(FakeTrainer())
    assert bench.registry.versions() == ()
    assert bench.writer.records == []
    monkeypatch.undo()
    assert bench.run(FakeTrainer()) == 1
    assert bench.offsets() == [(0, 4)]
    assert [v.version for v in bench.writer.versions()] == [1]


@pytest.mark.parametrize(
    ("mode", "admitted"), [("ppo", False), ("grpo", False), ("opd", True), ("hybrid", True)]
)
def test_the_window_admits_words_where_the_mode_learns_from_them(
    mode: str, admitted: bool, tmp_path: Path
) -> None:
    learner = LearnerSettings(
        window_segments=7, window_tokens=9, max_updates_per_segment=2, min_sample_size=7
    )
    settings = Settings(
        data_dir=tmp_path,
        kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"),
        learner=learner.model_copy(update={"mode": mode, "policy": "npc"}),
    )
    links = _connect(settings, threading.Event(), Topics(), ManualClock(0))
    feed = _make_feed(settings, links)
    unrated = scored("a", trainable=False, reward=0.0, tokens=4)
    (reward,) = unrated.rewards
    worded = replace(unrated, rewards=(replace(reward, directives=("shorter",)),))
    found = add(feed._window, at(0), worded)
    assert found is (Arrival.ADDED if admitted else Arrival.UNTRAINABLE)
    # The caps are those of the settings.
    for offset in range(1, 4):
        add(
            feed._window,
            at(offset),
            scored(f"s{offset}", tokens=4),
            past_uses=frozenset(range(2 * (offset == 3))),
        )
    assert (len(feed._window), feed._window.tokens) == (2, 8)
    assert feed._window.available_segments == 1
    assert feed._policy == "npc"
    feed.stop()


def test_a_second_learner_of_a_policy_is_refused_before_it_loads_a_model(tmp_path: Path) -> None:
    def load(_: Settings) -> FakeTrainer:
        raise AssertionError("the model was loaded")

    settings = Settings(data_dir=tmp_path, kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    store = ArtifactStore.open(settings.effective_artifacts_url)
    with (
        store.claim(settings.learner.policy),
        pytest.raises(ArtifactError, match="another learner of policy 'default'"),
    ):
        run(settings, load, stopping=threading.Event())
