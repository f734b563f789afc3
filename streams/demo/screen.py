"""What the demo looks like in a terminal, and in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from streams.demo.run import Progress
from streams.demo.tally import Summary
from streams.demo.users import Taste
from streams.settings import Settings

_LOG_EVERY_S = 10.0


class LogDisplay:
    """Lines, for output that is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = float("-inf")

    def step(self, text: str) -> None:
        """See :class:`streams.demo.run.Display`."""
        self._console.print(f"… {text}")

    def show(self, progress: Progress) -> None:
        """See :class:`streams.demo.run.Display`; one line in ten seconds."""
        if time.monotonic() - self._last_s < _LOG_EVERY_S:
            return
        self._last_s = time.monotonic()
        tally = progress.tally
        self._console.print(
            f"{progress.seconds:4.0f} s  {progress.phase}: {tally.turns} turns, "
            f"{tally.feedback} feedback, {tally.segments} segments, {tally.scored} scored, "
            f"live versions {tally.live_versions or 'none yet'}",
            soft_wrap=True,
        )


class LiveDisplay:
    """A table that moves, for a terminal.

    Args:
        live: Where it is drawn.
        target_versions: How many versions the demo waits for.
    """

    def __init__(self, live: Live, target_versions: int) -> None:
        self._live = live
        self._target = target_versions

    def step(self, text: str) -> None:
        """See :class:`streams.demo.run.Display`."""
        self._live.update(Text(f"… {text}"))

    def show(self, progress: Progress) -> None:
        """See :class:`streams.demo.run.Display`."""
        tally = progress.tally
        facts = Table.grid(padding=(0, 2))
        facts.add_row("turns", str(tally.turns), "feedback", str(tally.feedback))
        facts.add_row("segments", str(tally.segments), "revisions", str(tally.revisions))
        facts.add_row("scored", str(tally.scored), "dead letters", str(tally.dead_letters.total()))
        facts.add_row("restarts", str(progress.restarts), "", "")
        self._live.update(
            Group(
                Text(f"{progress.seconds:4.0f} s  {progress.phase}", style="bold"),
                facts,
                Text(f"live versions: {len(tally.live_versions)} of {self._target}"),
                _rewards(tally.replies_by_version, tally.rewards_by_version()),
            )
        )


def introduction(settings: Settings, taste: Taste) -> Panel:
    """What is about to happen, what the users like, and what was shortened for it."""
    align, learner = settings.align, settings.learner
    return Panel(
        Text.assemble(
            "Simulated users talk to a real model (",
            settings.model.base,
            ") through the gateway.\n",
            (taste.sentence, "bold"),
            "\nThey judge the replies the model really gives. What they say flows through a real "
            "Kafka, is aligned, scored and trained on with PPO, and the new versions take over "
            "while they talk.\n\nShortened for the demo: events settle for "
            f"{_seconds(align.settle_ms)} (usually 30 s), a pause of {_seconds(align.gap_ms)} "
            f"ends a segment (5 min), an update needs {learner.update_segments} segments and "
            f"{_seconds(learner.update_interval_ms)} (256 and 5 min), at a learning rate of "
            f"{learner.learning_rate:g}. The review of three negative ratings in a row is off: "
            "these users dislike a lot, honestly.",
        ),
        title="clawstream demo",
    )


def conclusion(summary: Summary, taste: Taste) -> Group:
    """The summary, for people."""
    table = Table(title="What happened", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    dead = _listed(summary.dead_letters) or "none"
    table.add_row("turns", str(summary.turns))
    table.add_row("feedback", str(summary.feedback))
    table.add_row("segments, by what closed them", _listed(summary.segments))
    table.add_row("held back until they had settled", f"{summary.held_back} times")
    table.add_row("revisions by later feedback", str(summary.revisions))
    table.add_row("dead letters, by reason", dead)
    table.add_row("segments scored", f"{summary.scored}, {summary.nonzero_share:.0%} not zero")
    table.add_row("events still open", str(summary.open_events))
    table.add_row("requests refused", str(summary.refused))
    table.add_row("seconds", f"{summary.seconds:g}")
    return Group(table, Text(taste.sentence), _versions(summary))


def _versions(summary: Summary) -> Table:
    table = Table(title="Versions", title_justify="left")
    for heading in ("version", "status", "replies", "liked", "mean reward"):
        table.add_column(heading)
    status = {str(v["version"]): v["status"] for v in summary.versions}
    # Each was live when it was announced; the newest such still is.
    live = [version for version, is_now in status.items() if is_now == "live"]
    status |= dict.fromkeys(live[:-1], "live before")
    for version in sorted(summary.replies_by_version.keys() | status.keys(), key=int):
        liked = summary.liked_share_by_version.get(version)
        reward = summary.mean_reward_by_version.get(version)
        table.add_row(
            version,
            status.get(version, "base model"),
            str(summary.replies_by_version.get(version, 0)),
            "" if liked is None else f"{liked:.0%}",
            "" if reward is None else f"{reward:+.3f}",
        )
    return table


def _rewards(replies: Mapping[int, int], rewards: Mapping[int, list[float]]) -> Table:
    table = Table("version", "replies", "mean reward so far")
    for version in sorted(replies.keys() | rewards.keys()):
        given = rewards.get(version)
        mean = f"{fmean(given):+.3f}" if given else ""
        table.add_row(f"{version}" if version else "0 (base)", str(replies.get(version, 0)), mean)
    return table


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:g} s"
