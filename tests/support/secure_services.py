"""Every service as a process under its own user, on the secure broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import httpx
from ports import free_port
from scheduler_process import Worker
from secure_access import Access

__all__ = ["API_KEY", "everything", "own_database"]

API_KEY = "otk_test_0123456789abcdef0123456789abcdef"


async def own_database(dsn: str) -> str:
    """Offsets of projections belong to one Kafka, so this one has a database of its own."""
    name = f"access_{uuid.uuid4().hex[:8]}"
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return f"{dsn.rpartition('/')[0]}/{name}"


@contextlib.asynccontextmanager
async def service(module: str, environment: dict[str, str], port: int, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """One of our services until it is ready; a client of its HTTP side."""
    with log.open("wb") as output:
        child = subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=output, stderr=output)  # noqa: ASYNC220
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=10
        ) as http:
            deadline = time.monotonic() + 90
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/ready")).status_code == 200:
                        break
                assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]  # noqa: PT018, ASYNC240
                await asyncio.sleep(0.1)
            yield http
    finally:
        child.terminate()
        assert await asyncio.to_thread(child.wait, 30) == 0
    text = log.read_text()  # noqa: ASYNC240
    assert "Traceback" not in text, text[max(0, text.index("Traceback") - 500) :][:4000]


@contextlib.asynccontextmanager
async def everything(
    stack: Any, granted: Access, home: Path, namespaces: Sequence[str], trusted: Sequence[str] = ()
) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """Scheduler, replica, ingress, registry and gateway, each as its own user; HTTP clients by name. One that ends before its time fails the test.

    `stack` lends its PostgreSQL and its S3, in which this Kafka has a database and a bucket of its own.
    """
    key = home / "api-key"
    key.write_text(API_KEY + "\n")
    key.chmod(0o600)
    ports = {name: free_port() for name in ("replica", "ingress", "registry", "gateway")}
    common = {
        "OPENTINKER_POSTGRES__DSN": await own_database(stack.settings.postgres.dsn.get_secret_value()),
        "OPENTINKER_S3__BUCKET": f"access-{uuid.uuid4().hex[:8]}",
        "OPENTINKER_GATEWAY__API_KEY_FILE": str(key),
        "OPENTINKER_SCHEDULER__REPLICA_PORT": str(ports["replica"]),
        "OPENTINKER_SCHEDULER__REPLICA_URL": f"http://127.0.0.1:{ports['replica']}",
        "OPENTINKER_INGRESS__METRICS_PORT": str(ports["ingress"]),
        "OPENTINKER_INGRESS__NAMESPACES": json.dumps(list(namespaces)),
        "OPENTINKER_INGRESS__TRUSTED_NAMESPACES": json.dumps(list(trusted)),
        "OPENTINKER_REGISTRY__PORT": str(ports["registry"]),
        "OPENTINKER_REGISTRY__URL": f"http://127.0.0.1:{ports['registry']}",
        "OPENTINKER_GATEWAY__PORT": str(ports["gateway"]),
        "OPENTINKER_GATEWAY__URL": f"http://127.0.0.1:{ports['gateway']}",
    }
    modules = {
        "replica": "opentinker.scheduler_stream.replica",
        "ingress": "opentinker.producers.ingress",
        "registry": "opentinker.registry",
        "gateway": "opentinker.producers.gateway",
    }
    worker = Worker(stack.environment(**common, **granted.variables("scheduler")), home / "scheduler.log")
    try:
        async with contextlib.AsyncExitStack() as services:
            yield {
                name: await services.enter_async_context(
                    service(module, stack.environment(**common, **granted.variables(name)), ports[name], home / f"{name}.log")
                )
                for name, module in modules.items()
            }
    finally:
        assert worker.stop() == 0
