"""A registry on the real stack: a database and a bucket of its own for the run, the HTTP application in this process, uploads straight to S3."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import httpx
import pytest
from opentinker.compose.runtime.settings import PostgresSettings, S3Settings
from opentinker.registry.blobs import BlobStore, open_blob_store
from opentinker.registry.database import open_pool
from opentinker.registry.http.app import build_app
from opentinker.registry.migrate import migrate
from pydantic import SecretStr

AGENT_TOKEN = "agent-token-of-the-tests"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def contents(seed: str = "a") -> dict[str, bytes]:
    """A small checkpoint's files."""
    return {name: f"{name} {seed}".encode() * 40 for name in ("weights.safetensors", "optimizer.safetensors", "state.json")}


@dataclass
class Registry:
    """A client of one registry, with short words for the calls."""

    http: httpx.AsyncClient
    pool: Any
    blobs: BlobStore
    wake: asyncio.Event
    store: httpx.AsyncClient
    dsn: str = ""
    faults: dict[str, str] = field(default_factory=dict)

    async def open(self, job_uid: str, attempt: int = 1, epoch: int = 1, node: str = "node-1", **changes: Any) -> httpx.Response:
        body = {
            "job_uid": job_uid, "namespace": "default", "attempt_number": attempt, "lease_epoch": epoch, "node": node, "world_size": 4,
            "spec_digest": "sha256:" + "0" * 64, "model_name": "cartpole-v1",
        } | changes  # fmt: skip
        return await self.http.post("/v1/attempts/open", json=body, headers={"Authorization": f"Bearer {AGENT_TOKEN}"})

    async def token(self, job_uid: str, attempt: int = 1, epoch: int = 1, node: str = "node-1", **changes: Any) -> str:
        answer = await self.open(job_uid, attempt, epoch, node, **changes)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["attempt_token"])

    async def post(self, token: str, path: str, body: Any) -> httpx.Response:
        return await self.http.post(path, json=body, headers={"Authorization": f"Bearer {token}"})

    async def begin(self, token: str, checkpoint_id: str, files: dict[str, bytes], step: int = 100) -> httpx.Response:
        described = [{"name": name, "size": len(data), "sha256": sha(data)} for name, data in files.items()]
        return await self.post(token, "/v1/checkpoints/begin", {"checkpoint_id": checkpoint_id, "global_step": step, "files": described})

    async def upload(self, begun: httpx.Response, files: dict[str, bytes]) -> list[dict[str, Any]]:
        """Send every part; returns the files of the commit."""
        assert begun.status_code == 200, begun.text
        committed = []
        for entry in begun.json()["uploads"]:
            data, parts, start = files[entry["name"]], [], 0
            for part in entry["parts"]:
                answer = await self.store.put(part["url"], content=data[start : start + part["size"]])
                assert answer.status_code == 200, answer.text
                parts.append({"number": part["number"], "etag": answer.headers["etag"]})
                start += part["size"]
            committed.append({"name": entry["name"], "size": len(data), "sha256": sha(data), "parts": parts})
        return committed

    async def commit(self, token: str, checkpoint_id: str, files: list[dict[str, Any]], **members: Any) -> httpx.Response:
        return await self.post(token, f"/v1/checkpoints/{checkpoint_id}/commit", {"files": files} | members)

    async def save(self, token: str, checkpoint_id: str, step: int = 100, seed: str = "a", **members: Any) -> httpx.Response:
        """Begin, upload and commit."""
        files = contents(seed)
        uploaded = await self.upload(await self.begin(token, checkpoint_id, files, step), files)
        return await self.commit(token, checkpoint_id, uploaded, **members)

    async def get(self, path: str, token: str = AGENT_TOKEN) -> httpx.Response:
        return await self.http.get(path, headers={"Authorization": f"Bearer {token}"})

    async def objects(self, job_uid: str) -> list[str]:
        return [key async for key in self.blobs.keys_below(f"checkpoints/default/{job_uid}/")]


def new_uid() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def job_uid() -> str:
    return new_uid()


@pytest.fixture(scope="session")
async def registry(stack: Any) -> AsyncIterator[Registry]:
    async with registry_on(stack.settings.postgres.dsn.get_secret_value(), stack.settings.s3) as made:
        yield made


@asynccontextmanager
async def registry_on(server_dsn: str, store_settings: S3Settings) -> AsyncIterator[Registry]:
    """A registry with a fresh database on a server and a fresh bucket in a store."""
    name = f"registry_{uuid.uuid4().hex[:8]}"
    admin = await asyncpg.connect(server_dsn)
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
    dsn = _with_database(server_dsn, name)
    postgres = PostgresSettings(dsn=SecretStr(dsn), pool_size_max=8)
    s3 = store_settings.model_copy(update={"bucket": name.replace("_", "-")})
    pool = await open_pool(postgres, service="test")
    async with pool.acquire() as connection:
        await migrate(connection)
    async with open_blob_store(s3) as blobs, httpx.AsyncClient(trust_env=False, timeout=30) as store:
        await blobs.ensure_bucket()
        wake, faults = asyncio.Event(), dict[str, str]()
        app = build_app(pool, blobs, agent_token=AGENT_TOKEN, hosts=("registry.test",), wake=wake, faults=lambda: faults)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://registry.test") as http:
            yield Registry(http=http, pool=pool, blobs=blobs, wake=wake, store=store, dsn=dsn, faults=faults)
    await pool.close()


def _with_database(dsn: str, name: str) -> str:
    head, _, tail = dsn.partition("?")
    return head.rpartition("/")[0] + "/" + name + (f"?{tail}" if tail else "")
