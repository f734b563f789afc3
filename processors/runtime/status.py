"""What a processor says of one partition: for the worker's page and its gauges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session in which something is open or pending.

    Attributes:
        policy: With ``session_id`` it names the session. Both come from outside.
        session_id: See ``policy``.
        since_ms: The earliest arrival of what is open or pending in it.
        due_ms: When its next action is due; None if only another record makes one due.
    """

    policy: str
    session_id: str
    since_ms: int
    due_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorStatus:
    """Where the processing of a partition stands.

    Attributes:
        clock_ms: The partition's clock; None before the first record.
        sessions: Sessions (reward: users) in the state.
        open_sessions: Those among them with something open or pending.
        oldest_open: The open session with the earliest ``since_ms``; None if none is open.
        next_due_ms: When the next action of any session is due; None if none is.
        tick_after_ms: A clock tick after this time lets it go on; None if none would.
        state_entries: Entries of its state.
        state_bytes: Of their values.
    """

    clock_ms: int | None
    sessions: int
    open_sessions: int
    oldest_open: OpenSession | None
    next_due_ms: int | None
    state_entries: int
    state_bytes: int
    tick_after_ms: int | None = None

    def needs_tick(self, now_ms: int) -> bool:
        """Whether a clock tick would let the partition go on.

        Args:
            now_ms: About the broker's time; it decides only when a tick is worth its cost,
                never what is computed.
        """
        return self.tick_after_ms is not None and self.tick_after_ms < now_ms


NOTHING = ProcessorStatus(
    clock_ms=None,
    sessions=0,
    open_sessions=0,
    oldest_open=None,
    next_due_ms=None,
    state_entries=0,
    state_bytes=0,
)
"""Of a partition that was not restored yet."""


__all__ = ["NOTHING", "OpenSession", "ProcessorStatus"]
