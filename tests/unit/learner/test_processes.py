from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from learner.loop import Trained
from learner.processes import Leader, Order, follow, run_together
from learner.team import Alone, Processes
from learner.warming import WarmStartHooks
from streams.contracts import ScoredSegment
from streams.errors import (
    ArtifactError,
    BrokerError,
    LearnerError,
    ProcessError,
    UpdateStoppedError,
)
from streams.settings import Settings
from tests.unit.learner.fakes import FakeTrainer, never, no_adapter, scored
from tests.unit.learner.test_warming import examples


class Line:
    """A voice between threads."""

    def __init__(self) -> None:
        self.orders: queue.Queue[Order] = queue.Queue()

    def say(self, order: Order) -> None:
        self.orders.put(order)

    def hear(self) -> Order:
        return self.orders.get(timeout=240.0)


class Pair:
    """A leader and one follower, with trainers of their own."""

    def __init__(self, leading: FakeTrainer, following: FakeTrainer) -> None:
        self.own, self.other = leading, following
        self.line = Line()
        self.leader = Leader(leading, self.line)
        self.failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            follow(self.other, self.line)
        except BaseException as error:
            self.failure.append(error)

    def finish(self) -> None:
        self.line.say(("end", ()))
        self._thread.join(60.0)
        assert not self._thread.is_alive()


class Quiet(FakeTrainer):
    """Draws the same each time, so that trainers that see the same do the same.

    torch's random state is the process's: one of the threads at a time.
    """

    drawing = threading.Lock()

    def train(self, segments: Sequence[ScoredSegment], *others: Any) -> Trained | None:
        with self.drawing, torch.random.fork_rng():
            torch.manual_seed(0)
            return super().train(segments, *others)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(Quiet(), Quiet())
    yield made
    made.finish()


def test_the_follower_holds_what_the_leader_holds(pair: Pair, tmp_path: Path) -> None:
    some = [scored("a"), scored("b", reward=-0.5)]
    before = dict(pair.leader.state_dict())
    trained = pair.leader.train(some, 0, no_adapter, never)
    assert trained is not None
    pair.leader.train(some, 0, no_adapter, never)
    pair.leader.load_state_dict(before)
    pair.leader.train(some, 0, no_adapter, never)
    pair.finish()
    assert pair.own.trained_on == pair.other.trained_on == [("a", "b")] * 3
    assert torch.equal(pair.own.weights, pair.other.weights)
    assert pair.other.weights.any()
    assert (pair.leader.optimizer_step, pair.leader.base) == (1, pair.own.base)
    pair.leader.save_adapter(tmp_path)
    assert list(tmp_path.iterdir())


def test_adapters_are_looked_up_once_and_found_by_all(pair: Pair) -> None:
    asked: list[int] = []

    def adapter_of(version: int) -> Path:
        asked.append(version)
        if version == 2:
            raise ArtifactError("version 2 is gone")
        return Path(f"v{version}")

    found: dict[str, Any] = {}

    def looking(name: str) -> Callable[..., Trained | None]:
        def train(_: Any, __: int, adapter: Callable[[int], Path], ___: Any) -> None:
            found[name] = adapter(1)
            with pytest.raises(ArtifactError, match="version 2 is gone"):
                adapter(2)
            with pytest.raises(ArtifactError, match="nobody asked"):
                adapter(3)

        return train

    pair.own.train = looking("own")  # type: ignore[method-assign]
    pair.other.train = looking("other")  # type: ignore[method-assign]
    some = [scored(f"s{v}", policy_version=v) for v in (0, 1, 2, 1)]
    assert pair.leader.train(some, 3, adapter_of, never) is None
    pair.finish()
    assert pair.failure == []
    assert found == {"own": Path("v1"), "other": Path("v1")}
    assert asked == [1, 2]


def test_a_warm_start_is_the_leader_s_and_its_result_everybody_s(
    pair: Pair, tmp_path: Path
) -> None:
    hooks = WarmStartHooks(
        resume=None, save=lambda _: None, shown=lambda *_: None, should_stop=never
    )
    pair.leader.warm_start(examples(tmp_path / "labels.jsonl"), hooks)
    pair.finish()
    assert pair.own.warm_steps > 0 == pair.other.warm_steps
    assert torch.equal(pair.own.weights, pair.other.weights)


@pytest.mark.parametrize("error", [LearnerError("not finite"), UpdateStoppedError("stop")])
def test_what_all_find_out_alike_ends_nobody(pair: Pair, error: LearnerError) -> None:
    def failing(*_: Any) -> None:
        raise error

    pair.own.train = pair.other.train = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(type(error), match=str(error)):
        pair.leader.train([scored("a")], 0, no_adapter, never)
    pair.leader.load_state_dict(pair.own.state_dict())
    pair.finish()
    assert pair.failure == []


def test_a_state_that_fits_nobody_ends_the_learner_with_its_reason_alone(pair: Pair) -> None:
    def misfit(_: Any) -> None:
        raise LearnerError("cannot restore a learner state with lora_rank 8: it is 4 now")

    for held in (pair.own, pair.other):
        held.load_state_dict = misfit  # type: ignore[method-assign,assignment]
    with pytest.raises(LearnerError, match="lora_rank 8"):
        pair.leader.load_state_dict({})
    # The other one still listens for the end.
    pair.finish()
    assert pair.failure == []


@pytest.mark.parametrize("alone", ["own", "other"])
def test_a_state_that_one_cannot_take_ends_it(pair: Pair, alone: str) -> None:
    def misfit(_: Any) -> None:
        raise LearnerError("cannot restore the learner state") from RuntimeError("no memory")

    getattr(pair, alone).load_state_dict = misfit
    state = {"weights": torch.zeros(3), "momentum": torch.zeros(3), "steps": 0}
    if alone == "own":
        with pytest.raises(ProcessError, match="cannot restore"):
            pair.leader.load_state_dict(state)
    else:
        pair.leader.load_state_dict(state)
    pair.finish()
    assert [type(error) for error in pair.failure] == [ProcessError] * (alone == "other")


@pytest.mark.parametrize("alone", ["own", "other"])
@pytest.mark.parametrize("kind", ["memory", "connection"])
def test_what_one_meets_alone_ends_it(pair: Pair, alone: str, kind: str) -> None:
    def failing(*_: Any) -> None:
        if kind == "connection":
            raise RuntimeError("Connection reset by peer")
        raise LearnerError("not enough memory") from MemoryError()

    getattr(pair, alone).train = failing
    if alone == "own":
        with pytest.raises(ProcessError, match="one process of the learner failed"):
            pair.leader.train([scored("a")], 0, no_adapter, never)
    else:
        pair.leader.train([scored("a")], 0, no_adapter, never)
    pair.finish()
    assert [type(error) for error in pair.failure] == [ProcessError] * (alone == "other")


# --- how the processes begin and end ------------------------------------------------------------


def test_alone_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(settings: Settings, team: Any) -> FakeTrainer:
        made.append(team)
        return FakeTrainer()

    def run(make_trainer: Callable[[Settings], Any]) -> None:
        assert isinstance(make_trainer(Settings()), FakeTrainer)

    run_together(Settings(), make, run, launched=False)
    assert [type(team) for team in made] == [Alone]


@pytest.fixture
def one_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_one")
def test_sums_replace_tensors_whatever_their_kinds() -> None:
    team = Processes(torch.device("cpu"))
    weight = torch.nn.Parameter(torch.ones(2, 3))
    tensors = [weight, torch.tensor([1.0], dtype=torch.float64), torch.zeros(0), torch.ones(())]
    expected = [tensor.detach().clone() for tensor in tensors]
    team.add(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert team.largest(0.5) == 0.5
    assert team.size == 1
    assert team.turns("abc") == [("a", True), ("b", True), ("c", True)]
    assert Alone().turns("abc") == team.turns("abc")


@pytest.mark.parametrize(
    ("items", "size"), [("abcde", 2), ("ab", 4), ("a", 3), ("", 2), ("abcd", 2)]
)
def test_every_item_counts_once_and_all_take_equally_many_turns(
    items: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    turns = []
    for rank in range(size):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        turns.append(Processes(torch.device("cpu")).turns(items))
    assert len({len(of_one) for of_one in turns}) == 1
    counted = [item for of_one in turns for item, counts in of_one if counts]
    assert sorted(counted) == sorted(items)


@pytest.mark.parametrize(
    ("error", "said"),
    [(None, ["end"]), (BrokerError("away"), ["end"]), (ProcessError("alone"), [])],
)
@pytest.mark.usefixtures("one_of_one")
def test_the_others_are_let_go_unless_they_wait_for_something_else(
    error: Exception | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line()
    monkeypatch.setattr(
        "learner.processes.joined",
        lambda launched, on_cpu: contextlib.nullcontext((Alone(), line)),
    )

    def run(make_trainer: Callable[[Settings], Any]) -> None:
        assert isinstance(make_trainer(Settings()), Leader)
        if error is not None:
            raise error

    def together() -> None:
        run_together(Settings(), lambda *_: FakeTrainer(), run, launched=True)

    if error is None:
        together()
    else:
        with pytest.raises(type(error)):
            together()
    assert [order for order, _ in line.orders.queue] == said


@pytest.mark.usefixtures("one_of_one")
def test_why_it_ended_is_said_though_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody(Line):
        def say(self, order: Order) -> None:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(
        "learner.processes.joined",
        lambda launched, on_cpu: contextlib.nullcontext((Alone(), Nobody())),
    )

    def run(make_trainer: Callable[[Settings], Any]) -> None:
        raise LearnerError("cannot restore a learner state")

    with pytest.raises(LearnerError, match="cannot restore"):
        run_together(Settings(), lambda *_: FakeTrainer(), run, launched=True)
