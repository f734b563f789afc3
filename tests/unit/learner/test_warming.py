"""A warm start within the learner: once a file, a version with lineage, resumable."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.examples import ExampleFile, read_examples
from learner.warming import SHA256, WarmStarted, WarmStartHooks
from streams.contracts import ModelVersion, VersionStatus
from streams.errors import RegistryError
from streams.registry import Registry
from tests.unit.learner.fakes import FakeTrainer
from tests.unit.learner.test_loop import Bench, segments


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "bench")
    yield made
    made.registry.close()


@pytest.fixture
def file(tmp_path: Path) -> ExampleFile:
    return examples(tmp_path / "labels.jsonl")


def examples(path: Path, count: int = 4) -> ExampleFile:
    """Half preferences, half demonstrations."""
    asked = [{"role": "user", "content": "Hi"}]
    lines = [
        {"messages": asked, "chosen": f"a{n}", "rejected": "b"}
        if n % 2
        else {"messages": asked, "reply": f"c{n}"}
        for n in range(count)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return read_examples(path)


def warm(bench: Bench, trainer: FakeTrainer, file: ExampleFile, **changes: object) -> int:
    """A learner that does the warm start alone."""
    return bench.learner(trainer, file, only=True, **changes)()


def leftovers(bench: Bench, tmp_path: Path) -> list[str]:
    """Folders of unfinished warm starts."""
    folder = tmp_path / "bench" / "artifacts" / "default"
    return sorted(path.name for path in folder.glob("warm-start-*"))


def test_a_warm_start_is_a_version_with_its_source(bench: Bench, file: ExampleFile) -> None:
    trainer = FakeTrainer()
    assert warm(bench, trainer, file) == 0
    (version,) = bench.writer.versions()
    assert (version.version, version.status, version.parent) == (1, VersionStatus.LIVE, None)
    assert version.attributes == {
        SHA256: file.sha256,
        "warm_start_file": "labels.jsonl",
        "warm_start_preferences": "2",
        "warm_start_demonstrations": "2",
    }
    assert version.reason == "warm start: 2 preferences and 2 demonstrations of labels.jsonl"
    assert [decision.name for decision in version.gate] == [
        "finite_metrics",
        "finite_weights",
        "warm_start_loss",
    ]
    assert (version.segment_count, version.source_offsets) == (0, ())
    assert bench.registry.live("default") == 1
    assert bench.adapter(1) == trainer.weights.tolist() == [4.0] * 3


def test_the_same_file_is_learned_once(bench: Bench, file: ExampleFile, tmp_path: Path) -> None:
    warm(bench, FakeTrainer(), file)
    again = FakeTrainer()
    warm(bench, again, file)
    assert again.warm_steps == 0
    assert again.weights.tolist() == [4.0] * 3
    # Another name is the same file; another byte is another file; settings do not matter.
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_bytes((tmp_path / "labels.jsonl").read_bytes())
    warm(bench, again, read_examples(renamed), seed=5)
    assert (again.warm_steps, len(bench.registry.versions())) == (0, 1)
    other = FakeTrainer()
    warm(bench, other, examples(tmp_path / "labels.jsonl", count=3))
    assert (other.warm_steps, other.weights.tolist()) == (3, [7.0] * 3)
    assert [v.parent for v in bench.registry.versions()] == [None, 1]
    # The first one is still known when it comes again.
    warm(bench, again, file)
    assert again.warm_steps == 0


def test_a_rejected_one_is_undone_and_may_be_tried_again(
    bench: Bench, file: ExampleFile, caplog: pytest.LogCaptureFixture
) -> None:
    bad = FakeTrainer()
    bad.poison = True
    warm(bench, bad, file)
    (version,) = bench.registry.versions()
    assert version.status is VersionStatus.REJECTED
    assert version.reason == "rejected by warm_start_loss (None)"
    assert bad.weights.tolist() == [0.0] * 3
    assert bench.registry.live("default") is None
    assert "version 1 rejected by warm_start_loss" in caplog.text
    good = FakeTrainer()
    warm(bench, good, file)
    assert [v.status for v in bench.registry.versions()] == [
        VersionStatus.REJECTED,
        VersionStatus.LIVE,
    ]
    assert bench.adapter(2) == [4.0] * 3


def test_updates_go_on_from_it_and_read_everything(bench: Bench, file: ExampleFile) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    trainer = FakeTrainer()
    assert bench.learner(trainer, file)() == 1
    first, second = bench.registry.versions()
    assert first.attributes[SHA256] == file.sha256
    assert SHA256 not in second.attributes
    assert (second.parent, second.segment_count) == (1, 3)
    assert bench.offsets() == [(0, 4)]
    assert min(bench.adapter(2)) > 4.0
    # A restart with the same arguments goes on with the updates alone.
    bench.arrive(*segments(4, 5, 6, 7))
    again = FakeTrainer()
    assert bench.learner(again, file)() == 1
    assert again.warm_steps == 0
    assert bench.offsets() == [(0, 4), (4, 8)]


def test_between_updates_it_consumes_nothing(bench: Bench, file: ExampleFile) -> None:
    bench.arrive(*segments(0, 1, 2, 3))
    bench.run(FakeTrainer())
    before = bench.registry.latest_checkpoint("default")
    bench.arrive(*segments(4, 5, 6, 7))
    warm(bench, FakeTrainer(), file)
    after = bench.registry.latest_checkpoint("default")
    assert before is not None
    assert after is not None
    assert (after.version, after.positions, after.window, after.rng, after.sealed_at) == (
        2,
        before.positions,
        before.window,
        before.rng,
        before.sealed_at,
    )
    assert bench.run(FakeTrainer()) == 1
    assert bench.offsets() == [(0, 4), (4, 4), (4, 8)]
    assert [v.parent for v in bench.registry.versions()] == [None, 1, 2]


class Stopping(FakeTrainer):
    """Is asked to stop once it has made two of four steps."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench

    def warm_start(self, file: ExampleFile, hooks: WarmStartHooks) -> WarmStarted:
        def should_stop() -> bool:
            if self.warm_steps == 2:
                self._bench.stopping.set()
            return hooks.should_stop()

        return super().warm_start(
            file,
            WarmStartHooks(
                resume=hooks.resume, save=hooks.save, shown=hooks.shown, should_stop=should_stop
            ),
        )


def test_a_stop_keeps_what_was_done_and_the_next_start_goes_on(
    bench: Bench, file: ExampleFile, tmp_path: Path
) -> None:
    stopped = Stopping(bench)
    bench.arrive(*segments(0, 1, 2, 3))
    assert bench.learner(stopped, file)() == 0
    assert (stopped.warm_steps, stopped.steps) == (2, 0)
    assert bench.registry.versions() == ()
    assert len(leftovers(bench, tmp_path)) == 1
    resumed = FakeTrainer()
    assert bench.learner(resumed, file)() == 1
    assert resumed.warm_steps == 2
    assert bench.adapter(1) == [4.0] * 3
    assert leftovers(bench, tmp_path) == []


@pytest.mark.parametrize("change", ["settings", "parent", "file", "damage"])
def test_progress_under_other_conditions_is_not_gone_on_from(
    change: str, bench: Bench, file: ExampleFile, tmp_path: Path
) -> None:
    warm(bench, Stopping(bench), file)
    (name,) = leftovers(bench, tmp_path)
    changes: dict[str, object] = {}
    if change == "settings":
        changes["warm_start_beta"] = 0.5
    elif change == "parent":
        bench.arrive(*segments(0, 1, 2, 3))
        bench.run(FakeTrainer())
    elif change == "file":
        file = examples(tmp_path / "other.jsonl", count=5)
    else:
        folder = tmp_path / "bench" / "artifacts" / "default" / name
        (folder / "progress.pt").write_bytes(b"damaged")
    again = FakeTrainer()
    warm(bench, again, file, **changes)
    assert again.warm_steps == len(file.examples)
    assert leftovers(bench, tmp_path) == []


def test_a_crash_at_any_moment_leaves_one_version(file: ExampleFile, tmp_path: Path) -> None:
    """Killed right after each step, before and after the version is recorded."""

    class Dying(FakeTrainer):
        def __init__(self, at: int) -> None:
            super().__init__()
            self._at = at

        def warm_start(self, file: ExampleFile, hooks: WarmStartHooks) -> WarmStarted:
            def save(state: object) -> None:
                hooks.save(state)  # type: ignore[arg-type]
                if self.warm_steps == self._at:
                    os.kill(os.getpid(), signal.SIGKILL)

            return super().warm_start(
                file,
                WarmStartHooks(
                    resume=hooks.resume, save=save, shown=hooks.shown, should_stop=hooks.should_stop
                ),
            )

    for at in range(1, 5):
        folder = tmp_path / str(at)
        pid = os.fork()
        if pid == 0:
            warm(Bench(folder), Dying(at), file)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        bench = Bench(folder)
        assert bench.registry.versions() == ()
        survivor = FakeTrainer()
        warm(bench, survivor, file)
        assert survivor.warm_steps == 4 - at
        assert bench.adapter(1) == [4.0] * 3
        warm(bench, survivor, file)
        assert len(bench.registry.versions()) == 1
        bench.registry.close()


def test_what_cannot_be_recorded_is_done_again(
    bench: Bench, file: ExampleFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def locked(*_: object, **__: object) -> None:
        raise RegistryError("database is locked")

    monkeypatch.setattr(Registry, "record", locked)
    with pytest.raises(RegistryError, match="locked"):
        warm(bench, FakeTrainer(), file)
    monkeypatch.undo()
    assert len(leftovers(bench, tmp_path)) == 1
    again = FakeTrainer()
    warm(bench, again, file)
    # All steps had been made; only the publication is made again.
    assert again.warm_steps == 0
    assert bench.adapter(1) == [4.0] * 3


def test_an_event_that_kafka_did_not_take_waits(bench: Bench, file: ExampleFile) -> None:
    bench.writer.failures = 1
    warm(bench, FakeTrainer(), file)
    assert bench.writer.versions() == []
    again = FakeTrainer()
    warm(bench, again, file)
    assert again.warm_steps == 0
    found: list[ModelVersion] = bench.writer.versions()
    assert [v.version for v in found] == [1]


def test_progress_is_shown_but_not_every_step(
    bench: Bench, file: ExampleFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    warm(bench, FakeTrainer(), file)
    shown = [r.getMessage() for r in caplog.records if "step=" in r.getMessage()]
    # The clock stands still: the first step, and the last.
    assert shown == [
        "warm start: 25% step=1/4 loss=1",
        "warm start: 100% step=4/4 loss=1",
    ]
    assert "warm start: version=1 status=live warm_start/steps=0" in caplog.text
