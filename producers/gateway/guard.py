"""Every path needs the API key, unless it stands on the list of open ones. Judged before routing, so that a path nobody declared is closed too."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import Request
from opentinker.compose.runtime.http import ProblemError, check_bearer, problem
from opentinker.schemas.errors import FieldError, nearest
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["KeyGuard", "no_unknown_parameters"]


class KeyGuard:
    """ASGI middleware: 401 for a request without the key, before anything else is looked at."""

    def __init__(self, app: ASGIApp, *, key: str, open_paths: Collection[str]) -> None:
        self._app, self._key, self._open_paths = app, key, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The decoded path that the router will match; never one rebuilt from headers.
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                check_bearer(Request(scope), self._key, "the API key")
            except ProblemError as error:
                await problem(error.status, error.detail, headers=error.headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def no_unknown_parameters(request: Request) -> None:
    """A query parameter that a route does not have is refused by name: `?dry_run=true` must not submit a job."""
    route = request.scope.get("route")
    dependant = getattr(route, "dependant", None)
    known = [field.alias for field in getattr(dependant, "query_params", ())]
    errors = []
    for name in sorted(set(request.query_params) - set(known)):
        guess = nearest(name, known)
        remedy = f"did you mean {guess}?" if guess else (f"use {', '.join(known)}" if known else "remove it")
        errors.append(FieldError(field=f"query {name[:60]}", message="unknown parameter", remedy=remedy))
    if errors:
        raise ProblemError(422, errors[0].text(), errors)
