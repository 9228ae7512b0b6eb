"""Why a scheduler process ends. Each is an exit, after which a supervisor restarts it; none is retried inside.

SchedulerError
├── SupersededError      another worker owns the partition now: publish nothing more
├── RefusedError         the logs contradict each other: a person has to decide
└── AppendTimeoutError   no answer from the journal in time; the outcome is unknown until recovery reads it
"""

from __future__ import annotations

__all__ = ["AppendTimeoutError", "RefusedError", "SchedulerError", "SupersededError"]


class SchedulerError(Exception):
    """Something that ends the process."""


class SupersededError(SchedulerError):
    """A newer OwnerStarted stands in the journal."""


class RefusedError(SchedulerError):
    """Starting would guess. The text says what contradicts what, and names the remedy."""


class AppendTimeoutError(SchedulerError):
    """The append's outcome is unknown."""
