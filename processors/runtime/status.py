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


__all__ = ["OpenSession", "ProcessorStatus"]
