"""What administrators tell the scheduler (`scheduler.admin`, key pool)."""

from __future__ import annotations

from ..records import Message
from .types import Name, NodeName, Text

__all__ = ["AcknowledgeBrake", "CordonNode", "UncordonNode"]


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
