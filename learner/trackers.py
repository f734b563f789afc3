"""Curves of the versions' metrics in the tools people know, through accelerate.

Each version is one point, at its number: a learner that was restarted goes on in the same
curves. Names are ours, which are CleanRL's where it has them, and TRL's beside them
(`learner.ppo.diagnostics` explains all). A tool that fails costs its curves and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from learner.ppo.diagnostics import trl_metrics
from streams.contracts import ModelVersion
from streams.errors import SettingsError

log = logging.getLogger(__name__)


class Trackers(Protocol):
    """Where metrics of versions go."""

    def log(self, version: ModelVersion) -> None:
        """Add a version's metrics."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class Several:
    """Some trackers, or none: metrics are in the registry and in the log all the same.

    Args:
        trackers: Each is told everything.
    """

    def __init__(self, *trackers: Trackers) -> None:
        self.trackers = trackers

    def log(self, version: ModelVersion) -> None:
        """Add a version's metrics to each."""
        for tracker in self.trackers:
            tracker.log(version)

    def close(self) -> None:
        """Close each."""
        for tracker in self.trackers:
            tracker.close()


class AccelerateTrackers:
    """Some of accelerate's trackers.

    Args:
        names: Which, as accelerate calls them.
        run: The name of the curves: the policy.
        folder: For those that write files; made if it is not there.
        settings: Shown beside the curves.

    Raises:
        SettingsError: A tool is not installed, or cannot be used as it is set up.
    """

    def __init__(
        self, names: Sequence[str], *, run: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        available = {str(name) for name in get_available_trackers()}
        self._tools: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            if name not in available:
                raise SettingsError(
                    f"learner.trackers names {name}, which is not installed here; install its "
                    f"package, or choose from {', '.join(sorted(available)) or 'none'}"
                )
            make = LOGGER_TYPE_TO_CLASS[name]
            self._tools[name] = _started(name, make, run, folder)
        shown = "\n".join(f"    {key}: {value}" for key, value in sorted(settings.items()))
        self._each(lambda tool: tool.log({"settings": shown}, step=0))

    def log(self, version: ModelVersion) -> None:
        """Add a version's metrics at its number; failures are logged."""
        values = {**version.metrics, **trl_metrics(version.metrics)}
        self._each(lambda tool: tool.log(values, step=version.version))

    def close(self) -> None:
        """Let each tool finish; failures are logged."""
        self._each(lambda tool: tool.finish())

    def _each(self, do: Any) -> None:
        for name, tool in self._tools.items():
            try:
                do(tool)
            except Exception as error:  # whatever the tools raise: learning goes on
                log.warning("tracker failed name=%s error=%r", name, error)


def _started(name: str, make: Any, run: str, folder: Path) -> Any:
    try:
        if make.requires_logging_directory:
            folder.mkdir(parents=True, exist_ok=True)
            tool = make(run, str(folder))
        else:
            tool = make(run)
        tool.start()
    except Exception as error:  # each tool has its own
        raise SettingsError(f"learner.trackers: {name} cannot be used: {error}") from error
    return tool


__all__ = ["AccelerateTrackers", "Several", "Trackers"]
