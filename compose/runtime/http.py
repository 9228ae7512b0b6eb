"""How our HTTP services answer: problems in one wording (RFC 9457), JSON bodies checked by name, health for GET and HEAD, uvicorn until a stop event.

Every error is `application/problem+json` with `errors: [{field, message, remedy}]`; none shows a traceback. Needs FastAPI, which only the
registry and gateway extras install.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import structlog
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from opentinker.schemas.dead_letters import bounded_errors
from opentinker.schemas.errors import FieldError, field_errors
from prometheus_client import generate_latest
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from .metrics import REGISTRY
from .secrets import same_secret

__all__ = [
    "Probe",
    "ProblemError",
    "add_health",
    "add_problem_handlers",
    "bearer_token",
    "check_bearer",
    "media_type",
    "metrics_response",
    "problem",
    "read_model",
    "serve",
]

M = TypeVar("M", bound=BaseModel)
Probe = Callable[[], Awaitable[dict[str, str]]]  # part → "ok" or what is wrong
_GRACE_S = 5  # for requests in flight after SIGTERM; streams end by themselves on the stop event


class ProblemError(Exception):
    """An answer other than success. Raise it anywhere below a route."""

    def __init__(
        self, status: int, detail: str, errors: Sequence[FieldError] = (), headers: Mapping[str, str] | None = None, **members: object
    ) -> None:
        self.status, self.detail, self.errors, self.headers, self.members = status, detail, tuple(errors), dict(headers or {}), members
        super().__init__(detail)


def problem(status: int, detail: str, errors: Sequence[FieldError] = (), headers: Mapping[str, str] | None = None, **members: object) -> Response:
    """A problem document as a response."""
    body: dict[str, object] = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    body["errors"] = [error.model_dump() for error in bounded_errors(errors)]
    return JSONResponse(body | members, status, dict(headers or {}), "application/problem+json")


def add_problem_handlers(app: FastAPI) -> None:
    """Every way out of a route becomes a problem document."""

    async def on_problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return problem(error.status, error.detail, error.errors, error.headers, **error.members)

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail), headers=error.headers)

    async def on_parameters(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [
            FieldError(field=".".join(str(part) for part in each["loc"][1:]), message=_sentence(each["msg"]), remedy="correct the parameter")
            for each in error.errors()
        ]
        return problem(422, "; ".join(each.text() for each in found[:3]), found)

    async def on_fault(request: Request, error: Exception) -> Response:
        structlog.get_logger().error("request failed", path=request.url.path, exc_info=error)
        return problem(500, "the service failed while answering; its log says why", headers={"Connection": "close"})

    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_parameters)
    app.add_exception_handler(Exception, on_fault)


def _sentence(text: str) -> str:
    return text[:1].lower() + text[1:]


def media_type(request: Request) -> str:
    """The content type without its parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_model(request: Request, model: type[M]) -> M:
    """The JSON body as `model`. Raises ProblemError 415 for another content type and 422 naming each field."""
    if media_type(request) != "application/json":
        raise ProblemError(415, f"the content type is {media_type(request)[:60]!r}; send application/json")
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            found = [FieldError(field="", message="is not valid JSON", remedy="send one complete UTF-8 JSON object")]
        else:
            found = field_errors(error, model)
        raise ProblemError(422, found[0].text(), found) from None


def bearer_token(request: Request) -> str:
    """The token of `Authorization: Bearer …`, or an empty text."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def check_bearer(request: Request, expected: str, what: str) -> None:
    """Raises ProblemError 401 unless the request shows `expected`."""
    given = bearer_token(request)
    if not given or not same_secret(given, expected):
        detail = f"{what} is {'wrong' if given else 'missing'}; send Authorization: Bearer {what}"
        raise ProblemError(401, detail, headers={"WWW-Authenticate": 'Bearer realm="opentinker"'})


def add_health(app: FastAPI, service: str, probe: Probe) -> None:
    """`/health`: the process answers. `/ready`: what it needs answers too. Both for GET and HEAD."""

    async def health() -> Response:
        return JSONResponse({"status": "ok", "service": service})

    async def ready() -> Response:
        parts = await probe()
        good = all(text == "ok" for text in parts.values())
        return JSONResponse({"status": "ok" if good else "unavailable", "parts": parts}, 200 if good else 503)

    for path, endpoint in (("/health", health), ("/ready", ready)):
        app.add_api_route(path, endpoint, methods=["GET"])
        app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def metrics_response() -> Response:
    """This process's metrics in Prometheus' text format."""
    return Response(generate_latest(REGISTRY), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: `service.run` has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ASGIApp, host: str, port: int, stop: asyncio.Event, started: Callable[[int], None] | None = None) -> None:
    """Answer until `stop` is set. `started` is told the port, which matters for port 0. Raises OSError if the port is taken."""
    options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "server_header": False}
    # Keep-alive above the default of 5 s spares dashboards reconnects; 64 KiB of headers is h11's own bound.
    options |= {"timeout_graceful_shutdown": _GRACE_S, "timeout_keep_alive": 30, "h11_max_incomplete_event_size": 65_536}
    config = uvicorn.Config(app, host=host, port=port, **options)
    server = _Server(config)
    running = asyncio.create_task(server.serve())
    stopped = asyncio.create_task(stop.wait())
    try:
        while not server.started and not running.done():  # noqa: ASYNC110 uvicorn has no event for it
            await asyncio.sleep(0.01)
        if server.started:
            actual = server.servers[0].sockets[0].getsockname()[1]
            structlog.get_logger().info("listening", host=host, port=actual)
            if started:
                started(actual)
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        try:
            await running
        except SystemExit:  # uvicorn's way to say that it could not bind
            raise OSError(f"cannot listen on {host}:{port}; is another service there? Choose another port") from None
    finally:
        stopped.cancel()
        server.should_exit = True
