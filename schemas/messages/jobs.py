"""What happened to jobs (`jobs.events`, every step, key job_uid) and how they stand (`jobs.status`, compacted, key job_uid).

`revision` rises by one with every event of a job; (job_uid, revision) identifies an event for ever. A status carries the revision of the newest event;
within one revision, progress is newer by `updated_ms`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from ..records import Message
from .types import Count, Digest, JobUid, Millis, Name, NodeName, Ordinal, Text, Uid, Whole

__all__ = [
    "AttemptFinished",
    "AttemptPlaced",
    "AttemptRunning",
    "AttemptStopping",
    "Cause",
    "JobCancelled",
    "JobCompleted",
    "JobEvent",
    "JobFailed",
    "JobPhase",
    "JobRequeued",
    "JobStatus",
    "JobSubmitted",
    "JobUnschedulable",
    "ModelReference",
    "Progress",
    "UnschedulableReason",
]

Number = Annotated[float, Field(allow_inf_nan=False)]


class JobPhase(StrEnum):
    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobPhase.COMPLETED, JobPhase.FAILED, JobPhase.CANCELLED)


class UnschedulableReason(StrEnum):
    """Why a pending job is not placed; one primary reason, the first that holds."""

    BACKOFF = "Backoff"  # waits before its next attempt
    NO_NODES = "NoNodes"  # the pool has no live node
    NO_MATCHING_NODES = "NoMatchingNodes"  # no live node has the labels it asks for, or all have taints that it does not tolerate
    TOO_LARGE = "TooLarge"  # would not fit even if the pool were empty and every node of it were there
    NODES_AWAY = "NodesAway"  # would fit if nodes that are being stopped, or lost, were there
    CORDONED = "Cordoned"  # would fit an empty pool, but too much of it is cordoned
    QUOTA_EXCEEDED = "QuotaExceeded"  # its namespace may have no more at present
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"  # others hold what it needs
    QUEUED = "Queued"  # not looked at yet; at most until the next tick


class Cause(Message):
    """The input that led to an event."""

    topic: Text
    partition: Count
    offset: Count
    append_time_ms: Millis


class ModelReference(Message):
    name: Name
    version: Ordinal


class Progress(Message):
    global_step: Count = 0
    total_steps: Count = 0  # 0: no step budget
    env_steps_per_s: Number = 0.0
    mean_return: Number | None = None
    episodes: Count = 0
    checkpoint_id: Uid | None = None
    checkpoint_step: Count = 0


class JobEvent(Message):
    """What every event says."""

    job_uid: JobUid
    namespace: Name
    name: Name
    pool: Name
    revision: Ordinal
    time_ms: Millis  # broker time of the cause
    cause: Cause


class JobSubmitted(JobEvent):
    submitted_by: Text
    labels: dict[str, str] = Field(default_factory=dict)
    spec: dict[str, Any]
    spec_digest: Digest


class JobUnschedulable(JobEvent):
    reason: Text  # an UnschedulableReason; later releases know more of them
    message: Text


class AttemptPlaced(JobEvent):
    attempt_number: Count
    lease_epoch: Count
    nodes: dict[NodeName, tuple[Count, ...]]  # ranks by node
    scheduling_latency_ms: Whole  # up to the input that led to it; the broker's stamp of the placement adds the rest


class AttemptRunning(JobEvent):
    attempt_number: Count


class AttemptStopping(JobEvent):
    attempt_number: Count
    reason: Text
    message: Text = ""


class AttemptFinished(JobEvent):
    """Every part of the attempt is over or its lease has run out."""

    attempt_number: Count
    outcome: Text
    failure_class: Text | None = None
    message: Text = ""
    global_step: Count = 0
    checkpoint_id: Uid | None = None
    checkpoint_step: Count = 0


class JobRequeued(JobEvent):
    attempt_number: Count  # of the attempt that ended
    reason: Text
    delay_ms: Millis


class JobCompleted(JobEvent):
    attempt_number: Count
    stop_reason: Text
    global_step: Count
    episodes: Count
    mean_return: Number | None = None
    checkpoint_id: Uid | None = None
    model: ModelReference | None = None


class JobFailed(JobEvent):
    reason: Text
    message: Text
    attempt_number: Count  # 0: none was started


class JobCancelled(JobEvent):
    requested_by: Text
    message: Text = ""


class JobStatus(Message):
    """How a job stands. The newest record of a key is the truth; it may lag, it never goes back."""

    job_uid: JobUid
    namespace: Name
    name: Name
    pool: Name
    revision: Ordinal
    phase: JobPhase
    reason: Text = ""
    message: Text = ""
    labels: dict[str, str] = Field(default_factory=dict)
    spec: dict[str, Any]
    spec_digest: Digest
    submitted_by: Text = ""
    attempt_number: Count = 0
    lease_epoch: Count = 0
    replicas: Ordinal
    replicas_running: Count = 0
    nodes: tuple[NodeName, ...] = ()
    progress: Progress = Progress()
    stop_reason: Text = ""
    model: ModelReference | None = None
    submitted_ms: Millis
    started_ms: Millis | None = None
    finished_ms: Millis | None = None
    updated_ms: Millis
