"""Why a scheduler process ends. Each is an exit, after which a supervisor restarts it; none is retried inside.

SchedulerError
├── SupersededError      another worker owns the partition now: publish nothing more
├── RefusedError         the logs contradict each other: a person has to decide
├── AppendTimeoutError   no answer from the journal in time; the outcome is unknown until recovery reads it
├── TruncatedError       the journal ends before an offset that was written: it was cut short or made anew under our feet
├── UnreadableError      the journal does not hand out what it holds: an outsider's transaction is open on it, or the broker is slow
├── StuckError           something makes no headway, and nothing failed
├── PublishTimeoutError  no answer for outputs in time; recovery publishes them again under the same ids
└── RecordTooLargeError  one step makes more than a journal record may hold: a defect, since every input is bounded
"""

from __future__ import annotations

__all__ = [
    "AppendTimeoutError",
    "PublishTimeoutError",
    "RecordTooLargeError",
    "RefusedError",
    "SchedulerError",
    "StuckError",
    "SupersededError",
    "TruncatedError",
    "UnreadableError",
]


class SchedulerError(Exception):
    """Something that ends the process."""


class SupersededError(SchedulerError):
    """A newer OwnerStarted stands in the journal."""


class RefusedError(SchedulerError):
    """Starting would guess. The text says what contradicts what, and names the remedy."""


class AppendTimeoutError(SchedulerError):
    """The append's outcome is unknown."""


class TruncatedError(SchedulerError):
    """Offsets that were acknowledged are gone from the journal's end."""


class UnreadableError(SchedulerError):
    """Reading the journal made no headway within its bound."""


class StuckError(SchedulerError):
    """The watchdog has told what, and since when."""


class PublishTimeoutError(SchedulerError):
    """What was written down is not known to be published."""


class RecordTooLargeError(SchedulerError):
    """Nothing was appended."""
