"""What the scheduler tells agents (`placements`, key job_uid). An agent takes those that name its node and incarnation.

Rules: `command_seq` counts per node and incarnation from 1; a command sent again has the same number and a new `ce_id`. A command that was read counts as
applied, also when it was void: its absence from the heartbeats then says so. A command is void once the
broker's time of reading is past `valid_until_ms`. Per job, order is kept by the key; between jobs it is not.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from ..records import Message
from .types import Count, Digest, JobUid, Millis, Name, NodeName, Ordinal, Text, Uid

__all__ = ["RefuseAgent", "Rendezvous", "ReplicaAssignment", "ResumeAttempt", "StartAttempt", "StopAttempt", "StopReason"]


class StopReason(StrEnum):
    CANCELLED = "Cancelled"
    GANG_FAILED = "GangFailed"  # another part of the gang is gone
    GANG_SUCCEEDED = "GangSucceeded"  # rank 0 has finished; nothing is left to do
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    START_TIMEOUT = "StartTimeout"
    UNKNOWN_ATTEMPT = "UnknownAttempt"  # the scheduler has no such live attempt


class ReplicaAssignment(Message):
    rank: int = Field(ge=0, lt=4096)
    devices: tuple[Count, ...] = Field((), max_length=64)  # indices on this node


class Rendezvous(Message):
    """Where rank 0 listens for torch.distributed."""

    address: Text
    port: int = Field(ge=1, le=65535)


class _Command(Message):
    node: NodeName
    incarnation: Uid
    command_seq: Ordinal
    job_uid: JobUid
    namespace: Name
    name: Name
    attempt_number: Ordinal
    lease_epoch: Ordinal
    valid_until_ms: Millis


class StartAttempt(_Command):
    """Run these replicas. Names no checkpoint and no secret: the registry's `open_attempt` returns those."""

    replicas: tuple[ReplicaAssignment, ...] = Field(min_length=1, max_length=1024)
    world_size: int = Field(ge=1, le=4096)
    cpu_millis: Count  # per replica
    memory_bytes: Count  # per replica
    rendezvous: Rendezvous
    seed: Count
    spec: dict[str, Any]  # JobSpec as JSON
    spec_digest: Digest
    model: Name  # the model a success is registered under


class StopAttempt(_Command):
    """SIGTERM, checkpoint, exit within `grace_s`, then SIGKILL of the process group."""

    reason: StopReason
    message: Text = ""
    grace_s: int = Field(30, ge=0, le=3600)


class ResumeAttempt(_Command):
    """The lease still holds: a paused part may go on.

    An attempt that was live when the agent's half of the lease ran out, running or preparing, stays paused until it is told. The agent obeys only if
    `heartbeat_sequence` is that of a heartbeat which it sent after this pause began, and its half of the lease holds again: an older Resume, read late,
    may speak of a lease that has run out since (found by the simulator: two epochs running at once).
    """

    heartbeat_sequence: Count


class RefuseAgent(Message):
    """The node's name is another agent's, which is alive: run nothing, and announce yourself again. Key: the node. Has no number: it is about no attempt."""

    node: NodeName
    incarnation: Uid  # the agent that is meant
    held_by: Uid  # the incarnation that has the name
    held_at: Text  # its address
