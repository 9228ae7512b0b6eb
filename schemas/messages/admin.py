"""What administrators tell the scheduler (`scheduler.admin`, key pool)."""

from __future__ import annotations

from ..records import Message
from .types import Count, Name, NodeName, Ordinal, Text

__all__ = ["AcknowledgeBrake", "CordonNode", "ResourceLimits", "SetNamespaceLimits", "UncordonNode"]


class CordonNode(Message):
    """Place nothing new on the node; what runs there goes on."""

    pool: Name
    node: NodeName
    requested_by: Text


class UncordonNode(Message):
    pool: Name
    node: NodeName
    requested_by: Text


class AcknowledgeBrake(Message):
    """What the brake holds back is really lost or unknown: evict and stop it."""

    pool: Name
    requested_by: Text


class ResourceLimits(Message):
    """Of each resource; left out: no limit."""

    gpus: Count | None = None
    cpu_millis: Count | None = None
    memory_bytes: Count | None = None


class SetNamespaceLimits(Message):
    """What a namespace may have in a pool. The message is the whole of it: a limit that is left out is the usual one again."""

    pool: Name
    namespace: Name
    queued_max: Count | None = None  # jobs that wait at once; a further submit ends as Failed with reason QueueFull
    running_max: Count | None = None  # jobs that are placed at once; further ones wait
    weight_milli: Ordinal = 1000  # its part of what namespaces share, beside the others' weights
    nominal: ResourceLimits | None = None  # what is its own
    borrowing: ResourceLimits | None = None  # how much more than that it may have while nobody else uses it; left out: all there is
    lending: ResourceLimits | None = None  # how much of its own others may have while it does not use it; left out: all
    requested_by: Text
