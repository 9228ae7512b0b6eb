"""Faults at every step of the scheduler's cycle and ownership, one after the other under load, and what came of them.

A victim is started that kills or stops itself at a failpoint; a standby takes over. A fault counts only if the victim's log of failpoints says that it
bit. A stopped victim is woken after `stopped_s`, when somebody else has long owned its partitions, and must then end or become a plain member again.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker_mischief import outsider, two_transactions
from checker import Checked
from failpoints import LAUNCHER, failing, hits
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.scheduler_stream.codec import JournalRecord, ReplayFrom, encode_record
from opentinker.scheduler_stream.core.policy import CORE_VERSION
from opentinker.schemas.topics import JOURNAL
from scheduler_process import Worker

__all__ = ["Fault", "Outcome", "SchedulerCampaign", "owned_partitions", "takeover_times", "worker_name"]

_BITE_TIMEOUT_S = 30.0
# What an owner would write that lost its partition long ago: void, since its epoch is nobody's.
_VOID = JournalRecord(
    owner_epoch=-7,
    core_version=CORE_VERSION,
    inputs={},
    changes=(),
    outputs=(),
    replay_from=ReplayFrom(),
    published_fast=-1,
    published_status=-1,
)


@dataclass(frozen=True, slots=True)
class Fault:
    place: str  # a failpoint
    action: str  # kill or stop


@dataclass(slots=True)
class Outcome:
    """One fault that was tried. `bit_at` 0: it did not bite."""

    fault: Fault
    bit_at: float = 0.0
    partition: int | None = None  # whose cycle or takeover it was in
    worker: str = ""  # as it calls itself in the journal
    ended: str = ""  # exit status, or `member again`
    said: Counter[str] = field(default_factory=Counter)  # what the victim's log names: SupersededError, ProducerFenced, ...


class SchedulerCampaign:
    """Runs faults against the scheduler of one broker, with one standby that is always there."""

    def __init__(
        self, settings: KafkaSettings, environment: dict[str, str], directory: Path, *, stopped_s: float = 20.0, say: Callable[[str], None] = print
    ) -> None:
        self._settings, self._environment, self._directory = settings, environment, directory
        self._stopped_s, self._say = stopped_s, say
        self.outcomes: list[Outcome] = []
        self.standby: Worker = None  # type: ignore[assignment]
        self._endings: set[asyncio.Task[None]] = set()
        self._mischief: asyncio.Task[None] | None = None
        self.holes = 0  # transactions whose markers, or whose aborted records, an input topic holds

    async def __aenter__(self) -> SchedulerCampaign:
        self.standby = Worker(self._environment, self._directory / "standby.log")
        everything = set(range(self._settings.partitions))
        await self._until(lambda: everything <= set(owned_partitions(self.standby)), 30, "the standby does not own everything")
        self._mischief = asyncio.create_task(self._make_holes())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._mischief is not None:
            self._mischief.cancel()
        await asyncio.gather(*self._endings)

    async def stop(self) -> int:
        """The standby's exit status; until then it brings to an end what is left."""
        return await asyncio.to_thread(self.standby.stop)

    async def run(self, faults: list[Fault], deadline: float) -> None:
        """Every fault in turn, as long as the time allows."""
        for number, fault in enumerate(faults):
            if time.monotonic() > deadline:
                self._say(f"out of time after {number} of {len(faults)} faults")
                return
            outcome = await self._one(number, fault)
            self._say(f"{number + 1}/{len(faults)} {fault.action} at {fault.place}: {'bit' if outcome.bit_at else 'DID NOT BITE'}")

    async def _one(self, number: int, fault: Fault) -> Outcome:
        log = self._directory / f"{number}.jsonl"
        # Not always the first time it comes by: now the first record after a takeover, now one in the middle of the load.
        after = 1 if fault.place.startswith(("ownership", "revoked", "cycle.between")) else (1, 7, 31)[number % 3]
        environment = failing(self._environment, fault.place, fault.action, log, after=after)
        victim = Worker(environment, self._directory / f"{number}.log", launcher=LAUNCHER)
        outcome = Outcome(fault)
        self.outcomes.append(outcome)
        provoke = asyncio.create_task(self._provoke(fault, victim))
        try:
            await self._until(lambda: bool(hits(log)) or victim.process.poll() is not None, _BITE_TIMEOUT_S, "")
        finally:
            provoke.cancel()
        found = hits(log)
        if not found:
            outcome.ended = f"did not bite, exit {victim.stop()}"
            return outcome
        outcome.bit_at, outcome.partition, outcome.worker = found[0]["time"], found[0]["partition"], worker_name(victim)
        ending = asyncio.create_task(self._see_off(victim, outcome))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return outcome

    async def _provoke(self, fault: Fault, victim: Worker) -> None:
        """Bring about what a place needs: a rival's record for `between_read`, a rebalance for `revoked`."""
        if fault.place == "cycle.between_read":
            sender = kafka.producer(self._settings, "rival")
            await sender.start()
            try:
                while True:
                    for partition in range(self._settings.partitions):
                        await sender.send_and_wait(JOURNAL, encode_record(_VOID), partition=partition)
                    await asyncio.sleep(0.5)
            finally:
                await sender.stop()
        elif fault.place == "revoked.finishing":
            await self._until(lambda: "partition owned" in victim.path.read_text(), 25, "")
            await asyncio.sleep(1)
            third = Worker(self._environment, self._directory / f"third-{uuid.uuid4().hex[:6]}.log")
            try:
                await asyncio.sleep(15)
            finally:
                await asyncio.to_thread(third.stop)

    async def _see_off(self, victim: Worker, outcome: Outcome) -> None:
        """Wake a stopped victim when its time is over, and see what it does then."""
        if outcome.fault.action == "stop":
            await asyncio.sleep(self._stopped_s)
            victim.signal(signal.SIGCONT)
        await self._until(lambda: victim.process.poll() is not None, 12, "")
        if victim.process.poll() is None:
            outcome.ended = f"member again, exit {await asyncio.to_thread(victim.stop)}"
        else:
            outcome.ended = f"exit {await asyncio.to_thread(victim.stop)}"
        text = victim.path.read_text()
        outcome.said.update(re.findall(r"SupersededError|ProducerFenced|AppendTimeoutError|InvalidProducerEpoch|CommitFailedError", text))

    async def _make_holes(self) -> None:
        """Now and then transactions of somebody else on every input."""
        sender = outsider(self._settings)
        await sender.start()
        try:
            while True:
                await two_transactions(sender, self._settings.partitions)
                self.holes += 2
                await asyncio.sleep(3)
        finally:
            await sender.stop()

    async def _until(self, condition: Callable[[], Any], timeout_s: float, complaint: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                if complaint:
                    raise AssertionError(complaint)
                return
            await asyncio.sleep(0.05)


def owned_partitions(worker: Worker) -> list[int]:
    """Partitions that a worker has taken over, by its own log."""
    return [json.loads(line)["partition"] for line in worker.path.read_text().splitlines() if '"partition owned"' in line]


def worker_name(worker: Worker) -> str:
    """What a worker calls itself, by its own log."""
    return next((name for line in worker.path.read_text().splitlines() if line.startswith("{") and (name := json.loads(line).get("worker"))), "")


def takeover_times(ends: Iterable[tuple[float, str, int | None]], checked: Checked) -> list[float]:
    """Seconds from the end of a worker to the first record of the next owner, for every partition it owned by the journal.

    `ends`: (wall-clock seconds, the worker's name, a partition that it was about to own, if any).
    """
    found = []
    for at, worker, about in ends:
        newest = {partition: owner for partition, _, stamp, owner in sorted(checked.owners, key=lambda entry: entry[2]) if stamp / 1000 <= at}
        for partition in {partition for partition, owner in newest.items() if owner == worker} | ({about} - {None}):
            next_owners = [offset for owned, offset, stamp, owner in checked.owners if owned == partition and stamp / 1000 > at and owner != worker]
            wrote = [checked.first_records[partition, offset] / 1000 for offset in next_owners if (partition, offset) in checked.first_records]
            if wrote:
                found.append(min(wrote) - at)
    return found
