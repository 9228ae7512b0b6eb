"""The ingress as a process: a plain consumer group over the public topic and the tenants' own, one batch at a time, committed when everything about it is written.

A failed send or commit ends the process; a supervisor starts it again, and the batch is read again. Several may run: the group shares the partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError
from fastapi import FastAPI
from opentinker.compose.runtime.http import add_health, add_problem_handlers, metrics_response, serve
from opentinker.compose.runtime.http_middleware import HttpShell, host_names
from opentinker.compose.runtime.kafka import consumer, input_record, producer, wait_for_broker
from opentinker.compose.runtime.metrics import gauge
from opentinker.compose.runtime.secrets import read_secret
from opentinker.compose.runtime.settings import Settings
from opentinker.schemas.access import INGRESS_GROUP

from ..core.requests import Authority
from ..core.signature import BOOTSTRAP_KEY_ID
from ..environments import known_environments
from ..limits import QueueLimits
from ..live import LiveFeed
from .doors import Doors
from .handler import RequestHandler

__all__ = ["main"]

_START_TIMEOUT_S = 60.0
_VIEW_TIMEOUT_S = 30.0
_POLL_MS = 200
_BATCH = 100  # requests at a time: even 100 manifests of 64 KiB are handled far within the 2 s in which a reply is due
_ASSIGNED = gauge("ingress_partitions", "Partitions of request topics that this process reads")


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop`."""
    authority = Authority(
        keys={BOOTSTRAP_KEY_ID: read_secret(settings.api_key_file, "API key")}, trusted_namespaces=frozenset(settings.ingress.trusted_namespaces)
    )
    environments = known_environments()
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(_producer(settings))
        membership, doors = _Membership(), Doors(settings)
        await doors.look()
        reader = await stack.enter_async_context(_consumer(settings, doors, membership))
        feed = LiveFeed(settings.kafka, "ingress-view", tails=False)
        tasks = [asyncio.create_task(feed.run())]
        stack.push_async_callback(_end, tasks)
        if settings.ingress.metrics_port:
            tasks.append(asyncio.create_task(serve(_probe_app(feed, membership), "127.0.0.1", settings.ingress.metrics_port, stop)))
        await _view_complete(feed, stop)
        # No proxies from the environment: the replica is named by settings.
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        limits = QueueLimits(http, settings.scheduler.replica_url, authority.keys[BOOTSTRAP_KEY_ID])
        tasks.append(asyncio.create_task(limits.run()))
        handler = RequestHandler(
            partitions=settings.kafka.partitions, authority=authority, environments=environments, feed=feed, limits=limits, producer=sender
        )
        structlog.get_logger().info("ingress started", trusted_namespaces=sorted(authority.trusted_namespaces), topics=doors.topics)
        await _answer_until(stop, reader, handler, doors, membership)


async def _answer_until(stop: asyncio.Event, reader: AIOKafkaConsumer, handler: RequestHandler, doors: Doors, membership: _Membership) -> None:
    while not stop.is_set():
        if await doors.look():
            reader.subscribe(doors.topics, listener=membership)
        found = await reader.getmany(timeout_ms=_POLL_MS, max_records=_BATCH)
        records = [input_record(record) for batch in found.values() for record in batch]
        if not records:
            continue
        await handler.handle(records)
        try:
            await reader.commit({place: batch[-1].offset + 1 for place, batch in found.items() if batch})
        except (CommitFailedError, IllegalStateError) as error:
            # The partition moved to another member, which reads the batch again: the same jobs, the same answers.
            structlog.get_logger().warning("commit came after a rebalance", error=repr(error))


async def _view_complete(feed: LiveFeed, stop: asyncio.Event) -> None:
    """Wait for the view of jobs, so that a repeated id and a used name are seen; go on without it after a bound: the scheduler judges names too."""
    waits = [asyncio.create_task(feed.caught_up.wait()), asyncio.create_task(stop.wait())]
    done, pending = await asyncio.wait(waits, timeout=_VIEW_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if not done:
        structlog.get_logger().warning("the view of jobs is not complete; names are judged by the scheduler alone until it is")


class _Membership(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Whether the group has told this process what it reads, be it nothing because others read it all."""

    def __init__(self) -> None:
        self.joined = False

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        self.joined = False

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self.joined = True
        _ASSIGNED.set(len(assigned))
        structlog.get_logger().info("partitions assigned", partitions=sorted(place.partition for place in assigned))


def _probe_app(feed: LiveFeed, membership: _Membership) -> HttpShell:
    app = FastAPI(title="OpenTinker ingress", docs_url=None, redoc_url=None, openapi_url=None)
    add_problem_handlers(app)

    async def probe() -> dict[str, str]:
        try:
            async with asyncio.timeout(3):
                await feed.answers()
        except Exception as error:
            return {"kafka": f"does not answer ({type(error).__name__})"}
        return {"kafka": "ok", "group": "ok" if membership.joined else "has not joined yet"}

    add_health(app, "ingress", probe)
    app.add_api_route("/metrics", metrics_response, methods=["GET"])
    return HttpShell(app, hosts=host_names(), body_bytes_max=1024)


@contextlib.asynccontextmanager
async def _producer(settings: Settings) -> AsyncIterator[AIOKafkaProducer]:
    async def start() -> AIOKafkaProducer:
        made = producer(settings.kafka, "ingress")
        try:
            await made.start()
        except BaseException:
            await made.stop()
            raise
        return made

    sender = await wait_for_broker(start, _START_TIMEOUT_S)
    try:
        yield sender
    finally:
        with contextlib.suppress(Exception):
            await sender.stop()


@contextlib.asynccontextmanager
async def _consumer(settings: Settings, doors: Doors, membership: _Membership) -> AsyncIterator[AIOKafkaConsumer]:
    reader = consumer(settings.kafka, "ingress", INGRESS_GROUP)
    reader.subscribe(doors.topics, listener=membership)
    await reader.start()
    try:
        yield reader
    finally:
        with contextlib.suppress(Exception):
            await reader.stop()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
