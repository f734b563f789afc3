"""How much data of older policies may be used.

The bound eta of AReaL (Fu et al. 2025, arXiv 2505.24298, section 5.1): at no time may more
trajectories be admitted than would be trained on within eta further updates.

Users do not stop talking when a bound is reached, so here it holds where data are used instead:
`oldest_fresh` says what is sampled. `admission_limit` is the other side of it, for whoever
reckons how much may come between updates before some of it is never used.
"""

from __future__ import annotations


def admission_limit(version: int, *, max_version_gap: int, batch_size: int) -> int:
    """How many trajectories may have been admitted in all, at a policy version.

    ``(max_version_gap + version + 1) * batch_size``: more could only be trained on by a
    policy further than the gap away.

    Args:
        version: Updates made so far.
        max_version_gap: eta, the largest allowed distance of behaviour and trained policy.
        batch_size: Trajectories per update.
    """
    return (max_version_gap + version + 1) * batch_size


def oldest_fresh(version: int, *, max_version_gap: int) -> int:
    """The oldest version whose data may still train the policy at `version`."""
    return version - max_version_gap


__all__ = ["admission_limit", "oldest_fresh"]
