"""The gateway as a process. It starts without waiting for anyone: what is away is said by `/ready` and by 503s, and comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
from opentinker.compose.runtime.http import serve
from opentinker.compose.runtime.secrets import read_secret
from opentinker.compose.runtime.settings import Settings
from opentinker.registry.read import open_read_side

from ..environments import known_environments
from ..limits import QueueLimits
from ..live import LiveFeed
from ..writer import CommandWriter
from .app import build_app
from .context import GatewayContext

__all__ = ["main"]


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop`."""
    key = read_secret(settings.api_key_file, "API key")
    async with contextlib.AsyncExitStack() as stack:
        feed = LiveFeed(settings.kafka, "gateway-view", tails=True)
        writer = CommandWriter(settings.kafka, "gateway")
        writer.start()
        stack.push_async_callback(writer.close)
        reading = asyncio.create_task(feed.run())
        stack.push_async_callback(_end, reading)
        read = await open_read_side(settings.postgres, service="gateway")
        stack.push_async_callback(read.close)
        # No proxies from the environment: neighbours are named by settings.
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        limits = QueueLimits(http, settings.scheduler.replica_url, key)
        asking = asyncio.create_task(limits.run())
        stack.push_async_callback(_end, asking)
        context = GatewayContext(
            settings=settings,
            feed=feed,
            writer=writer,
            read=read,
            http=http,
            environments=known_environments(),
            api_key=key,
            limits=limits,
            registry_token=_registry_token(settings),
            stop=stop,
        )
        await serve(build_app(context), settings.gateway.host, settings.gateway.port, stop)


def _registry_token(settings: Settings) -> str | None:
    """The token for the registry, if this gateway was given one. A file that others can read is an error, a missing one is not."""
    if not settings.agent_token_file.exists():
        return None
    return read_secret(settings.agent_token_file, "registry's agent token")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
