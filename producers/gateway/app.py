"""The gateway's application: routes, the page, health, and the shell around them."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Awaitable, Callable
from importlib import resources

import asyncpg
import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from opentinker.compose.runtime.http import add_health, add_problem_handlers, metrics_response, problem
from opentinker.compose.runtime.http_middleware import HttpShell, host_names
from opentinker.schemas.manifest import MANIFEST_BYTES_MAX
from starlette.types import ASGIApp

from .cluster import cluster_routes
from .context import GatewayContext
from .guard import KeyGuard, no_unknown_parameters
from .jobs import job_routes
from .streams import stream_routes
from .submit import submit_routes

__all__ = ["build_app", "page_files"]

_TIMEOUT_S = 20.0
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def page_files() -> dict[str, tuple[bytes, str]]:
    """What an anonymous browser may fetch, by path: (bytes, content type). It holds no data and no client id."""
    files: dict[str, tuple[bytes, str]] = {}
    for entry in resources.files("opentinker.producers.page").iterdir():
        kind = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}.get(
            entry.name.rpartition(".")[2], mimetypes.guess_type(entry.name)[0] or ""
        )
        if entry.name.rpartition(".")[2] in {"html", "js", "css", "svg"}:
            files["/" if entry.name == "index.html" else f"/page/{entry.name}"] = (entry.read_bytes(), kind)
    return files


def build_app(context: GatewayContext) -> ASGIApp:
    app = FastAPI(
        title="OpenTinker gateway",
        version="1",
        description="Submit, watch and cancel training jobs. Every request but the page, /health and /ready needs `Authorization: Bearer KEY`.",
        docs_url=None,  # its page loads scripts from a foreign host
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(no_unknown_parameters)],
    )
    add_problem_handlers(app)
    _add_history_handlers(app)
    for router in (stream_routes(context), submit_routes(context), job_routes(context), cluster_routes(context)):
        app.include_router(router)

    async def probe() -> dict[str, str]:
        return {"kafka": await _kafka(context), "writer": "ok" if context.writer.up else "cannot write to Kafka"}

    add_health(app, "gateway", probe)
    app.add_api_route("/metrics", metrics_response, methods=["GET"], include_in_schema=False)
    files = page_files()
    for path, (content, kind) in files.items():
        app.add_api_route(path, _file(content, kind), methods=["GET", "HEAD"], include_in_schema=False)
    settings = context.settings.gateway
    hosts = host_names(settings.host, settings.url.partition("//")[2].partition("/")[0].partition(":")[0], *settings.hosts)
    guarded = KeyGuard(app, key=context.api_key, open_paths={"/health", "/ready", *files})
    return HttpShell(guarded, hosts=hosts, body_bytes_max=MANIFEST_BYTES_MAX, timeout_s=_TIMEOUT_S, page_policy=dict.fromkeys(files, _PAGE_POLICY))


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=kind)

    return answer


def _add_history_handlers(app: FastAPI) -> None:
    async def on_unavailable(_: Request, error: Exception) -> Response:
        structlog.get_logger().warning("history does not answer", error=repr(error))
        return problem(503, "the registry's database does not answer, so history cannot be shown; try again", headers={"Retry-After": "3"})

    async def on_impossible(_: Request, error: Exception) -> Response:
        # A NUL character or a number that no column can hold: there is nothing of that name.
        return problem(404, "there is no such thing: a value holds what no name can hold")

    app.add_exception_handler(asyncpg.DataError, on_impossible)
    kinds = (
        OSError,
        TimeoutError,
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        asyncpg.CannotConnectNowError,
        asyncpg.UndefinedTableError,
    )
    for kind in kinds:
        app.add_exception_handler(kind, on_unavailable)


async def _kafka(context: GatewayContext) -> str:
    try:
        async with asyncio.timeout(3):
            await context.feed.answers()
    except Exception as error:
        return f"does not answer ({type(error).__name__})"
    return "ok"
