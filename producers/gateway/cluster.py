"""Everything that is not one job: nodes, algorithms, models, alerts."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from opentinker.compose.runtime.http import ProblemError
from opentinker.schemas.errors import FieldError

from ..core.views import algorithm_views, iso
from .context import NEIGHBOUR_TIMEOUT_S, GatewayContext
from .jobs import ask_replica

__all__ = ["cluster_routes"]

Limit = Annotated[int, Query(ge=1, le=500)]


def cluster_routes(context: GatewayContext) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/nodes")
    async def nodes() -> Response:
        """Nodes with what they have and what is free."""
        return JSONResponse(await ask_replica(context, "/v1/nodes"))

    @router.get("/v1/limits")
    async def limits() -> Response:
        """How many jobs of each namespace wait in each pool, and how many may."""
        return JSONResponse(await ask_replica(context, "/v1/limits"))

    @router.get("/v1/algorithms")
    async def algorithms() -> Response:
        """Algorithms with their hyperparameters: default, range and meaning."""
        return JSONResponse({"items": algorithm_views()})

    @router.get("/v1/environments")
    async def environments() -> Response:
        """Environment ids that manifests may name."""
        return JSONResponse({"items": sorted(context.environments)})

    @router.get("/v1/alerts")
    async def alerts(cursor: Annotated[int | None, Query(ge=0, lt=2**63)] = None, limit: Limit = 100) -> Response:
        """What somebody should look at, newest first."""
        rows = await context.read.alerts(before=cursor, limit=limit)
        items = [
            {
                "id": row["id"],
                "type": row["type"],
                "source": row["source"],
                "subject": row["subject"],
                "time": iso(row["time_ms"]),
                "data": row["data"],
            }
            for row in rows
        ]
        return JSONResponse({"items": items, "cursor": rows[-1]["seq"] if len(rows) == limit else None})

    @router.get("/v1/models")
    async def models(
        namespace: Annotated[str | None, Query(max_length=63)] = None, cursor: Annotated[str, Query(max_length=200)] = "", limit: Limit = 100
    ) -> Response:
        """Models by namespace and name."""
        first, _, second = cursor.partition("/")
        rows = await context.read.models(namespace=namespace, after=(first, second), limit=limit)
        items = [
            {"namespace": row["namespace"], "name": row["name"], "latestVersion": row["last_version"], "createdAt": row["created_at"].isoformat()}
            for row in rows
        ]
        return JSONResponse({"items": items, "cursor": f"{rows[-1]['namespace']}/{rows[-1]['name']}" if len(rows) == limit else None})

    @router.get("/v1/models/{namespace}/{name}")
    async def versions(namespace: str, name: str, cursor: Annotated[int | None, Query(ge=1, lt=2**31)] = None, limit: Limit = 100) -> Response:
        """Versions of a model with their lineage, newest first."""
        rows = await context.read.model_versions(namespace, name, before=cursor, limit=limit)
        if not rows and cursor is None:
            raise _no_model(namespace, name)
        follows = rows[-1]["version"] if len(rows) == limit else None
        return JSONResponse({"namespace": namespace, "name": name, "items": [_version_view(row) for row in rows], "cursor": follows})

    @router.get("/v1/models/{namespace}/{name}/versions/{version}")
    async def version_(namespace: str, name: str, version: int) -> Response:
        """One version, with a URL for each file that can be fetched without a key for some hours."""
        row = await context.read.model_version(namespace, name, version) if 0 < version < 2**31 else None
        if row is None:
            raise _no_model(namespace, name, version)
        return JSONResponse(_version_view(row) | {"files": await _downloads(context, namespace, name, version)})

    return router


async def _downloads(context: GatewayContext, namespace: str, name: str, version: int) -> list[dict[str, Any]]:
    """Files with URLs, which only the registry can sign."""
    if context.registry_token is None:
        raise ProblemError(503, "this gateway has no token for the registry; give it OPENTINKER_REGISTRY__AGENT_TOKEN_FILE")
    url = f"{context.settings.registry.url.rstrip('/')}/v1/models/{namespace}/{name}/versions/{version}"
    try:
        answer = await context.http.get(url, headers={"Authorization": f"Bearer {context.registry_token}"}, timeout=NEIGHBOUR_TIMEOUT_S)
        answer.raise_for_status()
        files: list[dict[str, Any]] = answer.json()["files"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        detail = f"the registry gives no download URLs ({type(error).__name__}); try again"
        raise ProblemError(503, detail, headers={"Retry-After": "5"}) from None
    return files


def _version_view(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "namespace": row["namespace"],
        "name": row["name"],
        "version": row["version"],
        "jobUid": row["job_uid"],
        "attempt": row["attempt_number"],
        "checkpointId": row["checkpoint_id"],
        "globalStep": row["global_step"],
        "specDigest": row["spec_digest"],
        "digest": row["digest"],
        "sizeBytes": row["size_bytes"],
        "files": [{"name": file["name"], "size": file["size"], "sha256": file["sha256"]} for file in row["files"]],
        "stopReason": row["stop_reason"],
        "metrics": row["metrics"],
        "lineage": row["lineage"],
        "createdAt": row["created_at"].isoformat(),
    }


def _no_model(namespace: str, name: str, version: int | None = None) -> ProblemError:
    what = f"model {name[:63]!r}" if version is None else f"version {str(version)[:20]} of model {name[:63]!r}"
    error = FieldError(field="model", message=f"there is no {what} in namespace {namespace[:63]!r}", remedy="see opentinker get models")
    return ProblemError(404, error.text(), [error])
