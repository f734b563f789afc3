"""Signals, components and judges from other packages, through entry points.

A package names what it offers in its ``pyproject.toml``::

    [project.entry-points."clawstream.components"]
    brevity = "my_package:brevity"

and the settings say what is used, and how much it counts (``reward.plugin_components: {brevity:
0.1}``). ``docs/plugins.md`` has the protocols with a worked example.

A plugin that raises, or returns something else than its protocol says, costs nothing but its own
part: the step is scored without it, its reasons name the plugin and the error, the segment's
attribute ``plugin_errors`` names it, and ``clawstream_plugin_errors_total`` counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import Any, Protocol

from streams.contracts import Step, TrajectorySegment
from streams.errors import PluginError, SettingsError
from streams.settings import RewardSettings

SIGNALS = "clawstream.signals"
COMPONENTS = "clawstream.components"
JUDGES = "clawstream.judges"

MAX_MESSAGE = 200
"""How much is kept of what a plugin says: of its error, of a signal's words, of a line."""

MAX_LINES = 20
"""How many lines of evidence are kept."""

OWN_PARTS = frozenset({"explicit", "implicit", "business", "process", "judge", "diversity"})
"""The names of the parts that every reward has."""

OURS = (KeyboardInterrupt, GeneratorExit)
"""What is raised in the midst of a plugin and is none of its failures. All else that it raises, a
``sys.exit`` and errors that are no ``Exception`` among it, harms nothing but its own part."""


class SignalPlugin(Protocol):
    """Reads a user's turn: does it say something about the reply right before it?"""

    def __call__(self, text: str) -> str | None:
        """The words that gave it away, at most a line; None, or no words, if it does not.

        Args:
            text: The whole turn, as the user wrote it.
        """
        ...


class ComponentPlugin(Protocol):
    """Makes one part of a step's reward."""

    def __call__(
        self, step: Step, segment: TrajectorySegment, settings: RewardSettings
    ) -> tuple[float | None, Sequence[str]]:
        """Its value in [-1, 1], or None if it has nothing to go by; and its evidence.

        It must be pure: the same arguments always give the same result, however often it is asked.
        """
        ...


class JudgePlugin(Protocol):
    """Says how good a reply is. It runs in the judge's process and may take its time."""

    async def __call__(self, prompt: str, timeout_s: float) -> str:
        """The judge's words about one reply, with a verdict in it as the rubric demands.

        Args:
            prompt: The rubric with the conversation and the reply.
            timeout_s: How long it may take; what takes longer is cancelled.
        """
        ...


@dataclass(frozen=True, slots=True)
class Plugged:
    """A plugin in use.

    Args:
        name: Its name in the settings.
        call: What it offers.
        amount: Its points (a signal) or weight (a component).
        origin: The distribution it comes from, with its version.
    """

    name: str
    call: Callable[..., Any]
    amount: float
    origin: str


@dataclass(frozen=True, slots=True)
class Plugins:
    """The signals and components in use, each in the order of the settings."""

    signals: tuple[Plugged, ...] = ()
    components: tuple[Plugged, ...] = ()

    @property
    def origins(self) -> str:
        """Every plugin with where it comes from, in one line."""
        return ", ".join(f"{p.name} ({p.origin})" for p in (*self.signals, *self.components))


NO_PLUGINS = Plugins()


@dataclass(frozen=True, slots=True)
class Result:
    """What a plugin made of its arguments: a value, or the error it ended in."""

    value: Any = None
    evidence: tuple[str, ...] = ()
    error: str | None = field(default=None)


def load(settings: RewardSettings) -> Plugins:
    """The plugins that the settings name.

    Raises:
        SettingsError: One is not installed, or by two packages, or its name cannot be a plugin's;
            names the key's path.
        PluginError: One cannot be imported, or cannot be called.
    """
    return Plugins(
        signals=_load(SIGNALS, "plugin_signals", settings.plugin_signals),
        components=_load(COMPONENTS, "plugin_components", settings.plugin_components),
    )


def load_judge(name: str) -> JudgePlugin:
    """The judge of that name.

    Raises:
        SettingsError: It is not installed.
        PluginError: It cannot be imported, or cannot be called.
    """
    judge: JudgePlugin = _named(JUDGES, "judge.plugin", name).call
    return judge


def _load(group: str, key: str, wanted: Mapping[str, float]) -> tuple[Plugged, ...]:
    return tuple(
        _named(group, f"reward.{key}.{name}", name, wanted[name]) for name in sorted(wanted)
    )


def _named(group: str, path: str, name: str, amount: float = 0.0) -> Plugged:
    if group == COMPONENTS and name in OWN_PARTS:
        raise SettingsError(
            f"{path}: {name} is a part that every reward has; a plugin needs another name"
        )
    if not name or set(name) & set(",:\n"):
        raise SettingsError(f"{path}: a plugin's name has no comma, colon or line break")
    installed = entry_points(group=group)
    found = [point for point in installed if point.name == name]
    if not found:
        there = ", ".join(sorted(installed.names)) or "none"
        raise SettingsError(
            f"{path}: no plugin {name} is installed in the entry points {group}; installed: {there}"
        )
    if len(found) > 1:
        origins = " and ".join(sorted(map(_origin, found)))
        raise SettingsError(
            f"{path}: {origins} both offer a plugin {name} in {group}; uninstall one of them"
        )
    return Plugged(name, _imported(found[0], group), amount, _origin(found[0]))


def _imported(point: EntryPoint, group: str) -> Callable[..., Any]:
    try:
        call = point.load()
    # Whatever a foreign module raises when it is imported is its fault, not the settings'.
    except OURS:
        raise
    except BaseException as error:
        raise PluginError(
            f"plugin {point.name} of {group} ({point.value}) cannot be imported: {describe(error)}"
        ) from error
    if not callable(call):
        raise PluginError(f"plugin {point.name} of {group} ({point.value}) cannot be called")
    found: Callable[..., Any] = call
    return found


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"


# --- Calling them -----------------------------------------------------------------------------


def ask_signal(plugin: Plugged, text: str) -> Result:
    """What a signal makes of a turn: ``value`` is the words, None if there is no signal."""
    try:
        words = plugin.call(text)
        if words is not None and not isinstance(words, str):
            raise TypeError(f"a signal returns text or None, not {_kind(words)}")
    except OURS:
        raise
    # A plugin may raise anything; whatever it is must stop at its own part of the reward.
    except BaseException as error:
        return Result(error=describe(error))
    # No words are no signal.
    return Result(None if words is None else as_line(words) or None)


def ask_component(
    plugin: Plugged, step: Step, segment: TrajectorySegment, settings: RewardSettings
) -> Result:
    """What a component makes of a step: ``value`` in [-1, 1] or None, with its evidence."""
    try:
        value, evidence = _pair(plugin.call(step, segment, settings))
        said = (evidence,) if isinstance(evidence, str) else evidence
        lines = tuple(as_line(str(line)) for line in islice(said, MAX_LINES))
        if value is None:
            return Result(None, lines)
        number = float(value)
        if not math.isfinite(number) or not -1.0 <= number <= 1.0:
            raise ValueError(f"a component's value is in [-1, 1], not {number:g}")
    except OURS:
        raise
    # As above.
    except BaseException as error:
        return Result(error=describe(error))
    return Result(number, lines)


def _pair(made: object) -> tuple[Any, Any]:
    """What a component returns, as its protocol has it."""
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise TypeError(f"a component returns its value and its evidence, not {_kind(made)}")
    value, evidence = made
    if isinstance(value, str | bytes):
        raise TypeError(f"a component's value is a number or None, not {_kind(value)}")
    if isinstance(evidence, Set):
        # Its order differs from process to process: a replay would not give the same record.
        raise TypeError(f"a component's evidence has an order, a {_kind(evidence)} has none")
    return value, evidence


def _kind(made: object) -> str:
    return type(made).__name__


def describe(error: BaseException) -> str:
    """An error of somebody else's in one short line."""
    name = type(error).__name__
    try:
        return as_line(f"{name}: {error}")
    except OURS:
        raise
    # An error of a foreign type may fail at saying what it is.
    except BaseException:
        return as_line(name)


def as_line(text: str) -> str:
    """``text`` as a line that fits on a record, whatever is in it."""
    cut = text[: 4 * MAX_MESSAGE].encode("utf-8", "replace").decode()
    plain = " ".join(cut.split())
    return plain if len(plain) <= MAX_MESSAGE else plain[: MAX_MESSAGE - 1] + "…"


__all__ = [
    "COMPONENTS",
    "JUDGES",
    "NO_PLUGINS",
    "OURS",
    "SIGNALS",
    "ComponentPlugin",
    "JudgePlugin",
    "Plugged",
    "Plugins",
    "Result",
    "SignalPlugin",
    "ask_component",
    "ask_signal",
    "as_line",
    "describe",
    "load",
    "load_judge",
]
