"""Every message of every topic. Commands are imperative, events past tense; fields are snake_case; times are milliseconds or ISO 8601.

One file per role, since the role decides who may write the topic: requests (anyone), commands (gateway, operator, ingress), reports (agents),
admin (administrators), placements and job events and alerts (scheduler), training (agents), checkpoints (registry).
"""

from __future__ import annotations

from .admin import AcknowledgeBrake, CordonNode, SetNamespaceLimits, UncordonNode
from .alerts import BrakeEngaged, BrakeReleased, DeadLettered, DeadLettersGrow, JournalAdopted, NodeLost, NodeNameTaken, NodeRecovered, SchedulerStuck
from .checkpoints import CheckpointCommitted, ModelVersionRegistered
from .commands import CancelJob, SubmitJob
from .jobs import (
    AttemptFinished,
    AttemptPlaced,
    AttemptRunning,
    AttemptStopping,
    Cause,
    JobCancelled,
    JobCompleted,
    JobEvent,
    JobFailed,
    JobPhase,
    JobRequeued,
    JobStatus,
    JobSubmitted,
    JobUnschedulable,
    ModelReference,
    Progress,
    UnschedulableReason,
)
from .placements import RefuseAgent, Rendezvous, ReplicaAssignment, ResumeAttempt, StartAttempt, StopAttempt, StopReason
from .reports import (
    AgentStarted,
    AttemptEnded,
    AttemptOutcome,
    AttemptPhase,
    AttemptProgress,
    Device,
    FailureClass,
    Heartbeat,
    NodeCapacity,
    Tick,
)
from .requests import CancelTrainingJob, JobAccepted, JobRejected, RequestReference
from .training import LogLines, MetricValue, TrainingMetrics

__all__ = [
    "AcknowledgeBrake",
    "AgentStarted",
    "AttemptEnded",
    "AttemptFinished",
    "AttemptOutcome",
    "AttemptPhase",
    "AttemptPlaced",
    "AttemptProgress",
    "AttemptRunning",
    "AttemptStopping",
    "BrakeEngaged",
    "BrakeReleased",
    "CancelJob",
    "CancelTrainingJob",
    "Cause",
    "CheckpointCommitted",
    "CordonNode",
    "DeadLettered",
    "DeadLettersGrow",
    "Device",
    "FailureClass",
    "Heartbeat",
    "JobAccepted",
    "JobCancelled",
    "JobCompleted",
    "JobEvent",
    "JobFailed",
    "JobPhase",
    "JobRejected",
    "JobRequeued",
    "JobStatus",
    "JobSubmitted",
    "JobUnschedulable",
    "JournalAdopted",
    "LogLines",
    "MetricValue",
    "ModelReference",
    "ModelVersionRegistered",
    "NodeCapacity",
    "NodeLost",
    "NodeNameTaken",
    "NodeRecovered",
    "Progress",
    "RefuseAgent",
    "Rendezvous",
    "ReplicaAssignment",
    "RequestReference",
    "ResumeAttempt",
    "SchedulerStuck",
    "SetNamespaceLimits",
    "StartAttempt",
    "StopAttempt",
    "StopReason",
    "SubmitJob",
    "Tick",
    "TrainingMetrics",
    "UncordonNode",
    "UnschedulableReason",
]
