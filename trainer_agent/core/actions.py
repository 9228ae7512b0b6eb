"""What the core asks of the shell. The shell carries each out and tells the core what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from opentinker.schemas.messages.reports import AttemptEnded
from opentinker.trainer_agent.core.parts import Key, Part

__all__ = ["Action", "BeatNow", "DumpStacks", "Kill", "OpenAttempt", "RenewLease", "Report", "StartReplicas", "Terminate"]


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Ask the registry; then `opened` or `failed`."""

    part: Part


@dataclass(frozen=True, slots=True)
class StartReplicas:
    """Start one process for each replica; then `replica_started` for each, or `failed`."""

    part: Part


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to every process of the part."""

    key: Key


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have every process of the part print where it is: it hangs, and is about to be ended."""

    key: Key


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to every process group of the part; `replica_gone` follows when nothing of it is left."""

    key: Key


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Tell the trainers of the part how long they may go on."""

    key: Key
    valid_until_ns: int


@dataclass(frozen=True, slots=True)
class Report:
    """Write the report down, send it until Kafka acknowledges it, then `report_acknowledged`."""

    key: Key
    report: AttemptEnded


@dataclass(frozen=True, slots=True)
class BeatNow:
    """A phase changed: send a heartbeat at once."""


Action = OpenAttempt | StartReplicas | Terminate | DumpStacks | Kill | RenewLease | Report | BeatNow
