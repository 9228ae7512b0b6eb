"""What an agent and its trainers say to each other. Imports neither torch nor asyncio: both sides use it.

The description of an attempt comes as one JSON object on the trainer's standard input (never on the command line: it holds a token). Then both
speak newline-delimited JSON over a Unix socket that the agent listens on in its own directory (mode 0700). The trainer connects, says Hello, and
connects again if the agent restarts: an agent that knows it goes on with it (adoption), and silence past the lease ends the trainer.

Trainer → agent: Hello, Ready, ProgressReport, MetricsSample, CheckpointCommitted, Stopped. After a reconnect: Hello, then the newest of each.
Agent → trainer: Lease. Stopping is SIGTERM.

Exit codes of the trainer process; the agent falls back on them when no Stopped arrived.
"""

from __future__ import annotations

import hashlib
import json
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal

from opentinker.schemas.messages.jobs import ModelReference
from opentinker.schemas.messages.types import Count
from opentinker.schemas.registry_api import ResumeFrom
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

__all__ = [
    "LINE_BYTES_MAX",
    "AttemptDescription",
    "CheckpointCommitted",
    "Event",
    "ExitCode",
    "Hello",
    "Lease",
    "MetricsSample",
    "ProgressReport",
    "ProtocolError",
    "Ready",
    "Stopped",
    "TrainerOutcome",
    "decode_event",
    "decode_lease",
    "encode_line",
    "token_digest",
]

LINE_BYTES_MAX = 256 * 1024  # a longer line is not ours; effective configurations are a few kB


class ProtocolError(Exception):
    """The other side sent something that is no message of this protocol. The connection is given up, not the process."""


class ExitCode(IntEnum):
    """How a trainer process ends. Anything else, and death by a signal, counts as infrastructure."""

    DONE = 0  # a stop rule ended training and the final checkpoint is committed
    STOPPED = 10  # told to stop (SIGTERM, or the agent is gone); what could be saved is saved
    USER_ERROR = 20  # the environment, the settings
    OUT_OF_MEMORY = 21
    NON_FINITE = 22
    INFRASTRUCTURE = 30  # a lost peer, no registry, no rendezvous, fenced


class TrainerOutcome(StrEnum):
    """The same in words; the failures are those of the attempt reports."""

    SUCCEEDED = "Succeeded"
    STOPPED = "Stopped"
    USER_ERROR = "UserError"
    OUT_OF_MEMORY = "OutOfMemory"
    NON_FINITE = "NonFinite"
    INFRASTRUCTURE = "Infrastructure"

    @property
    def exit_code(self) -> ExitCode:
        return _EXIT_CODES[self]


_EXIT_CODES = {
    TrainerOutcome.SUCCEEDED: ExitCode.DONE,
    TrainerOutcome.STOPPED: ExitCode.STOPPED,
    TrainerOutcome.USER_ERROR: ExitCode.USER_ERROR,
    TrainerOutcome.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    TrainerOutcome.NON_FINITE: ExitCode.NON_FINITE,
    TrainerOutcome.INFRASTRUCTURE: ExitCode.INFRASTRUCTURE,
}


Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class AttemptDescription(_Part):
    """Everything one trainer process is told. Holds a token: standard input or a file of mode 0600 only."""

    job_uid: str
    namespace: str = "default"
    name: str = "job"
    attempt_number: int = Field(1, ge=1)
    lease_epoch: int = Field(1, ge=1)
    node: str = "local"
    rank: int = Field(0, ge=0)
    world_size: int = Field(1, ge=1)
    rendezvous_address: str = "127.0.0.1"
    rendezvous_port: int = Field(29500, ge=1, le=65535)
    seed: int = Field(ge=0)
    spec: dict[str, Any]  # JobSpec as JSON
    model: str = ""  # the name that a success is registered under
    registry_url: str = ""  # empty: checkpoints stay in `directory`
    attempt_token: str = ""
    resume: ResumeFrom | None = None
    directory: str  # of this process: staged checkpoints, result.json
    control_directory: str = ""  # where the agent's socket is; empty: no agent, events are printed
    lease_valid_until_ns: int = 0  # CLOCK_MONOTONIC; 0: no lease
    grace_s: float = Field(30.0, ge=0)  # how long to look for a lost agent past the lease before stopping
    threads: int = Field(1, ge=1, le=1024)
    join_timeout_s: float = Field(120.0, gt=0)  # for the gang to meet: slow imports on cold disks
    peer_timeout_s: float = Field(900.0, gt=0)  # for a peer that lives but does not come; longer than a lease is held paused (600 s)


class Hello(_Part):
    type: Literal["hello"] = "hello"
    job_uid: str
    attempt_number: int
    rank: int
    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat
    boot_id: str
    token_sha256: str


class Ready(_Part):
    """Training begins."""

    type: Literal["ready"] = "ready"
    transport: str
    global_step: Count  # > 0 after a resume
    resume: Literal["fresh", "exact", "episodes-restarted"]
    weights_sha256: str  # equal on all ranks
    effective: dict[str, Any]  # what is run


class ProgressReport(_Part):
    type: Literal["progress"] = "progress"
    global_step: Count
    total_steps: Count = 0  # 0: no step budget
    updates: Count = 0
    episodes: Count = 0
    env_steps_per_s: Finite = 0.0
    mean_return: Finite | None = None
    paused: bool = False


class MetricsSample(_Part):
    """Names and units: `TrainingMetrics` of the schemas. Not finite: the strings "NaN", "Infinity", "-Infinity"."""

    type: Literal["metrics"] = "metrics"
    global_step: Count
    update: Count
    time_ms: Count
    values: dict[str, float]


class CheckpointCommitted(_Part):
    type: Literal["checkpoint"] = "checkpoint"
    checkpoint_id: str
    global_step: Count
    final: bool = False


class Stopped(_Part):
    """The last word of a trainer; also left in `result.json` for an agent that was away."""

    type: Literal["stopped"] = "stopped"
    outcome: TrainerOutcome
    message: str = ""
    stop_reason: str = ""
    global_step: Count = 0
    updates: Count = 0
    episodes: Count = 0
    mean_return: Finite | None = None
    checkpoint_id: str | None = None
    checkpoint_step: Count = 0
    model: ModelReference | None = None
    weights_sha256: str = ""


class Lease(_Part):
    """The trainer may go on until this instant of CLOCK_MONOTONIC, which all processes of a host share."""

    type: Literal["lease"] = "lease"
    valid_until_ns: int


Event = Annotated[Hello | Ready | ProgressReport | MetricsSample | CheckpointCommitted | Stopped, Field(discriminator="type")]
_EVENTS: TypeAdapter[Hello | Ready | ProgressReport | MetricsSample | CheckpointCommitted | Stopped] = TypeAdapter(Event)


def encode_line(message: BaseModel) -> bytes:
    """One message as a line of JSON."""
    return message.model_dump_json(exclude_none=True).encode() + b"\n"


def decode_event(line: bytes) -> Hello | Ready | ProgressReport | MetricsSample | CheckpointCommitted | Stopped:
    """A line from a trainer. Raises ProtocolError."""
    try:
        return _EVENTS.validate_json(line)
    except ValidationError as error:
        raise ProtocolError(f"not an event: {error.errors(include_url=False, include_input=False)[0]['msg']}") from None


def decode_lease(line: bytes) -> Lease:
    """A line from an agent. Raises ProtocolError."""
    try:
        return Lease.model_validate(json.loads(line))
    except (ValueError, ValidationError) as error:
        raise ProtocolError(f"not a lease: {error}") from None


def token_digest(token: str) -> str:
    """What may be written down of a token: its SHA-256."""
    return hashlib.sha256(token.encode()).hexdigest()
