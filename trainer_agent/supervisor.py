"""Carries out what the core decides: opens attempts, starts, stops and watches trainers, passes on what they say, keeps the journal.

Every fact goes to the core, and what the core answers is done at once (`perform`); what takes time is a task that brings its result as the next fact.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import httpx
import structlog
from opentinker.compose.runtime.settings import Settings
from opentinker.compose.runtime.tracing import ATTRIBUTE_JOB_UID, ATTRIBUTE_NAMESPACE, SPAN_ATTEMPT_START, span
from opentinker.schemas.messages.reports import AttemptEnded, FailureClass
from opentinker.schemas.registry_api import OpenAttempt as OpenAttemptRequest
from opentinker.schemas.registry_api import OpenedAttempt
from opentinker.trainer_agent import observability
from opentinker.trainer_agent.bus import BrokerClock, BulkSender, Reports
from opentinker.trainer_agent.core.actions import Action, BeatNow, DumpStacks, Kill, OpenAttempt, RenewLease, Report, StartReplicas, Terminate
from opentinker.trainer_agent.core.agent import AgentCore
from opentinker.trainer_agent.core.lifecycle import Phase
from opentinker.trainer_agent.core.parts import Key, Part, Replica
from opentinker.trainer_agent.journal import Journal, JournalEntry, JournalledReplica
from opentinker.trainer_agent.listener import Listener, Place
from opentinker.trainer_agent.outlets import Outlets
from opentinker.trainer_agent.processes import TrainerProcess, is_same_process, read_result
from opentinker.trainer_agent.protocol import AttemptDescription, Event, Hello, MetricsSample, Ready, token_digest
from opentinker.trainer_agent.registry_client import FencedError, RefusedError, RegistryError, UnauthorizedError, open_attempt

__all__ = ["Supervisor"]

_OPEN_TRIES_MAX = 8  # with the delays about 30 s, longer than a restart of the registry takes
_OPEN_DELAY_MAX_S = 6.0
_ADOPTION_WAIT_S = 3.0  # trainers look for their agent five times a second
_PEER_TIMEOUT_SLACK_S = 60.0


class Supervisor:
    """The hands of one agent. `beat` is called when a heartbeat is due at once, `give_up` with the reason when this node can start nothing any more."""

    def __init__(
        self,
        settings: Settings,
        node: str,
        directory: Path,
        core: AgentCore,
        journal: Journal,
        reports: Reports,
        bulk: BulkSender,
        http: httpx.AsyncClient,
        clock: BrokerClock,
        *,
        simulated: bool,
        beat: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._settings, self._node, self._directory, self._simulated = settings, node, directory, simulated
        self._core, self._journal, self._reports, self._http, self._beat = core, journal, reports, http, beat
        self._give_up = give_up
        self._outlets = Outlets(node, bulk, clock)
        self._listener = Listener(directory, self._knows, self._said)
        self._opened: dict[Key, OpenedAttempt] = {}
        self._entries: dict[Key, JournalEntry] = {}
        self._unsent: dict[Key, AttemptEnded] = {}
        self._processes: dict[Key, dict[int, TrainerProcess]] = {}
        self._placed_ns: dict[Key, int] = {}
        self._greeted: set[tuple[Key, int]] = set()
        self._early: dict[Key, list[tuple[int, Event]]] = {}  # what trainers said while it was not decided whether they are adopted
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()

    async def start(self) -> None:
        """Listen for trainers, then send what was left unsent and adopt or end what was left running."""
        await self._listener.start()
        remembered = self._journal.read()
        for report in remembered.reports:
            await self._reports.send_surely(report)
        kept = [await self._adopt_or_end(entry) for entry in remembered.entries]
        self._entries = {part.key: entry for part, entry in kept if part is not None}
        self._write_journal_if_it_can()
        for folder in self._parts_directory().glob("*"):
            if folder.name not in {_folder_name(key) for key in self._entries}:
                shutil.rmtree(folder, ignore_errors=True)

    async def stop(self) -> None:
        """Close what is open. Trainers that are left see their agent gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.stop()

    def perform(self, actions: Iterable[Action]) -> None:
        """Do what the core asks for."""
        for action in actions:
            match action:
                case OpenAttempt(part):
                    self._placed_ns[part.key] = time.monotonic_ns()
                    self._spawn(self._open(part))
                case StartReplicas(part):
                    self._spawn(self._start_replicas(part))
                case Terminate(key):
                    for process in self._processes.get(key, {}).values():
                        process.terminate()
                case DumpStacks(key):
                    for process in self._processes.get(key, {}).values():
                        process.dump_stacks()
                case Kill(key):
                    for process in self._processes.get(key, {}).values():
                        process.kill()
                case RenewLease(key, valid_until_ns):
                    for rank in self._processes.get(key, {}):
                        self._listener.renew((key[0], key[1], rank), valid_until_ns)
                case Report(key, report):
                    self._unsent[key] = report
                    self._write_journal_if_it_can()
                    observability.ENDED.labels(report.outcome.value, report.failure_class or "").inc()
                    self._log.info(
                        "attempt ended", job_uid=key[0], attempt_number=key[1], outcome=report.outcome, failure_class=report.failure_class,
                        message=report.message, exit_codes=report.exit_codes, global_step=report.global_step,
                    )  # fmt: skip
                    self._spawn(self._send_report(key, report))
                case BeatNow():
                    self._beat()

    def tick(self) -> None:
        """Let time pass, and pass on what trainers have printed."""
        now_ns = time.monotonic_ns()
        self.perform(self._core.tick(now_ns))
        self._outlets.look(now_ns)
        counts = dict.fromkeys(Phase, 0)
        for part in self._core.parts:
            counts[part.phase] += 1
        for phase, count in counts.items():
            observability.PARTS.labels(phase.value).set(count)
        observability.LEASE_SECONDS.set(max(0, self._core.lease_until_ns - now_ns) / 1e9)

    # Opening and starting.

    async def _open(self, part: Part) -> None:
        """Raise the fence and learn where to go on: once, patiently, as long as the part is wanted."""
        command = part.command
        body = OpenAttemptRequest(
            job_uid=command.job_uid,
            namespace=command.namespace,
            attempt_number=command.attempt_number,
            lease_epoch=command.lease_epoch,
            node=self._node,
            world_size=command.world_size,
            spec_digest=command.spec_digest,
            model_name=command.model,
        )
        delay_s, message, failure = 0.25, "", FailureClass.UNAVAILABLE
        for _ in range(_OPEN_TRIES_MAX):
            try:
                self._opened[part.key] = await open_attempt(self._http, body)
                self.perform(self._core.opened(part.key))
                return
            except (FencedError, RefusedError) as error:
                message, failure = str(error), FailureClass.START_FAILED
                break
            except UnauthorizedError as error:
                message = str(error)
                self._give_up(message)
                break
            except RegistryError as error:
                message = str(error)
                self._log.warning("the registry cannot open an attempt yet", job_uid=command.job_uid, error=message)
            current = self._core.part(part.key)
            if current is None or current.phase is Phase.STOPPING:
                break
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _OPEN_DELAY_MAX_S)
        self.perform(self._core.failed(part.key, failure, message, time.monotonic_ns()))

    async def _start_replicas(self, part: Part) -> None:
        opened = self._opened.pop(part.key)
        marker = uuid.uuid4().hex
        processes = self._processes.setdefault(part.key, {})
        attributes = {ATTRIBUTE_JOB_UID: part.command.job_uid, ATTRIBUTE_NAMESPACE: part.command.namespace}
        with span(SPAN_ATTEMPT_START, part.traceparent, attributes):
            for replica in part.replicas:
                description = self._description(part, replica, opened)
                try:
                    process = await TrainerProcess.start(description, marker, replica.devices, simulated=self._simulated)
                except OSError as error:
                    message = f"the process of rank {replica.rank} could not be started: {error}"
                    self.perform(self._core.replica_not_started(part.key, replica.rank, message, time.monotonic_ns()))
                    continue
                processes[replica.rank] = process
                try:
                    self._note_process(part, marker, process, token_digest(opened.attempt_token), replica.devices)
                except OSError as error:  # a full disk: what is not written down could not be found again, so it does not run
                    process.kill()
                    await process.gone()
                    del processes[replica.rank]
                    message = f"the process of rank {replica.rank} could not be written down in {self._directory}: {error}"
                    self.perform(self._core.replica_not_started(part.key, replica.rank, message, time.monotonic_ns()))
                    continue
                self._follow(part, process)
                self.perform(self._core.replica_started(part.key, replica.rank))
        self._log.info("trainers started", job_uid=part.command.job_uid, attempt_number=part.command.attempt_number, ranks=list(processes))

    def _description(self, part: Part, replica: Replica, opened: OpenedAttempt) -> AttemptDescription:
        command, settings = part.command, self._settings
        return AttemptDescription(
            job_uid=command.job_uid,
            namespace=command.namespace,
            name=command.name,
            attempt_number=command.attempt_number,
            lease_epoch=command.lease_epoch,
            node=self._node,
            rank=replica.rank,
            world_size=command.world_size,
            rendezvous_address=command.rendezvous.address,
            rendezvous_port=command.rendezvous.port,
            seed=command.seed,
            spec=command.spec,
            model=command.model,
            registry_url=settings.registry.url,
            attempt_token=opened.attempt_token,
            resume=opened.resume,
            directory=str(self._replica_directory(part.key, replica.rank)),
            control_directory=str(self._directory),
            lease_valid_until_ns=max(1, self._core.lease_until_ns),
            threads=max(1, command.cpu_millis // 1000),
            peer_timeout_s=settings.agent.hold_timeout_s + _PEER_TIMEOUT_SLACK_S,
        )

    def _follow(self, part: Part, process: TrainerProcess, *, from_end: bool = False) -> None:
        """Watch a process until it is gone, and its output."""
        self._outlets.open(part, process.rank, process.directory, from_end=from_end)
        self._spawn(self._watch(part, process))

    async def _watch(self, part: Part, process: TrainerProcess) -> None:
        code = await process.gone()
        self._outlets.close(part.key, process.rank)
        word = read_result(process.directory)
        self._log.info("trainer gone", job_uid=part.command.job_uid, rank=process.rank, exit_code=code, outcome=word.outcome if word else None)
        self.perform(self._core.replica_gone(part.key, process.rank, code, time.monotonic_ns(), word))

    async def _send_report(self, key: Key, report: AttemptEnded) -> None:
        part = self._core.part(key)
        await self._reports.send_surely(report, part.traceparent if part else "")
        for known in (self._unsent, self._entries, self._processes, self._placed_ns):
            known.pop(key, None)
        self._greeted -= {place for place in self._greeted if place[0] == key}
        self._write_journal_if_it_can()
        self.perform(self._core.report_acknowledged(key))
        await asyncio.to_thread(shutil.rmtree, self._parts_directory() / _folder_name(key), ignore_errors=True)

    # What trainers say.

    def _knows(self, hello: Hello) -> bool:
        """A Hello is believed if pid, start time and token are those of a process that we started (its boot is ours: the socket is)."""
        for key, entry in self._entries.items():
            if key[:2] == (hello.job_uid, hello.attempt_number):
                return any(
                    (each.rank, each.pid, each.start_ticks, each.token_sha256) == (hello.rank, hello.pid, hello.start_ticks, hello.token_sha256)
                    for each in entry.replicas
                )
        return False

    def _said(self, place: Place, event: Event) -> None:
        key = next((key for key in self._entries if key[:2] == place[:2]), None)
        part = None if key is None else self._core.part(key)
        if key is None:
            return
        if isinstance(event, Hello):
            self._greeted.add((key, place[2]))
        if part is None:
            self._early.setdefault(key, []).append((place[2], event))
            return
        if isinstance(event, MetricsSample):
            self._outlets.metrics(part, place[2], event)
            return
        if isinstance(event, Ready):
            self._log.info(
                "trainer ready", job_uid=key[0], rank=place[2], transport=event.transport, resume=event.resume, global_step=event.global_step
            )
            if place[2] == part.replicas[0].rank and key in self._placed_ns:
                observability.START_SECONDS.observe((time.monotonic_ns() - self._placed_ns[key]) / 1e9)
        self.perform(self._core.event(key, place[2], event, time.monotonic_ns()))

    # Memory.

    def _note_process(self, part: Part, marker: str, process: TrainerProcess, token_sha256: str, devices: tuple[int, ...]) -> None:
        entry = self._entries.get(part.key) or JournalEntry(command=part.command, marker=marker, replicas=())
        noted = JournalledReplica(rank=process.rank, devices=devices, pid=process.pid, start_ticks=process.ticks, token_sha256=token_sha256)
        self._entries[part.key] = entry.model_copy(update={"replicas": (*entry.replicas, noted)})
        self._write_journal()

    def _write_journal(self) -> None:
        self._journal.write(self._entries.values(), self._unsent.values())

    def _write_journal_if_it_can(self) -> None:
        """For endings: what the file still says of them is recognised as over, and only an agent that dies now would lose a report."""
        try:
            self._write_journal()
        except OSError as error:
            self._log.error("the agent's journal cannot be written; free space", directory=str(self._directory), error=str(error))

    async def _adopt_or_end(self, entry: JournalEntry) -> tuple[Part | None, JournalEntry]:
        """Adopt a part if every process of it is there and shows the right token, or has left its last word; else end what is left of it."""
        command = entry.command
        replicas = tuple(Replica(rank=each.rank, devices=each.devices, started=True) for each in entry.replicas)
        part = Part(command=command, replicas=replicas)
        processes = {
            each.rank: TrainerProcess(each.rank, each.pid, each.start_ticks, entry.marker, self._replica_directory(part.key, each.rank))
            for each in entry.replicas
        }
        self._entries[part.key] = entry  # so that their Hellos are known
        whole = {each.rank for each in command.replicas} == set(processes)
        if whole and await self._all_greet(part.key, processes):
            self._processes[part.key] = processes
            self._core.adopt(part, time.monotonic_ns())
            for rank, event in self._early.pop(part.key, []):
                self.perform(self._core.event(part.key, rank, event, time.monotonic_ns()))
            for process in processes.values():
                self._follow(part, process, from_end=True)
            self._log.info("trainers adopted", job_uid=command.job_uid, attempt_number=command.attempt_number, ranks=list(processes))
            return part, entry
        del self._entries[part.key]
        self._early.pop(part.key, None)
        for process in processes.values():
            process.kill()
            await process.gone()
        self._log.info("left-over trainers ended", job_uid=command.job_uid, attempt_number=command.attempt_number)
        return None, entry

    async def _all_greet(self, key: Key, processes: dict[int, TrainerProcess]) -> bool:
        deadline = time.monotonic() + _ADOPTION_WAIT_S
        while True:
            states = [
                (key, rank) in self._greeted or (not is_same_process(each.pid, each.ticks) and read_result(each.directory) is not None)
                for rank, each in processes.items()
            ]
            dead = any(not is_same_process(each.pid, each.ticks) and read_result(each.directory) is None for each in processes.values())
            if all(states) or dead or time.monotonic() > deadline:
                return all(states)
            await asyncio.sleep(0.05)

    def _parts_directory(self) -> Path:
        return self._directory / "parts"

    def _replica_directory(self, key: Key, rank: int) -> Path:
        return self._parts_directory() / _folder_name(key) / f"rank-{rank}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a task of the agent failed", exc_info=error)


def _folder_name(key: Key) -> str:
    return f"{key[0]}-{key[1]}-{key[2]}"
