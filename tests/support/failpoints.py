"""Places in a scheduler worker at which a test can kill it, stop it or make it wait. Production code holds none of this: a launcher wraps the named
methods from outside (`worker_with_failpoints.py`), in the worker's own process, before it starts.

Use, from a test on the real broker:

    log = tmp_path / "failpoints.jsonl"
    worker = Worker(failing(stack.environment(), "cycle.appended", "kill", log), tmp_path / "worker.log", launcher=LAUNCHER)
    ...
    assert [hit["failpoint"] for hit in hits(log)] == ["cycle.appended"]  # the fault bit

or by hand: `FAILPOINT=cycle.appended FAILPOINT_ACTION=kill FAILPOINT_LOG=hits.jsonl python tests/support/worker_with_failpoints.py`.

Environment of the launcher:
    FAILPOINT            a name of NAMES, or * for all
    FAILPOINT_ACTION     record          nothing but the line in the log
                         kill            SIGKILL to itself
                         stop            SIGSTOP to itself (the whole process, Faust's consumer thread too); the test sends SIGCONT
                         delay:SECONDS   this one task waits; the event loop, heartbeats and other partitions go on
                         block:SECONDS   the event loop stands still; Faust's consumer thread goes on and keeps the membership
                         fail            raises RuntimeError there
    FAILPOINT_AFTER      acts on the n-th hit, and only on that one (default 1); counted per name
    FAILPOINT_PARTITION  only hits of this partition count (default: any)
    FAILPOINT_LOG        file that gets one JSON line {failpoint, action, pid, time, hit, partition} right before acting, synced to disk
    CORE_VERSION         the core version that this worker believes to be (for upgrades and rollbacks)
    WATCHDOG             bounds of the watchdog in seconds, as JSON: {"STUCK_S": 3, "OBSERVE_S": 0.5}
    SICK                 how the worker stands still although nothing fails: no_ticks, no_delivery, frozen_consumer
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["ACTIONS", "LAUNCHER", "NAMES", "Failpoints", "current_partition", "failing", "hits"]

LAUNCHER: Final = str(Path(__file__).with_name("worker_with_failpoints.py"))
ACTIONS: Final = ("record", "kill", "stop", "delay", "block", "fail")

NAMES: Final = {
    "ownership.fenced": "the status producer started, so the former one is fenced; nothing is in the journal yet",
    "ownership.replay_from_read": "the place to recover from is known",
    "ownership.started": "OwnerStarted is in the journal",
    "ownership.folded": "the state is recovered, the inputs are not compared yet",
    "ownership.verified": "the inputs are those that the journal folded",
    "ownership.republished": "what no mark covered was published again",
    "cycle.taken": "a batch of inputs was taken, none stepped",
    "cycle.stepped": "stepped in memory, nothing written (only records with outputs count)",
    "cycle.appended": "the journal acknowledged the record, nothing of it is published (only records with outputs count)",
    "cycle.between_read": "another writer's records were found in between and read",
    "publish.sent": "outputs are sent, their acks not awaited (only records with fast outputs count)",
    "publish.acked": "all acks are here, the mark has not moved (only records with fast outputs count)",
    "status.begun": "the status transaction is open, its records are sent",
    "status.committed": "the status transaction is committed, the mark has not moved",
    "cycle.acked": "the record is handed over to both lanes (only records with outputs count)",
    "revoked.finishing": "the partition is being given up, an append may be in flight",
}

current_partition: contextvars.ContextVar[int | None] = contextvars.ContextVar("current_partition", default=None)


@dataclass(slots=True)
class Failpoints:
    """What the launcher was told, and how often each place was reached."""

    name: str
    action: str = "record"
    after: int = 1
    partition: int | None = None
    log: Path | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.name != "*" and self.name not in NAMES:
            raise SystemExit(f"FAILPOINT={self.name}: there is no such place; use one of {', '.join(NAMES)}")
        if self.action.partition(":")[0] not in ACTIONS:
            raise SystemExit(f"FAILPOINT_ACTION={self.action}: use one of {', '.join(ACTIONS)}; delay and block with :SECONDS")

    @classmethod
    def from_environment(cls) -> Failpoints | None:
        get = os.environ.get
        if not get("FAILPOINT"):
            return None
        partition, log = get("FAILPOINT_PARTITION"), get("FAILPOINT_LOG")
        return cls(
            name=os.environ["FAILPOINT"],
            action=get("FAILPOINT_ACTION", "record"),
            after=int(get("FAILPOINT_AFTER", "1")),
            partition=int(partition) if partition else None,
            log=Path(log) if log else None,
        )

    async def hit(self, name: str) -> None:
        """The worker is at this place now."""
        partition = current_partition.get()
        if self.name not in ("*", name) or self.partition not in (None, partition):
            return
        self.counts[name] += 1
        if self.counts[name] != self.after:
            return
        self._note(name, partition)
        kind, _, amount = self.action.partition(":")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "delay":
            await asyncio.sleep(float(amount))
        elif kind == "block":
            time.sleep(float(amount))  # noqa: ASYNC251
        elif kind == "fail":
            raise RuntimeError(f"failpoint {name}")

    def _note(self, name: str, partition: int | None) -> None:
        if self.log is None:
            return
        line = {"failpoint": name, "action": self.action, "pid": os.getpid(), "time": time.time(), "hit": self.counts[name], "partition": partition}
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def failing(environment: dict[str, str], name: str, action: str, log: Path, after: int = 1, partition: int | None = None) -> dict[str, str]:
    """The environment of a worker that does `action` at the `after`-th time it comes to `name`."""
    additions = {"FAILPOINT": name, "FAILPOINT_ACTION": action, "FAILPOINT_AFTER": str(after), "FAILPOINT_LOG": str(log)}
    if partition is not None:
        additions["FAILPOINT_PARTITION"] = str(partition)
    return environment | additions


def hits(log: Path) -> list[dict[str, Any]]:
    """What the failpoints of one log did, in order."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
