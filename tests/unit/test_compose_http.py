"""The shell around the HTTP services, with an app as they make it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from opentinker.compose.runtime.http import add_problem_handlers
from opentinker.compose.runtime.http_middleware import HttpShell, host_names

LIMIT = 1000


def shell() -> HttpShell:
    app = FastAPI()
    add_problem_handlers(app)

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    return HttpShell(app, hosts=host_names(), body_bytes_max=LIMIT)


async def in_chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"a" * 100


@pytest.mark.parametrize(("chunks", "status"), [(10, 200), (11, 413)])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_is_bounded_whether_or_not_its_length_is_announced(chunks: int, status: int, announced: bool) -> None:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(shell()), base_url="http://localhost") as http:
            return await http.post("/size", content=b"a" * 100 * chunks if announced else in_chunks(chunks))

    answer = asyncio.run(run())
    assert answer.status_code == status, answer.text
    if status == 413:
        assert answer.json()["errors"][0]["remedy"] == "send a smaller document"


@pytest.mark.parametrize(("size", "status"), [(60_000, 200), (70_000, 431)])
async def test_headers_are_bounded_however_they_arrive(size: int, status: int) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(shell()), base_url="http://localhost") as http:
        answer = await http.post("/size", content=b"a", headers={f"x-{number}": "y" * 990 for number in range(size // 1000)})
    assert answer.status_code == status, answer.text
