"""The registry as a process, and its migrations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from opentinker.registry.errors import MigrationError
from opentinker.registry.migrate import Migration, migrate, read_migrations
from ports import free_port

from .conftest import Registry


async def test_migrations_are_applied_once_and_by_one(registry: Registry) -> None:
    connections = [await asyncpg.connect(registry.dsn) for _ in range(3)]
    try:
        assert await asyncio.gather(*(migrate(connection) for connection in connections)) == [[], [], []]
        extra = Migration(number=len(read_migrations()) + 1, name="9999_extra.sql", sql="CREATE TABLE extra (id integer)")
        with_extra = [*read_migrations(), extra]
        applied = await asyncio.gather(*(migrate(connection, with_extra) for connection in connections))
        assert sorted(applied) == [[], [], ["9999_extra.sql"]]
        with pytest.raises(MigrationError, match=r"9999_extra\.sql, which this release does not know"):
            await migrate(connections[0])
        changed = Migration(number=extra.number, name=extra.name, sql=extra.sql + " -- changed")
        with pytest.raises(MigrationError, match="was changed after it was applied"):
            await migrate(connections[0], [*read_migrations(), changed])
        broken = Migration(number=extra.number + 1, name="broken.sql", sql="CREATE TABLE half (id integer); SELECT 1 / 0")
        with pytest.raises(asyncpg.PostgresError):
            await migrate(connections[0], [*with_extra, broken])
        assert await connections[0].fetchval("SELECT to_regclass('half')") is None
    finally:
        await connections[0].execute("DROP TABLE IF EXISTS extra; DELETE FROM schema_migrations WHERE name = '9999_extra.sql'")
        for connection in connections:
            await connection.close()


@contextlib.asynccontextmanager
async def process(stack: Any, registry: Registry, token_file: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = stack.environment(
        OPENTINKER_REGISTRY__PORT=str(port), OPENTINKER_REGISTRY__AGENT_TOKEN_FILE=str(token_file), OPENTINKER_POSTGRES__DSN=registry.dsn,
        OPENTINKER_S3__BUCKET=f"service-{uuid.uuid4().hex[:8]}",
    )  # fmt: skip
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "opentinker.registry", env=environment, stderr=asyncio.subprocess.PIPE, cwd=str(token_file.parent)
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def ready(http: httpx.AsyncClient, child: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.returncode is None:
        with contextlib.suppress(httpx.HTTPError):
            if (await http.get("/ready")).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise AssertionError("the registry did not become ready")


async def test_the_process_serves_and_stops_cleanly(stack: Any, registry: Registry, tmp_path: Path) -> None:
    token_file, port = tmp_path / "token", free_port()
    token_file.write_text("0123456789abcdef-token\n")
    token_file.chmod(0o600)
    async with process(stack, registry, token_file, port) as child, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        await ready(http, child)
        authority = {"Authorization": "Bearer 0123456789abcdef-token"}
        assert (await http.get("/v1/models", headers=authority)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        metrics = (await http.get("/metrics")).text
        assert "opentinker_registry_projection_lag" in metrics
        child.terminate()
        _, errors = await asyncio.wait_for(child.communicate(), 30)
        assert child.returncode == 0, errors.decode()
        assert b"Traceback" not in errors


@pytest.mark.parametrize("mode", [0o640, 0o604])
async def test_a_token_that_others_can_read_keeps_it_from_starting(stack: Any, registry: Registry, tmp_path: Path, mode: int) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef-token\n")
    os.chmod(token_file, mode)
    async with process(stack, registry, token_file, free_port()) as child:
        _, errors = await asyncio.wait_for(child.communicate(), 30)
        assert child.returncode == 2
        assert b"chmod 600" in errors
        assert b"Traceback" not in errors
