"""The registry as a process: migrate, then answer HTTP, project topics, publish the outbox and collect what is left over.

Background work is kept alive: a task that fails is started again after a pause, and `/ready` says so meanwhile. Several registries may run; one at a time
(holder of a database lock) does the background work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from opentinker.compose.runtime.http import serve
from opentinker.compose.runtime.kafka import producer as make_producer
from opentinker.compose.runtime.kafka import wait_for_broker
from opentinker.compose.runtime.metrics import counter
from opentinker.compose.runtime.secrets import read_secret
from opentinker.compose.runtime.settings import Settings

from .blobs import open_blob_store
from .collector import Bounds, run_collector
from .database import connect, open_pool
from .http.app import build_app
from .migrate import migrate
from .outbox import run_publisher
from .projections import run_projections

__all__ = ["main"]

_START_TIMEOUT_S = 60.0
_PAUSE_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # after the first, second, … failure in a row
_LEADER_LOCK = 0x6F70656E_0002
_FAILURES = counter("registry_background_failures_total", "Failures of background work", ("task",))


class Keeper:
    """Runs work for ever, restarting what fails; knows what is down."""

    def __init__(self) -> None:
        self.down: dict[str, str] = {}

    async def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        _FAILURES.labels(name)
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began = loop.time()
            healthy = loop.call_later(5.0, self.down.pop, name, None)  # it has run for a while: no longer down
            try:
                await work()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                failures = 1 if loop.time() - began > 60 else failures + 1
                _FAILURES.labels(name).inc()
                self.down[name] = f"failed ({type(error).__name__}), starting again"
                structlog.get_logger().warning("background work failed", task=name, exc_info=error)
                await asyncio.sleep(_PAUSE_S[min(failures, len(_PAUSE_S)) - 1])
            finally:
                healthy.cancel()


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop`."""
    agent_token = read_secret(settings.agent_token_file, "registry's agent token")
    async with contextlib.AsyncExitStack() as stack:
        pool = await open_pool(settings.postgres, service="registry", wait_s=_START_TIMEOUT_S)
        stack.push_async_callback(pool.close)
        async with pool.acquire() as connection:
            await migrate(connection)
        blobs = await stack.enter_async_context(open_blob_store(settings.s3))
        await _eventually(blobs.ensure_bucket)
        keeper, wake = Keeper(), asyncio.Event()

        async def project() -> None:
            async with _producer(settings) as producer:
                await run_projections(settings.kafka, pool, producer)

        async def publish() -> None:
            async with _producer(settings) as producer:
                await run_publisher(pool, producer, wake)

        async def lead() -> None:
            async with _leadership(settings) as connection, asyncio.TaskGroup() as group:
                group.create_task(keeper.keep("projections", project))
                group.create_task(keeper.keep("outbox", publish))
                group.create_task(keeper.keep("collector", lambda: run_collector(pool, blobs, Bounds())))
                group.create_task(_hold(connection))

        task = asyncio.create_task(keeper.keep("leadership", lead))
        stack.push_async_callback(_end, task)
        hosts = (settings.registry.host, settings.registry.url.split("//")[-1].partition(":")[0].partition("/")[0])
        app = build_app(pool, blobs, agent_token=agent_token, hosts=hosts, wake=wake, faults=lambda: dict(keeper.down))
        await serve(app, settings.registry.host, settings.registry.port, stop)


@contextlib.asynccontextmanager
async def _leadership(settings: Settings) -> AsyncIterator[Any]:
    """The connection that holds the leader's lock, once this process has it."""
    connection = await connect(settings.postgres, service="registry-leader")
    try:
        while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _LEADER_LOCK):  # noqa: ASYNC110 the holder is another process
            await asyncio.sleep(1.0)
        yield connection
    finally:
        await connection.close(timeout=2)


async def _hold(connection: Any) -> None:
    """Fails when the connection does, since the lock is gone with it."""
    while True:
        await connection.execute("SELECT 1", timeout=5)
        await asyncio.sleep(2.0)


async def _eventually(ask: Callable[[], Awaitable[None]]) -> None:
    """Repeat while a store is just starting; raises its last error after a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_TIMEOUT_S
    while True:
        try:
            return await ask()
        except Exception:
            if loop.time() > deadline:
                raise
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def _producer(settings: Settings) -> AsyncIterator[AIOKafkaProducer]:
    """A producer of its own for each piece of work: an idempotent producer that has failed does not recover."""

    async def start() -> AIOKafkaProducer:
        sender = make_producer(settings.kafka, "registry")
        try:
            await sender.start()
        except BaseException:
            await sender.stop()
            raise
        return sender

    sender = await wait_for_broker(start, _START_TIMEOUT_S)
    try:
        yield sender
    finally:
        with contextlib.suppress(Exception):
            await sender.stop()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
