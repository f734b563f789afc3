"""How the learning rate goes with the updates. Pure."""

from __future__ import annotations

from typing import Literal

RateSchedule = Literal["constant", "linear", "quadratic"]


def rate_factor(
    updates: int,
    *,
    schedule: RateSchedule,
    decay_updates: int,
    warmup_updates: int,
    floor: float,
) -> float:
    """By what the configured learning rate is multiplied in an update.

    With ``p = min(updates / decay_updates, 1)`` and ``w = min((updates + 1) / (warmup_updates +
    1), 1)``::

        constant   w
        linear     w * (1 - p)
        quadratic  w * (1 - p)^2

    but never less than `floor`: a rate of 0 would make updates that change nothing and look as
    if they were made.

    Args:
        updates: Updates made before this one.
        schedule: Which.
        decay_updates: After how many the schedule itself would be 0.
        warmup_updates: How many updates come before the first one at full rate.
        floor: The share of the rate that stays, above 0; more than 1 counts as 1.
    """
    left = 1.0 - min(updates / decay_updates, 1.0)
    decay = {"constant": 1.0, "linear": left, "quadratic": left**2}[schedule]
    warmup = min((updates + 1) / (warmup_updates + 1), 1.0)
    return max(warmup * decay, min(floor, 1.0))


__all__ = ["RateSchedule", "rate_factor"]
