"""Several processes behind one ``Trainer``: what ``accelerate launch`` starts.

The first process is the learner: it alone reads Kafka, draws samples, publishes and answers to
signals. Before each thing that the trainer does it tells the others, who do the same: `follow`
is all their life. What they hold is therefore the same at every moment, and the first one's
state, adapter and metrics are everybody's.

A process that fails in a way the others cannot share (no memory, a broken connection) ends, and
``accelerate launch`` ends the rest; the next start goes on from the newest version.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed as dist

from learner.examples import ExampleFile
from learner.loop import Trained, Trainer
from learner.publish import BaseIdentity
from learner.team import Alone, Processes, Team
from learner.warming import WarmStarted, WarmStartHooks
from streams.contracts import ScoredSegment
from streams.errors import (
    ArtifactError,
    ClawstreamError,
    LearnerError,
    ProcessError,
    RegistryError,
    UpdateStoppedError,
)
from streams.settings import Settings

log = logging.getLogger(__name__)

_PATIENCE = timedelta(days=365)
"""How long the others wait for the first one's next word: nothing may come for days."""

Order = tuple[str, tuple[Any, ...]]
"""What is to be done (``train``, ``load`` or ``end``), and with what."""

_END: Order = ("end", ())


class Voice(Protocol):
    """How the first process reaches the others."""

    def say(self, order: Order) -> None:
        """Let all others hear an order (the first process)."""
        ...

    def hear(self) -> Order:
        """Wait for the next order (the others)."""
        ...


class Broadcast:
    """A voice over a gloo group of its own, whatever the numbers go over."""

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def say(self, order: Order) -> None:
        dist.broadcast_object_list([order], src=0, group=self._group)

    def hear(self) -> Order:
        """Wait for the next order.

        Raises:
            ProcessError: The first process is gone.
        """
        heard: list[Any] = [None]
        try:
            dist.broadcast_object_list(heard, src=0, group=self._group)
        except RuntimeError as error:
            raise ProcessError(f"the first process of the learner is gone: {error}") from error
        order: Order = heard[0]
        return order


class Leader:
    """The trainer of the first process: does everything with all of them.

    Args:
        trainer: Its own; made with the processes as its team.
        voice: Reaches the others.
    """

    def __init__(self, trainer: Trainer, voice: Voice) -> None:
        self._trainer = trainer
        self._voice = voice

    @property
    def base(self) -> BaseIdentity:
        """See ``learner.loop.Trainer``."""
        return self._trainer.base

    @property
    def optimizer_step(self) -> int:
        """See ``learner.loop.Trainer``."""
        return self._trainer.optimizer_step

    def train(
        self,
        segments: Sequence[ScoredSegment],
        current_version: int,
        adapter_of: Callable[[int], Path],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        """See ``learner.loop.Trainer``.

        Raises:
            ProcessError: This process failed alone; the others cannot be reached any more.
        """
        adapters = _adapters(segments, adapter_of)
        self._voice.say(("train", (tuple(segments), current_version, adapters)))
        with _failing_together():
            return self._trainer.train(segments, current_version, _finder(adapters), should_stop)

    def warm_start(self, file: ExampleFile, hooks: WarmStartHooks) -> WarmStarted:
        """As ``learner.loop.Trainer``, in this process alone; the others take the result."""
        warmed = self._trainer.warm_start(file, hooks)
        self._voice.say(("load", (_on_cpu(self._trainer.state_dict()),)))
        return warmed

    def state_dict(self) -> Mapping[str, Any]:
        """See ``learner.loop.Trainer``."""
        return self._trainer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``learner.loop.Trainer``.

        Raises:
            ProcessError: As ``train``.
        """
        self._voice.say(("load", (_on_cpu(state),)))
        with _failing_together():
            self._trainer.load_state_dict(state)

    def save_adapter(self, folder: Path) -> None:
        """See ``learner.loop.Trainer``."""
        self._trainer.save_adapter(folder)


def follow(trainer: Trainer, voice: Voice) -> None:
    """Do what the first process says, until it says that it is over.

    Raises:
        ProcessError: The first process is gone, or this one failed alone.
    """
    while True:
        order, arguments = voice.hear()
        if order == "end":
            return
        try:
            with _failing_together():
                _obey(trainer, order, arguments)
        except (LearnerError, UpdateStoppedError) as error:
            log.info("not done: %s: %s", order, error)


def _obey(trainer: Trainer, order: str, arguments: tuple[Any, ...]) -> None:
    if order == "load":
        trainer.load_state_dict(*arguments)
        return
    segments, current_version, adapters = arguments
    trainer.train(segments, current_version, _finder(adapters), _never)


def run_together(
    settings: Settings,
    make_trainer: Callable[[Settings, Team], Trainer],
    run: Callable[[Callable[[Settings], Trainer]], object],
    *,
    launched: bool,
) -> None:
    """Run the learner in the first of the processes, and let the others follow.

    Args:
        settings: All settings.
        make_trainer: Makes each process's trainer.
        run: Runs the learner with a trainer that it makes with what it is given.
        launched: Whether ``accelerate launch`` started this process and others.

    Raises:
        ClawstreamError: As ``run``, or one of the processes cannot go on.
    """
    on_cpu = settings.model.device == "cpu" or not torch.cuda.is_available()
    with joined(launched, on_cpu=on_cpu) as (team, voice):
        if voice is None:
            run(lambda given: make_trainer(given, team))
        elif dist.get_rank() == 0:
            _lead(lambda given: Leader(make_trainer(given, team), voice), run, voice)
        else:
            follow(make_trainer(settings, team), voice)


def _lead(
    make_leader: Callable[[Settings], Trainer],
    run: Callable[[Callable[[Settings], Trainer]], object],
    voice: Voice,
) -> None:
    try:
        run(make_leader)
    except ProcessError:
        # The others wait for something else; who started them ends them.
        raise
    except ClawstreamError:
        # They may have met the same and be gone: what is said is why, not that nobody hears it.
        with contextlib.suppress(RuntimeError):
            voice.say(_END)
        raise
    voice.say(_END)


@contextlib.contextmanager
def joined(launched: bool, *, on_cpu: bool) -> Iterator[tuple[Team, Voice | None]]:
    """The processes that ``accelerate launch`` started, as a team; this one alone if it did not.

    Args:
        launched: Whether it did.
        on_cpu: Whether numbers are on the CPU even where there is a GPU.

    Yields:
        The team, and the voice in it; None where nobody else is.

    Raises:
        ProcessError: The processes do not find each other.
    """
    if not launched:
        yield Alone(), None
        return
    from accelerate import PartialState

    try:
        state = PartialState(cpu=on_cpu)
    except (RuntimeError, ValueError) as error:
        raise ProcessError(f"the learner's processes do not find each other: {error}") from error
    try:
        log.info("process %d of %d on %s", state.process_index, state.num_processes, state.device)
        yield Processes(torch.device(state.device)), Broadcast()
    finally:
        with contextlib.suppress(RuntimeError):
            state.destroy_process_group()


@contextlib.contextmanager
def _failing_together() -> Iterator[None]:
    """Tell apart what all processes find out alike from what one of them met alone.

    All see the same data and the same sums: of a ``LearnerError`` that nothing else caused, all
    know. Any other error leaves the others waiting for what will not come.
    """
    try:
        yield
    except UpdateStoppedError:
        raise
    except LearnerError as error:
        if error.__cause__ is None:
            raise
        raise ProcessError(f"one process of the learner failed: {error}") from error
    except RuntimeError as error:
        raise ProcessError(f"one process of the learner failed: {error}") from error


Adapters = Mapping[int, Path | str]
"""Folders by version; why there is none where there is none."""


def _adapters(
    segments: Sequence[ScoredSegment], adapter_of: Callable[[int], Path]
) -> dict[int, Path | str]:
    """Where the adapters are that an update on these may ask for; found by one, used by all."""
    found: dict[int, Path | str] = {}
    for segment in segments:
        for step in segment.segment.steps:
            version = step.policy_version
            if version and version not in found:
                try:
                    found[version] = adapter_of(version)
                except (ArtifactError, RegistryError) as error:
                    found[version] = str(error)
    return found


def _finder(adapters: Adapters) -> Callable[[int], Path]:
    def adapter_of(version: int) -> Path:
        found = adapters.get(version, f"nobody asked for the adapter of version {version}")
        if isinstance(found, str):
            raise ArtifactError(found)
        return found

    return adapter_of


def _on_cpu(state: Any) -> Any:
    """The same, with all tensors where every process can read them."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {name: _on_cpu(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_on_cpu(value) for value in state)
    return state


def _never() -> bool:
    return False


__all__ = ["Broadcast", "Leader", "Order", "Voice", "follow", "joined", "run_together"]
