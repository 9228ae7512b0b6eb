"""What the scheduler knows, as small frozen values. Integers only: milliseconds, millicores, bytes, returns in thousandths.

Every kind is journaled whole, so that applying any suffix of the journal again is harmless. `KINDS` names them for codec and hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from opentinker.schemas.messages.jobs import JobPhase, UnschedulableReason
from opentinker.schemas.messages.reports import AttemptOutcome, FailureClass

from .lifecycle import PartPhase, StopCause

__all__ = [
    "KINDS",
    "Allocation",
    "Amounts",
    "Attempt",
    "AttemptKey",
    "Brake",
    "Clock",
    "DeviceSlot",
    "Entity",
    "Job",
    "Limits",
    "NamespaceLimits",
    "Node",
    "NodeLease",
    "Part",
    "Requirement",
    "Result",
    "Taint",
    "Toleration",
    "Training",
    "attempt_key",
]


@dataclass(frozen=True, slots=True, order=True)
class Amounts:
    """So much of each resource."""

    gpus: int = 0
    cpu_millis: int = 0
    memory_bytes: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(self.gpus + other.gpus, self.cpu_millis + other.cpu_millis, self.memory_bytes + other.memory_bytes)

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(self.gpus - other.gpus, self.cpu_millis - other.cpu_millis, self.memory_bytes - other.memory_bytes)

    def __mul__(self, times: int) -> Amounts:
        return Amounts(self.gpus * times, self.cpu_millis * times, self.memory_bytes * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of each resource; None: no limit."""

    gpus: int | None = None
    cpu_millis: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A partition's time and counters. Its id is always `clock`."""

    now_ms: int = 0  # pool time: moves by what the broker's stamps on reports move, at most 2 s an input
    append_ms: int = 0  # the stamp of the last report
    submissions: int = 0  # numbers jobs in the order of arrival


@dataclass(frozen=True, slots=True, order=True)
class Taint:
    """Keeps gangs off a node that do not tolerate it."""

    key: str
    value: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Toleration:
    """`value` None: whatever the taint's value is."""

    key: str
    value: str | None = None

    def covers(self, taint: Taint) -> bool:
        return self.key == taint.key and self.value in (None, taint.value)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Requirement:
    """What a gang needs: jobs with equal requirements fit or do not fit together."""

    replicas: int
    cpu_millis: int  # per replica
    memory_bytes: int  # per replica
    gpus: int  # per replica
    replicas_min: int = 0  # with which it may start if not all fit; 0: all
    gpu_types: tuple[str, ...] = ()  # any of these; empty: any
    selector: tuple[tuple[str, tuple[str, ...]], ...] = ()  # labels of its nodes, and their values: any of them
    tolerations: tuple[Toleration, ...] = ()
    same: str = ""  # a label whose value all its nodes must share
    spread: bool = False  # over as many nodes as can be

    @property
    def each(self) -> Amounts:
        """What one replica gets."""
        return Amounts(self.gpus, self.cpu_millis, self.memory_bytes)

    @property
    def at_least(self) -> int:
        return self.replicas_min or self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How far training is, as rank 0's agent last said."""

    global_step: int = 0
    total_steps: int = 0
    env_steps_per_s: int = 0
    mean_return_milli: int | None = None
    episodes: int = 0
    checkpoint_id: str | None = None
    checkpoint_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    uid: str
    namespace: str
    name: str
    pool: str
    labels: dict[str, str]
    spec: dict[str, Any]
    spec_digest: str
    submitted_by: str
    traceparent: str
    model: str
    seed: int
    order: int
    needs: Requirement
    max_runtime_ms: int
    retries_infrastructure: int
    retries_user_error: int
    submitted_ms: int  # broker time
    placeable_ms: int  # broker time of the input since which nothing but the scheduler stood in the way
    priority: int = 0
    queued_at: int = 0  # pool time of its submission
    phase: JobPhase = JobPhase.PENDING
    reason: str = ""
    message: str = ""
    unschedulable: UnschedulableReason | None = None
    revision: int = 0
    attempt_number: int = 0
    lease_epoch: int = 0
    failures_infrastructure: int = 0
    failures_user_error: int = 0
    uncounted: int = 0  # attempts since it last ran that ended through no fault of the job's
    eligible_at: int = 0  # pool time before which it waits
    ran_ms: int = 0  # running time of attempts that are over
    started_ms: int | None = None  # broker time
    finished_ms: int | None = None  # broker time
    purge_at: int | None = None  # pool time
    training: Training = Training()
    stop_reason: str = ""
    model_version: int = 0  # 0: none registered
    cancelled_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One node's share of an attempt."""

    node: str
    incarnation: str
    ranks: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]  # by rank, in the order of `ranks`
    phase: PartPhase = PartPhase.PLACED
    taken_up: bool = False  # its agent has listed it; what was lost before that has never begun
    replicas_running: int = 0
    start_seq: int = 0  # command_seq of StartAttempt; 0: adopted, nothing to send
    stop_seq: int = 0  # command_seq of StopAttempt; 0: not told to stop
    resume_seq: int = 0
    sent_at: int = 0  # pool time of the newest command
    sent_again: int = 0  # how often it was repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an attempt came to, pinned by the first part that decides it."""

    outcome: AttemptOutcome
    failure_class: FailureClass | None = None
    message: str = ""
    stop_reason: str = ""
    model_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The live attempt of a job. Its id is the job's uid: there is never a second."""

    job_uid: str
    pool: str
    attempt_number: int
    lease_epoch: int
    parts: tuple[Part, ...]
    address: str
    port: int
    namespace: str = ""  # whose share it counts towards; empty: placed by a release that did not count
    held: Amounts = Amounts()  # by the whole gang
    placed_at: int  # pool time
    running_at: int | None = None
    stop: StopCause | None = None
    stop_message: str = ""
    result: Result | None = None
    training: Training = Training()

    @property
    def size(self) -> int:
        """Replicas of the gang as it was placed."""
        return sum(len(part.ranks) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlot:
    index: int
    kind: str
    simulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one attempt holds on a node until the agent says it is gone, also after the attempt is over for the scheduler."""

    job_uid: str
    attempt_number: int
    lease_epoch: int
    cpu_millis: int
    memory_bytes: int
    devices: tuple[int, ...]
    port: int = 0  # rank 0's rendezvous
    unknown: bool = False  # reported by the agent, never placed by this state: its size is not known, nothing is placed beside it
    stop_sent_at: int = 0  # pool time, once the attempt is not live any more
    stop_sent_again: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    pool: str
    incarnation: str
    boot_id: str
    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceSlot, ...]
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    address: str
    port_low: int
    port_high: int
    lease_timeout_ms: int
    alive: bool = True
    stopping: bool = False  # its agent was told to end: it gets no work, and its silence is no loss
    cordoned: bool = False
    refused_at: int = 0  # pool time at which another agent was last told that the name is taken
    name_alerted_at: int = 0  # and people
    command_seq: int = 0
    allocations: tuple[Allocation, ...] = ()
    ended: tuple[tuple[str, int, int], ...] = ()  # attempt keys reported as ended: heartbeats sent before the acknowledgement list them

    @property
    def present(self) -> bool:
        """Part of its pool's capacity."""
        return self.alive and not self.stopping

    @property
    def open(self) -> bool:
        """Whether gangs may be placed on it."""
        return self.present and not self.cordoned


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLease:
    """What every heartbeat changes, apart from the node, so that a heartbeat journals little."""

    node: str
    expires_at: int  # pool time
    applied_seq: int = 0
    heard_ms: int = 0  # broker time of the newest heartbeat
    sequence: int = 0  # of the newest report of this incarnation: what is older says what was


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """A pool's brake. `silent` and `unknown`: (node or job uid, pool time), newest last, within the window."""

    pool: str
    engaged: bool = False
    reason: str = ""
    silent: tuple[tuple[str, int], ...] = ()
    unknown: tuple[tuple[str, int], ...] = ()
    acknowledged_until: int = 0  # pool time until which it does not engage again


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceLimits:
    """What an administrator allows a namespace in a pool, where that is not the usual."""

    pool: str
    namespace: str
    queued_max: int | None = None  # jobs that wait at once
    running_max: int | None = None  # jobs that are placed at once
    weight_milli: int = 1000  # its part of what namespaces share, beside the others' weights
    nominal: Limits | None = None  # what is its own; None: nothing is, and it may have what is left
    borrowing: Limits = Limits()  # how much above that it may have
    lending: Limits = Limits()  # how much of that others may have while it is not used


AttemptKey = tuple[str, int, int]


class NamesAttempt(Protocol):
    """An attempt, or what an agent or an allocation says of one."""

    @property
    def job_uid(self) -> str: ...

    @property
    def attempt_number(self) -> int: ...

    @property
    def lease_epoch(self) -> int: ...


def attempt_key(named: NamesAttempt) -> AttemptKey:
    """Which attempt is meant. The epoch is part of it: what was said under another lease is about another attempt."""
    return named.job_uid, named.attempt_number, named.lease_epoch


Entity = Clock | Job | Attempt | Node | NodeLease | Brake | NamespaceLimits

KINDS: Final[dict[str, type[Entity]]] = {
    "clock": Clock,
    "job": Job,
    "attempt": Attempt,
    "node": Node,
    "lease": NodeLease,
    "brake": Brake,
    "limits": NamespaceLimits,
}
