"""Routes of the registry.

Authority: the agent token opens attempts and reads; an attempt token begins and commits checkpoints of its own job and reads them. Health, readiness and
metrics are open: they hold no data of tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import structlog
from botocore.exceptions import BotoCoreError, ClientError
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from opentinker.compose.runtime.http import (
    ProblemError,
    add_health,
    add_problem_handlers,
    bearer_token,
    check_bearer,
    metrics_response,
    problem,
    read_model,
)
from opentinker.compose.runtime.http_middleware import HttpShell, host_names
from opentinker.compose.runtime.secrets import same_secret
from opentinker.schemas.errors import FieldError
from opentinker.schemas.registry_api import BeginCheckpoint, CommitCheckpoint, OpenAttempt, RestrictedUid
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp

from ..attempts import open_attempt, who_holds
from ..blobs import BlobStore
from ..checkpoints import begin_checkpoint, commit_checkpoint
from ..errors import NotFound, RegistryError
from ..read import ReadSide
from .views import checkpoint_view, download_files, model_view, version_view

__all__ = ["build_app"]

_BODY_BYTES_MAX = 4 * 2**20  # a commit that names 10,000 parts is about 1 MB
_TIMEOUT_S = 900.0  # a commit reads every byte back: 500 GB at 600 MB/s
_UID: TypeAdapter[str] = TypeAdapter(RestrictedUid)


def build_app(
    pool: Any, blobs: BlobStore, *, agent_token: str, hosts: tuple[str, ...], wake: asyncio.Event, faults: Callable[[], dict[str, str]]
) -> ASGIApp:
    """The application. `wake` is set after each commit, so that the outbox is published at once; `faults` names background work that is down."""
    app = FastAPI(title="OpenTinker registry", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    add_problem_handlers(app)
    _add_error_handlers(app)
    read = ReadSide(pool)
    _add_attempt_routes(app, pool, blobs, agent_token, wake)
    _add_read_routes(app, pool, blobs, read, agent_token)

    async def probe() -> dict[str, str]:
        parts = {"postgres": await _answer(read.answers()), "s3": await _answer(blobs.answers())}
        return parts | faults()

    add_health(app, "registry", probe)
    app.add_api_route("/metrics", metrics_response, methods=["GET"], include_in_schema=False)
    return HttpShell(app, hosts=host_names(*hosts), body_bytes_max=_BODY_BYTES_MAX, timeout_s=_TIMEOUT_S)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, RegistryError)
        headers = {"WWW-Authenticate": 'Bearer realm="opentinker"'} if error.status == 401 else None
        return problem(error.status, str(error), error.errors, headers, reason=error.reason)

    async def on_unavailable(_: Request, error: Exception) -> Response:
        structlog.get_logger().warning("a store does not answer", error=repr(error))
        return problem(503, "the database or the object store does not answer; try again", headers={"Retry-After": "2"})

    async def on_impossible(_: Request, error: Exception) -> Response:
        # A NUL character or a number that no column can hold.
        return problem(422, "a value holds what cannot be stored: a NUL character, or a number that is too large")

    app.add_exception_handler(RegistryError, on_refusal)
    app.add_exception_handler(asyncpg.DataError, on_impossible)
    for kind in (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.CannotConnectNowError, BotoCoreError, ClientError):
        app.add_exception_handler(kind, on_unavailable)


def _add_attempt_routes(app: FastAPI, pool: Any, blobs: BlobStore, agent_token: str, wake: asyncio.Event) -> None:
    @app.post("/v1/attempts/open", openapi_extra=_body(OpenAttempt))
    async def open_(request: Request) -> Response:
        """Raise the fence of a job and learn where to resume."""
        check_bearer(request, agent_token, "the agent token")
        asked = await read_model(request, OpenAttempt)
        with structlog.contextvars.bound_contextvars(job_uid=asked.job_uid):
            return JSONResponse((await open_attempt(pool, blobs, asked)).model_dump())

    @app.get("/v1/agents/check", status_code=204)
    async def check(request: Request) -> Response:
        """Whether the agent token is accepted: an agent asks before it takes work."""
        check_bearer(request, agent_token, "the agent token")
        return Response(status_code=204)

    @app.post("/v1/checkpoints/begin", openapi_extra=_body(BeginCheckpoint))
    async def begin(request: Request) -> Response:
        """Announce a checkpoint's files and get URLs to upload them to."""
        holder = await who_holds(pool, bearer_token(request))
        asked = await read_model(request, BeginCheckpoint)
        with structlog.contextvars.bound_contextvars(job_uid=holder.job_uid):
            return JSONResponse((await begin_checkpoint(pool, blobs, holder, asked)).model_dump())

    @app.post("/v1/checkpoints/{checkpoint_id}/commit", openapi_extra=_body(CommitCheckpoint))
    async def commit(checkpoint_id: str, request: Request) -> Response:
        """Verify what was uploaded and make it visible."""
        holder = await who_holds(pool, bearer_token(request))
        asked = await read_model(request, CommitCheckpoint)
        with structlog.contextvars.bound_contextvars(job_uid=holder.job_uid):
            settled = await commit_checkpoint(pool, blobs, holder, _checked_uid(checkpoint_id), asked)
        wake.set()
        return JSONResponse(settled.model_dump())


def _add_read_routes(app: FastAPI, pool: Any, blobs: BlobStore, read: ReadSide, agent_token: str) -> None:
    async def may_read(request: Request, job_uid: str | None = None) -> None:
        """The agent token reads everything, an attempt token its own job."""
        token = bearer_token(request)
        if not same_secret(token, agent_token):
            holder = await who_holds(pool, token)
            if holder.job_uid != job_uid:
                raise NotFound("no such thing")

    @app.get("/v1/jobs/{job_uid}/checkpoints")
    async def checkpoints(job_uid: str, request: Request, limit: int = Query(100, ge=1, le=500)) -> Response:
        """Committed checkpoints of a job, newest first."""
        await may_read(request, job_uid)
        return JSONResponse({"items": [checkpoint_view(row) for row in await read.checkpoints(job_uid, limit=limit)]})

    @app.get("/v1/models")
    async def models(
        request: Request, namespace: str | None = None, limit: int = Query(100, ge=1, le=500), after: str = Query("", max_length=200)
    ) -> Response:
        """Models by namespace and name. `after`: `next` of the page before."""
        await may_read(request)
        first, _, second = after.partition("/")
        rows = await read.models(namespace=namespace, after=(first, second), limit=limit)
        follows = f"{rows[-1]['namespace']}/{rows[-1]['name']}" if len(rows) == limit else None
        return JSONResponse({"items": [model_view(row) for row in rows], "next": follows})

    @app.get("/v1/models/{namespace}/{name}")
    async def versions(namespace: str, name: str, request: Request, limit: int = Query(100, ge=1, le=500), before: int | None = None) -> Response:
        """Versions of a model, newest first, with lineage."""
        await may_read(request)
        rows = await read.model_versions(namespace, name, before=before, limit=limit)
        if not rows and before is None:
            raise NotFound(f"there is no model {name[:63]!r} in namespace {namespace[:63]!r}")
        return JSONResponse({"namespace": namespace, "name": name, "versions": [version_view(row) for row in rows]})

    @app.get("/v1/models/{namespace}/{name}/versions/{version}")
    async def version_(namespace: str, name: str, version: int, request: Request) -> Response:
        """One version, with a URL for each of its files."""
        await may_read(request)
        row = await read.model_version(namespace, name, version) if 0 < version < 2**31 else None
        if row is None:
            raise NotFound(f"there is no version {version} of model {name[:63]!r} in namespace {namespace[:63]!r}")
        return JSONResponse(version_view(row) | {"files": await download_files(blobs, row)})


def _checked_uid(text: str) -> str:
    try:
        return _UID.validate_python(text)
    except ValidationError as error:
        message, _, remedy = str(error.errors(include_url=False)[0]["ctx"]["error"]).partition("; ")
        raise ProblemError(422, message, [FieldError(field="checkpoint_id", message=message, remedy=remedy)]) from None


def _body(model: type[Any]) -> dict[str, Any]:
    """The request body for OpenAPI: bodies are read by `read_model`, which FastAPI does not see."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


async def _answer(question: Any) -> str:
    try:
        async with asyncio.timeout(3):
            await question
    except Exception as error:
        return f"does not answer ({type(error).__name__})"
    return "ok"
