"""What somebody should look at (`alerts`, key subject)."""

from __future__ import annotations

from pydantic import Field

from ..errors import FieldError
from ..records import Message
from .types import Count, JobUid, Millis, Name, NodeName, Text, Uid

__all__ = [
    "BrakeEngaged",
    "BrakeReleased",
    "DeadLettered",
    "DeadLettersGrow",
    "InputHeldUp",
    "JournalAdopted",
    "NodeLost",
    "NodeNameTaken",
    "NodeRecovered",
    "SchedulerStuck",
]


class DeadLettered(Message):
    """A record could not be read. Its original bytes, headers and the error are on `dead_letter_topic`."""

    topic: Text
    partition: Count
    offset: Count
    dead_letter_topic: Text
    errors: tuple[FieldError, ...] = Field(min_length=1)
    time_ms: Millis


class DeadLettersGrow(Message):
    """Many dead letters of one topic in a short time: something that writes there, or what reads it, is broken. Told once a topic and window."""

    topic: Text
    count: Count  # within the window that ends at `time_ms`
    window_s: Count
    since_ms: Millis  # the oldest of them
    time_ms: Millis


class JournalAdopted(Message):
    """An administrator decided what a scheduler goes on with whose journal and inputs contradict each other."""

    partition: Count
    adopted_by: Text
    reason: Text
    contradictions: tuple[Text, ...] = Field(min_length=1)
    start: Text  # "beginning" or "end" of what the input topics held
    positions: dict[Text, Count]  # topic → the first offset that is read
    jobs_ended: Count = 0  # live jobs that a lost journal knew, and that ended as Failed
    time_ms: Millis


class SchedulerStuck(Message):
    """A scheduler worker makes no headway, and ends so that a new one takes over."""

    partition: Count | None = None  # None: the worker as a whole
    worker: Text
    what: Text
    for_s: Count
    time_ms: Millis


class InputHeldUp(Message):
    """Somebody left a transaction open on an input topic: what stands behind it is read once it ends, or the broker aborts it (after a minute at most)."""

    topic: Text
    partition: Count
    offset: Count  # of the transaction's first record
    source: Text = ""  # its ce_source, if it has one that can be read
    records: Count  # from there to the end of the partition
    for_s: Count
    time_ms: Millis


class NodeLost(Message):
    node: NodeName
    pool: Name
    reason: Text
    attempts: tuple[JobUid, ...] = ()  # live attempts that had a part there
    time_ms: Millis


class NodeNameTaken(Message):
    """A second agent says that it is this node, while the first is alive. It gets no work; told once an agent."""

    node: NodeName
    pool: Name
    held_by: Uid  # incarnations
    held_at: Text
    refused: Uid
    refused_at: Text
    time_ms: Millis


class NodeRecovered(Message):
    node: NodeName
    pool: Name
    time_ms: Millis


class BrakeEngaged(Message):
    """Too much would be evicted or stopped at once: it is more likely that something between is broken. Placement on healthy nodes goes on."""

    pool: Name
    reason: Text
    nodes: tuple[NodeName, ...] = ()  # that fell silent
    attempts: tuple[JobUid, ...] = ()  # that agents run and the scheduler does not know
    time_ms: Millis


class BrakeReleased(Message):
    pool: Name
    reason: Text
    time_ms: Millis
