"""What administrators tell the scheduler (`scheduler.admin`, key pool)."""

from __future__ import annotations

from ..records import Message
from .types import Count, Name, NodeName, Text

__all__ = ["AcknowledgeBrake", "CordonNode", "SetNamespaceLimits", "UncordonNode"]


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


class SetNamespaceLimits(Message):
    """What a namespace may have in a pool. The message is the whole of it: a limit that is left out is the usual one again."""

    pool: Name
    namespace: Name
    queued_max: Count | None = None  # jobs that wait at once; a further submit ends as Failed with reason QueueFull
    requested_by: Text
