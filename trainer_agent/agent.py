"""One agent: announces its node, takes commands, beats, and ends with its trainers. `run_agent` reads from top to bottom."""

from __future__ import annotations

import asyncio
import platform
import secrets
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import httpx
import structlog
from aiokafka.errors import KafkaError
from opentinker.compose.runtime.kafka import wait_for_broker
from opentinker.compose.runtime.metrics import start_exporter
from opentinker.compose.runtime.secrets import read_secret
from opentinker.compose.runtime.settings import Settings, SettingsError
from opentinker.schemas.messages.placements import ResumeAttempt, StartAttempt, StopAttempt
from opentinker.schemas.messages.reports import AgentStarted, NodeCapacity
from opentinker.schemas.records import Envelope
from opentinker.trainer_agent import observability
from opentinker.trainer_agent.bus import BrokerClock, BulkSender, Commands, Reports
from opentinker.trainer_agent.capacity import capacity_of, port_range
from opentinker.trainer_agent.core.agent import AgentCore, AgentRules
from opentinker.trainer_agent.journal import FolderTakenError, Journal
from opentinker.trainer_agent.processes import boot_id
from opentinker.trainer_agent.supervisor import Supervisor

__all__ = ["run_agent"]

_TICK_S = 0.1
_ANNOUNCE_S = 60.0
_BEAT_SPACING_S = 0.05  # phases that change together share a heartbeat
_BROKER_WAIT_S = 120.0  # at start, before the supervisor's next try
_STOP_GRACE_S = 12.0  # of the 20 s that a service has to stop
_STOP_WAIT_S = 15.0


class SupersededError(Exception):
    """A newer agent of the same node runs: this one ends."""


async def run_agent(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop`, then end the trainers with a checkpoint."""
    node = settings.agent.node or platform.node().lower()
    directory = settings.agent.directory or settings.home / "agents" / node
    try:
        journal = Journal(directory, boot_id())
    except FolderTakenError as error:
        raise SettingsError(str(error)) from None
    observability.prepare()
    agent = _Agent(settings, node, directory, journal, stop)
    try:
        await agent.run()
    finally:
        journal.close()


class _Agent:
    def __init__(self, settings: Settings, node: str, directory: Path, journal: Journal, stop: asyncio.Event) -> None:
        own = settings.agent
        self._settings, self._node, self._stop = settings, node, stop
        self._capacity: NodeCapacity = capacity_of(own)
        self._ports = port_range(own.ports)
        self._incarnation = journal.next_incarnation(time.time_ns() // 1_000_000, secrets.token_hex(4))
        self._lease_ns = int(own.lease_timeout_s * 1e9)
        rules = AgentRules(
            node=node,
            incarnation=self._incarnation,
            pool=own.pool,
            lease_ns=self._lease_ns,
            margin_ns=int(own.lease_margin_s * 1e9),
            hold_ns=int(own.hold_timeout_s * 1e9),
            progress_ns=int(own.progress_timeout_s * 1e9),
        )
        self._core = AgentCore(rules)
        self._clock = BrokerClock()
        self._reports = Reports(settings.kafka, node, own.pool, self._clock)
        self._commands = Commands(settings.kafka, node)
        self._bulk = BulkSender(settings.kafka, node, self._clock)
        token = read_secret(settings.agent_token_file, "registry's agent token")
        self._http = httpx.AsyncClient(
            base_url=settings.registry.url, headers={"Authorization": f"Bearer {token}"}, timeout=httpx.Timeout(15.0, connect=5.0), trust_env=False
        )
        self._beat = asyncio.Event()
        simulated = any(device.simulated for device in self._capacity.devices) or not self._capacity.devices
        self._supervisor = Supervisor(
            settings,
            node,
            directory,
            self._core,
            journal,
            self._reports,
            self._bulk,
            self._http,
            self._clock,
            simulated=simulated,
            beat=self._beat.set,
        )
        self._log = structlog.get_logger()

    async def run(self) -> None:
        # 1. From here on no command is missed; what came before is the scheduler's to heal.
        await wait_for_broker(self._commands.open, _BROKER_WAIT_S)
        # 2. Settle what an earlier incarnation left, before the node offers anything.
        await self._supervisor.start()
        # 3. Announce the node. The scheduler's half of the lease begins with it, and so does ours.
        await self._announce()
        self._log.info("agent started", node=self._node, incarnation=self._incarnation, adopted=len(self._core.parts))
        loops: list[Callable[[], object]] = [self._read, self._beats, self._ticks, self._announcements, self._bulk.run]
        tasks = [asyncio.ensure_future(loop()) for loop in loops]  # type: ignore[call-overload]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({*tasks, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a loop ends only by an error, which ends the agent: its supervisor starts it again
            await self._end_trainers()
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._supervisor.stop()
            for part in (self._commands, self._reports, self._bulk):
                await part.close()
            await self._http.aclose()

    async def _end_trainers(self) -> None:
        """Checkpoints, last words and reports, within what a service has to stop."""
        self._supervisor.perform(self._core.stop_all(time.monotonic_ns(), _STOP_GRACE_S))
        deadline = time.monotonic() + _STOP_WAIT_S
        while self._core.parts and time.monotonic() < deadline:  # noqa: ASYNC110 (the tick loop brings the change)
            await asyncio.sleep(_TICK_S)
        await self._bulk.flush(2.0)

    async def _announce(self) -> None:
        own = self._settings.agent
        message = AgentStarted(
            node=self._node,
            incarnation=self._incarnation,
            pool=own.pool,
            boot_id=boot_id(),
            agent_version=metadata.version("opentinker"),
            capacity=self._capacity,
            labels=own.labels,
            address=own.advertise_address,
            port_low=self._ports[0],
            port_high=self._ports[1],
            lease_timeout_ms=self._lease_ns // 1_000_000,
            adopted=self._core.listed(),
            applied_seq=self._core.applied_seq,
        )
        while True:
            sent_ns = time.monotonic_ns()
            try:
                await self._reports.send(message)
                break
            except (KafkaError, OSError, TimeoutError) as error:
                self._log.warning("the node cannot be announced yet", error=repr(error))
                await asyncio.sleep(0.5)
        self._supervisor.perform(self._core.heartbeat_acknowledged(sent_ns, time.monotonic_ns()))

    async def _announcements(self) -> None:
        while True:
            await asyncio.sleep(_ANNOUNCE_S)
            await self._announce()

    async def _read(self) -> None:
        def handle(envelope: Envelope[StartAttempt | StopAttempt | ResumeAttempt]) -> None:
            command = envelope.message
            if command.node != self._node:
                return
            if command.incarnation > self._incarnation:
                raise SupersededError(f"node {self._node} has a newer agent, incarnation {command.incarnation}")
            now_ns = time.monotonic_ns()
            self._log.info("command", type=type(command).__name__, job_uid=command.job_uid, command_seq=command.command_seq)
            self._supervisor.perform(self._core.command(command, now_ns=now_ns, broker_ms=self._clock.now_ms(), traceparent=envelope.traceparent))

        await self._commands.run(handle)

    async def _beats(self) -> None:
        """Heartbeats: at an interval, and soon after a phase has changed. The exporter, which readiness asks for, starts after the first."""
        interval_s = self._settings.agent.heartbeat_interval_s
        ready = False
        while True:
            sent_ns = time.monotonic_ns()
            self._beat.clear()
            try:
                await self._reports.send(self._core.heartbeat())
            except (KafkaError, OSError, TimeoutError) as error:
                self._log.warning("a heartbeat was not acknowledged", error=repr(error))
                await asyncio.sleep(0.5)
                continue
            now_ns = time.monotonic_ns()
            observability.HEARTBEAT_SECONDS.observe((now_ns - sent_ns) / 1e9)
            self._supervisor.perform(self._core.heartbeat_acknowledged(sent_ns, now_ns))
            if not ready:
                start_exporter(self._settings.agent.metrics_port)
                ready = True
            await asyncio.sleep(_BEAT_SPACING_S)
            try:
                async with asyncio.timeout(max(0.0, interval_s - _BEAT_SPACING_S)):
                    await self._beat.wait()
            except TimeoutError:
                continue

    async def _ticks(self) -> None:
        while True:
            self._supervisor.tick()
            observability.RECORDS_DROPPED.set(self._bulk.dropped)
            await asyncio.sleep(_TICK_S)
