"""What agents tell the scheduler (`nodes.reports`, key pool), and the scheduler's own ticks.

An agent sends AgentStarted once per incarnation, then Heartbeats: at an interval, and at once when an attempt's phase changes. It lists an attempt
until the AttemptEnded for it is acknowledged by Kafka, so that a heartbeat without it means: it is not there. An agent that is told to end says so in
its heartbeats before it stops its trainers, and once more when they are gone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ..records import Message
from .jobs import ModelReference
from .types import Count, JobUid, Millis, Name, NodeName, Ordinal, Text, Uid, Whole

__all__ = [
    "AgentStarted",
    "AttemptEnded",
    "AttemptOutcome",
    "AttemptPhase",
    "AttemptProgress",
    "Device",
    "FailureClass",
    "Heartbeat",
    "NodeCapacity",
    "Tick",
]

ReturnValue = Annotated[float, Field(allow_inf_nan=False)]


class AttemptPhase(StrEnum):
    """One node's part of an attempt, as its agent sees it."""

    PREPARING = "Preparing"  # fence raised, processes starting
    RUNNING = "Running"
    PAUSED = "Paused"  # the agent's half of the lease ran out; waits for ResumeAttempt or StopAttempt
    STOPPING = "Stopping"


class AttemptOutcome(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"  # because it was told to


class FailureClass(StrEnum):
    """Why an attempt failed; decides whether it is tried again."""

    USER_ERROR = "UserError"  # the environment or the settings; the same again would fail again
    INFRASTRUCTURE = "Infrastructure"  # node, network, registry, a process killed from outside
    OUT_OF_MEMORY = "OutOfMemory"
    NON_FINITE = "NonFinite"  # loss or weights became NaN or infinite
    LOST = "Lost"  # the agent or its node went away
    START_FAILED = "StartFailed"  # never came to run
    UNAVAILABLE = "Unavailable"  # what every start needs was away, or did not accept this node, or the node had no room: it counts against no job


class Device(Message):
    index: int = Field(ge=0, lt=1024)
    kind: Text = "gpu"
    memory_bytes: Count = 0
    simulated: bool = False


class NodeCapacity(Message):
    cpu_millis: Count
    memory_bytes: Count
    devices: tuple[Device, ...] = Field((), max_length=1024)


class AttemptProgress(Message):
    """What one node knows of one attempt. Only the node that runs rank 0 knows returns and checkpoints."""

    job_uid: JobUid
    attempt_number: Ordinal
    lease_epoch: Ordinal
    phase: AttemptPhase
    replicas_running: Count = 0
    global_step: Count = 0
    total_steps: Count = 0
    env_steps_per_s: ReturnValue = 0.0
    mean_return: ReturnValue | None = None
    episodes: Count = 0
    checkpoint_id: Uid | None = None
    checkpoint_step: Count = 0


class Taint(Message):
    """Keeps gangs off the node that do not tolerate it."""

    key: Text
    value: Text = ""


class AgentStarted(Message):
    """The agent's process is new; attempts of earlier incarnations that `adopted` does not name are gone.

    Sent again with the same incarnation (every minute) it is an announcement of what the node is and runs, and resets nothing. While an agent of another
    folder or machine holds the node's name, the answer is RefuseAgent, and the announcement changes nothing.
    """

    node: NodeName
    incarnation: Uid
    previous_incarnation: Uid | None = None  # the one before in the same folder, whose lock says that it is dead
    pool: Name
    boot_id: Text
    agent_version: Text
    capacity: NodeCapacity
    labels: dict[str, str] = Field(default_factory=dict, max_length=64)
    taints: tuple[Taint, ...] = Field((), max_length=64)
    address: Text
    port_low: int = Field(ge=1, le=65535)
    port_high: int = Field(ge=1, le=65535)
    lease_timeout_ms: int = Field(10_000, ge=1_000, le=600_000)  # without a heartbeat for this long the scheduler gives the node up
    adopted: tuple[AttemptProgress, ...] = Field((), max_length=1024)
    applied_seq: Count = 0  # as in heartbeats: a scheduler that knows nothing of the node numbers its commands above it
    sequence: Count = 0  # of the newest heartbeat before it: behind a newer one it counts for nothing


class Heartbeat(Message):
    """`sequence` rises by one each time; one that is not above the newest heard is void. `applied_seq`: every command up to this number has been applied.
    `capacity` only when it changed. `stopping`: the agent was told to end."""

    node: NodeName
    incarnation: Uid
    pool: Name
    sequence: Count
    applied_seq: Count
    attempts: tuple[AttemptProgress, ...] = Field((), max_length=1024)
    capacity: NodeCapacity | None = None
    stopping: bool = False


class AttemptEnded(Message):
    """All processes of this node's part are gone; its devices are free again."""

    node: NodeName
    incarnation: Uid
    pool: Name
    job_uid: JobUid
    attempt_number: Ordinal
    lease_epoch: Ordinal
    ranks: tuple[Count, ...] = Field(max_length=1024)
    outcome: AttemptOutcome
    failure_class: FailureClass | None = None
    message: Text = ""
    exit_codes: dict[Count, Whole] = Field(default_factory=dict, max_length=1024)  # by rank; negative: the signal
    global_step: Count = 0
    episodes: Count = 0
    mean_return: ReturnValue | None = None
    stop_reason: Text = ""  # which stop rule ended training
    checkpoint_id: Uid | None = None
    checkpoint_step: Count = 0
    model: ModelReference | None = None


class Tick(Message):
    """Makes time pass in a partition that nobody writes to."""

    partition: Count
    worker: Uid
    sequence: Count
    sent_ms: Millis
