"""PostgreSQL as the registry opens it: a bounded pool, JSON as Python values, waiting a bounded time for a server that is just starting."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
from opentinker.compose.runtime.settings import PostgresSettings

__all__ = ["connect", "open_pool"]

_START_TIMEOUT_S = 30.0
_COMMAND_TIMEOUT_S = 15.0


async def _prepare(connection: Any) -> None:
    await connection.set_type_codec("jsonb", encoder=_encode, decoder=json.loads, schema="pg_catalog")


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


async def open_pool(settings: PostgresSettings, *, service: str, wait_s: float = _START_TIMEOUT_S, lazy: bool = False) -> Any:
    """A pool of connections. Raises the driver's last error if the server does not answer within `wait_s`; a lazy one connects when it is asked."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        try:
            return await asyncpg.create_pool(
                settings.dsn.get_secret_value(),
                min_size=0 if lazy else 1,
                max_size=settings.pool_size_max,
                command_timeout=_COMMAND_TIMEOUT_S,
                init=_prepare,
                server_settings={"application_name": f"opentinker-{service}"},
            )
        except (OSError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError, TimeoutError):
            if loop.time() > deadline:
                raise
            await asyncio.sleep(0.3)


async def connect(settings: PostgresSettings, *, service: str) -> Any:
    """One connection of its own, for locks that last as long as it does."""
    connection = await asyncpg.connect(
        settings.dsn.get_secret_value(), command_timeout=_COMMAND_TIMEOUT_S, server_settings={"application_name": f"opentinker-{service}"}
    )
    await _prepare(connection)
    return connection
