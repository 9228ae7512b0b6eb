"""Who may write for a job: the holder of the highest (attempt, lease epoch) ever opened, and nobody before it.

Precedent: fencing tokens (Kleppmann 2016, "How to do distributed locking").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Fence", "Verdict", "judge_open", "may_write"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Fence:
    """Compared attempt first, lease epoch second."""

    attempt_number: int
    lease_epoch: int


class Verdict(StrEnum):
    RAISE = "Raise"  # the first node of a new epoch: pin the resume checkpoint
    JOIN = "Join"  # another node of the same gang, or the same node once more
    REFUSE = "Refuse"  # lower, for ever


def judge_open(current: Fence | None, asked: Fence) -> Verdict:
    """What opening `asked` means where `current` is the highest so far (None: nothing was ever opened)."""
    if current is None or asked > current:
        return Verdict.RAISE
    return Verdict.JOIN if asked == current else Verdict.REFUSE


def may_write(current: Fence, held: Fence) -> bool:
    """Whether the holder of `held` may begin and commit."""
    return held == current
