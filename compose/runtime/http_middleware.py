"""The shell around every HTTP service: security headers, foreign hosts refused, bodies and times bounded, requests counted.

One pure ASGI middleware instead of Starlette's BaseHTTPMiddleware, which buffers streams. Paths are judged by the router alone, never rebuilt
from the Host header (Starlette CVE-2026-48710).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Mapping

import structlog
from opentinker.schemas.errors import FieldError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .http import ProblemError, problem
from .metrics import LATENCY_BUCKETS_S, counter, histogram

__all__ = ["HttpShell", "host_names"]

_REQUESTS = counter("http_requests_total", "Requests answered, by route and status class", ("method", "route", "status"))
_SECONDS = histogram("http_request_seconds", "Time to the first byte of the answer", LATENCY_BUCKETS_S, ("route",))
_HEADER_BYTES_MAX = 65_536
_DRAIN_BYTES_MAX, _DRAIN_S = 16 * 2**20, 2.0
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


def host_names(*hosts: str) -> frozenset[str]:
    """The Host values that are ours, without ports: loopback, and what is configured."""
    return frozenset({"127.0.0.1", "localhost", "[::1]", *(host.lower() for host in hosts if host)})


async def _drain(receive: Receive) -> None:
    """Read on for a moment before a refusal: a client that is still sending would meet a closed connection, and never read why."""
    read = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while read < _DRAIN_BYTES_MAX:
                message = await receive()
                read += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class HttpShell:
    """Wraps an app. `headers` replaces single security headers, for the page's own content policy by path prefix."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        body_bytes_max: int,
        timeout_s: float = 30.0,
        page_policy: Mapping[str, str] | None = None,
    ) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._body_bytes_max = body_bytes_max
        self._timeout_s = timeout_s
        self._page_policy = dict(page_policy or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})  # there are no websockets here
            return
        request_id = secrets.token_hex(8)
        exchange = _Exchange(scope, send, request_id, self._policy(scope["path"]))
        refused = self._refuse(scope)
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            if refused is not None:
                await _drain(receive)
                await refused(scope, receive, exchange.send)
            else:
                await self._answer(scope, receive, exchange)
        exchange.count()

    def _policy(self, path: str) -> str | None:
        return self._page_policy.get(path)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = {name: value for name, value in scope["headers"] if name in {b"host", b"content-length"}}
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] if ":" in host else host
        if name not in self._hosts:
            return problem(421, f"the Host header names {host[:80]!r}, which is not this service; use one of {', '.join(sorted(self._hosts))}")
        # The server's own bound is on what it has to wait for: headers that arrive all at once pass it.
        if (size := sum(len(each) + len(value) for each, value in scope["headers"])) > _HEADER_BYTES_MAX:
            return problem(431, f"the headers are {size:,} bytes, more than {_HEADER_BYTES_MAX:,}; send fewer or shorter ones")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._body_bytes_max:
            return _response(self._too_large(f"{int(length):,} bytes"))
        return None

    def _too_large(self, size: str) -> ProblemError:
        error = FieldError(field="", message=f"is {size}, more than {self._body_bytes_max:,}", remedy="send a smaller document")
        return ProblemError(413, error.text(), [error], {"Connection": "close"})

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._body_bytes_max:
                    if message.get("more_body", False):
                        await _drain(receive)
                    # Of the kind that apps answer themselves: Starlette turns any other exception into a 500 before it gets back here.
                    raise self._too_large(f"at least {received:,} bytes")
            return message

        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                exchange.on_start = lambda: limit.reschedule(None)  # a stream, once begun, may last
                await self._app(scope, bounded_receive, exchange.send)
        except ProblemError as error:
            await self._instead(scope, receive, exchange, _response(error))
        except TimeoutError:
            detail = f"no answer within {self._timeout_s:.0f} s; try again"
            await self._instead(scope, receive, exchange, problem(503, detail, headers={"Retry-After": "5"}))
        except Exception:
            # Starlette has usually answered 500 and logged it; it raises again for the server. A stream that breaks has no other witness.
            if exchange.status < 500:
                structlog.get_logger().exception("request failed", path=scope["path"], status=exchange.status)
            await self._instead(scope, receive, exchange, problem(500, "the service failed while answering; its log says why"))

    async def _instead(self, scope: Scope, receive: Receive, exchange: _Exchange, response: Response) -> None:
        if not exchange.status:
            await response(scope, receive, exchange.send)


def _nothing() -> None:
    pass


def _response(error: ProblemError) -> Response:
    return problem(error.status, error.detail, error.errors, error.headers)


class _Exchange:
    """One request and its answer: adds headers on the way out, remembers status and time for the metrics."""

    def __init__(self, scope: Scope, send: Send, request_id: str, policy: str | None) -> None:
        self._scope, self._send, self._request_id, self._policy = scope, send, request_id, policy
        self._began = time.monotonic()
        self._first_byte_s = 0.0
        self.status = 0
        self.on_start: Callable[[], None] = _nothing

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._first_byte_s = time.monotonic() - self._began
            self.on_start()
            headers = list(message.get("headers", []))
            present = {name.lower() for name, _ in headers}
            ours = _HEADERS | {"x-request-id": self._request_id}
            if self._policy:
                ours["content-security-policy"] = self._policy
            headers += [(name.encode(), value.encode()) for name, value in ours.items() if name.encode() not in present]
            message = {**message, "headers": headers}
        await self._send(message)

    def count(self) -> None:
        route = getattr(self._scope.get("route"), "path", "unmatched")
        method = self._scope["method"] if self._scope["method"] in _METHODS else "other"
        _REQUESTS.labels(method, route, f"{self.status // 100}xx").inc()
        _SECONDS.labels(route).observe(self._first_byte_s)
