"""How long and how often things are broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """The measures of a run.

    Attributes:
        kills: SIGKILLs in the middle of a batch.
        rounds: Repetitions of what is done a few times otherwise.
        outage_s: How long an output topic cannot be written.
        scripts: Conversations at once; each sends about 7 records a second.
        patience_s: How long nothing may come at the end before the rest is called lost.
    """

    kills: int = 50
    rounds: int = 4
    outage_s: float = 120.0
    scripts: int = 24
    patience_s: float = 45.0


FULL = Sizes()
SHORT = Sizes(kills=3, rounds=1, outage_s=15.0, scripts=16)
