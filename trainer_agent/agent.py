"""One agent: announces its node, takes commands, beats, and ends with its trainers. `run_agent` reads from top to bottom."""

from __future__ import annotations

import asyncio
import contextlib
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
from opentinker.schemas.messages.placements import RefuseAgent
from opentinker.schemas.messages.reports import AgentStarted, NodeCapacity, Taint
from opentinker.schemas.records import Envelope
from opentinker.trainer_agent import observability
from opentinker.trainer_agent.bus import BrokerClock, BulkSender, Command, Commands, Reports
from opentinker.trainer_agent.capacity import capacity_of, port_range
from opentinker.trainer_agent.core.agent import AgentCore, AgentRules
from opentinker.trainer_agent.journal import FolderError, Journal
from opentinker.trainer_agent.processes import boot_id
from opentinker.trainer_agent.registry_client import RefusedError, RegistryError, UnauthorizedError, check_token
from opentinker.trainer_agent.supervisor import Supervisor

__all__ = ["run_agent"]

_TICK_S = 0.1
_ANNOUNCE_S = 60.0
_ANNOUNCE_REFUSED_S = 3.0  # as long as another agent has the node's name
_REFUSED_S = 10.0  # after the newest refusal; the scheduler repeats it every four seconds
_GOODBYE_S = 2.0  # for each of the two heartbeats with which an agent ends
_BEAT_SPACING_S = 0.05  # phases that change together share a heartbeat
_BROKER_WAIT_S = 120.0  # at start, before the supervisor's next try
_REGISTRY_WAIT_S, _REGISTRY_RETRY_S = 120.0, 0.5  # then the node is announced without it: what cannot start costs no job a retry
_STOP_GRACE_S = 12.0  # of the 20 s that a service has to stop
_STOP_WAIT_S = 15.0


async def run_agent(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop`, then end the trainers with a checkpoint."""
    node = settings.agent.node or platform.node().lower()
    directory = settings.agent.directory or settings.home / "agents" / node
    try:
        journal = Journal(directory, boot_id())
    except FolderError as error:
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
        self._incarnation, self._previous = journal.next_incarnation(time.time_ns() // 1_000_000, secrets.token_hex(4))
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
        self._refused_until = 0.0  # of the monotonic clock
        self._refused = asyncio.Event()
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
            give_up=self._give_up,
        )
        self._unfit = ""  # why this node can start nothing any more
        self._log = structlog.get_logger()

    async def run(self) -> None:
        # 1. From here on no command is missed; what came before is the scheduler's to heal.
        await wait_for_broker(self._commands.open, _BROKER_WAIT_S)
        # 2. Settle what an earlier incarnation left, before the node offers anything.
        await self._supervisor.start()
        # 3. What cannot begin here is not offered; what already runs does not wait for that.
        if not self._core.parts:
            await self._find_registry()
        # 4. Announce the node. The scheduler's half of the lease begins with it, and so does ours.
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
            if self._unfit:
                raise SettingsError(self._unfit)
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._supervisor.stop()
            for part in (self._commands, self._reports, self._bulk):
                await part.close()
            await self._http.aclose()

    async def _find_registry(self) -> None:
        """Wait until the registry answers and accepts this agent's token. Raises SettingsError if it does not accept it."""
        warned, deadline = False, time.monotonic() + _REGISTRY_WAIT_S
        while not self._stop.is_set() and time.monotonic() < deadline:
            try:
                await check_token(self._http)
                return
            except (UnauthorizedError, RefusedError) as error:
                raise SettingsError(self._not_accepted(str(error))) from None
            except RegistryError as error:
                if not warned:
                    self._log.warning("the registry does not answer; this node takes no work before it does", error=str(error))
                warned = True
            await asyncio.sleep(_REGISTRY_RETRY_S)

    def _give_up(self, message: str) -> None:
        self._unfit = self._not_accepted(message)
        self._stop.set()

    def _not_accepted(self, message: str) -> str:
        own = self._settings
        return f"the registry at {own.registry.url} does not accept this agent ({message}); set OPENTINKER_REGISTRY__URL to this system's registry, and the token in {own.agent_token_file} to its agent token"  # noqa: E501

    async def _end_trainers(self) -> None:
        """Checkpoints, last words and reports, within what a service has to stop. The scheduler hears of it first, so that it costs no job a retry."""
        deadline = time.monotonic() + _STOP_WAIT_S
        self._core.stopping = True
        await self._say_goodbye()
        self._supervisor.perform(self._core.stop_all(time.monotonic_ns(), _STOP_GRACE_S))
        while self._core.parts and time.monotonic() < deadline:  # noqa: ASYNC110 (the tick loop brings the change)
            await asyncio.sleep(_TICK_S)
        await self._bulk.flush(2.0)
        await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        """One heartbeat that says that this agent ends. Without Kafka it goes unsaid, and the lease runs out."""
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._reports.send(self._core.heartbeat())
        except (KafkaError, OSError, TimeoutError) as error:
            self._log.warning("the scheduler could not be told that this agent ends", error=repr(error))

    async def _announce(self) -> None:
        own = self._settings.agent
        message = AgentStarted(
            node=self._node,
            incarnation=self._incarnation,
            previous_incarnation=self._previous,
            pool=own.pool,
            boot_id=boot_id(),
            agent_version=metadata.version("opentinker"),
            capacity=self._capacity,
            labels=own.labels,
            taints=tuple(Taint(key=key, value=value) for key, value in sorted(own.taints.items())),
            address=own.advertise_address,
            port_low=self._ports[0],
            port_high=self._ports[1],
            lease_timeout_ms=self._lease_ns // 1_000_000,
            adopted=self._core.listed(),
            applied_seq=self._core.applied_seq,
            sequence=self._core.sequence,
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
        """The node is announced again: every minute, and every few seconds while another agent has its name."""
        while True:
            if time.monotonic() < self._refused_until:
                await asyncio.sleep(_ANNOUNCE_REFUSED_S)
            else:
                self._refused.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ANNOUNCE_S):
                        await self._refused.wait()
                        continue
            await self._announce()

    async def _read(self) -> None:
        def handle(envelope: Envelope[Command]) -> None:
            command = envelope.message
            if command.node != self._node:
                return
            if isinstance(command, RefuseAgent):
                self._stand_aside(command)
                return
            now_ns = time.monotonic_ns()
            self._log.info("command", type=type(command).__name__, job_uid=command.job_uid, command_seq=command.command_seq)
            self._supervisor.perform(self._core.command(command, now_ns=now_ns, broker_ms=self._clock.now_ms(), traceparent=envelope.traceparent))

        await self._commands.run(handle)

    def _stand_aside(self, refusal: RefuseAgent) -> None:
        """The node's name is another agent's: end what runs here, and ask again until that agent is gone."""
        if refusal.incarnation != self._incarnation:
            return
        if time.monotonic() >= self._refused_until:
            self._log.error(
                "another agent is this node; give one of them another OPENTINKER_AGENT__NODE, or stop it: this one waits until it is gone",
                node=self._node, held_by=refusal.held_by, held_at=refusal.held_at,
            )  # fmt: skip
        self._refused_until = time.monotonic() + _REFUSED_S
        self._refused.set()
        self._supervisor.perform(self._core.stop_all(time.monotonic_ns(), _STOP_GRACE_S))

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
