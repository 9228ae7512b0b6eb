"""Reading jobs: list, one, events, metrics ranges, log tails, checkpoints, and why one waits."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from opentinker.compose.runtime.http import ProblemError
from opentinker.schemas.errors import FieldError, InvalidMessage, nearest
from opentinker.schemas.messages import JobPhase, JobStatus, TrainingMetrics

from ..core.tail import Entry
from ..core.views import iso, job_view
from .context import NEIGHBOUR_TIMEOUT_S, GatewayContext

__all__ = ["job_routes", "log_line_view", "number"]

_NAMES_MAX = 16
Namespace = Annotated[str, Query(max_length=63, description="of a job that is named, not given by uid")]


def job_routes(context: GatewayContext) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/jobs")
    async def jobs(
        phase: Annotated[list[str] | None, Query(description="may be given several times, or with commas")] = None,
        namespace: Annotated[str | None, Query(max_length=63)] = None,
        cursor: Annotated[str | None, Query(max_length=200, description="`cursor` of the page before")] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        """Jobs, newest first, by page."""
        try:
            page = context.feed.jobs.page(phases=_phases(phase or []), namespace=namespace, cursor=cursor, limit=limit)
        except InvalidMessage as error:
            raise ProblemError(422, error.errors[0].text(), error.errors) from None
        counts = {phase.value: count for phase, count in context.feed.jobs.phases.items()}
        return JSONResponse({"items": [job_view(item) for item in page.items], "cursor": page.cursor, "counts": counts, "asOf": _now()})

    @router.get("/v1/jobs/{job}")
    async def job_(job: str, namespace: Namespace = "default") -> Response:
        """One job by uid, or the newest of a name."""
        return JSONResponse(job_view(await context.job(job, namespace)))

    @router.get("/v1/jobs/{job}/events")
    async def events(
        job: str,
        namespace: Namespace = "default",
        after: Annotated[int, Query(ge=0, lt=2**63, description="revision to go on behind")] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 200,
    ) -> Response:
        """Everything that happened to a job, oldest first."""
        status = await context.job(job, namespace)
        rows = await context.read.job_events(status.job_uid, after_revision=after, limit=limit)
        items = [{"revision": row["revision"], "type": row["type"], "time": iso(row["time_ms"]), "data": row["data"]} for row in rows]
        return JSONResponse({"items": items, "next": rows[-1]["revision"] if len(rows) == limit else None, "asOf": _now()})

    @router.get("/v1/jobs/{job}/metrics")
    async def metrics(
        job: str,
        namespace: Namespace = "default",
        names: Annotated[str, Query(max_length=1000, description="metric names with commas")] = "mean_return",
        rank: Annotated[int, Query(ge=0, lt=4096)] = 0,
        from_step: Annotated[int, Query(alias="fromStep", ge=0, lt=2**53)] = 0,
        to_step: Annotated[int | None, Query(alias="toStep", ge=0, lt=2**53)] = None,
        points: Annotated[int, Query(ge=2, le=2000, description="at most; the lowest and highest of every bucket stay")] = 500,
    ) -> Response:
        """Training metrics by global step, down-sampled without losing spikes."""
        status = await context.job(job, namespace)
        wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))[:_NAMES_MAX]
        series = {}
        for name in wanted:
            found = await context.read.metrics(status.job_uid, name, rank=rank, from_step=from_step, to_step=to_step, points=points)
            rows = [[point.global_step, number(point.value), point.attempt_number, point.time_ms] for point in found]
            series[name] = rows + _newer(
                context.feed.metrics.all(status.job_uid), name, rank, found[-1].global_step if found else from_step - 1, to_step
            )
        known = await context.read.metric_names(status.job_uid)
        columns = ["globalStep", "value", "attempt", "timeMs"]
        return JSONResponse({"jobUid": status.job_uid, "columns": columns, "series": series, "names": known, "asOf": _now()})

    @router.get("/v1/jobs/{job}/checkpoints")
    async def checkpoints(job: str, namespace: Namespace = "default", limit: Annotated[int, Query(ge=1, le=500)] = 100) -> Response:
        """Committed checkpoints, newest first."""
        status = await context.job(job, namespace)
        rows = await context.read.checkpoints(status.job_uid, limit=limit)
        items = [
            {
                "checkpointId": row["checkpoint_id"],
                "attempt": row["attempt_number"],
                "globalStep": row["global_step"],
                "sizeBytes": row["size_bytes"],
                "digest": row["digest"],
                "final": row["final"],
                "metrics": row["metrics"],
                "lineage": row["lineage"],
                "committedAt": row["committed_at"].isoformat(),
            }
            for row in rows
        ]
        return JSONResponse({"items": items, "asOf": _now()})

    @router.get("/v1/jobs/{job}/explain")
    async def explain(job: str, namespace: Namespace = "default") -> Response:
        """Why a job waits: what it needs, what is free, its position, what would unblock it."""
        status = await context.job(job, namespace)
        known = {"phase": status.phase.value, "reason": status.reason, "message": status.message}
        answer = await ask_replica(context, f"/v1/explain/{status.job_uid}", known, pool=status.pool)
        return JSONResponse(explained(answer, status))

    return router


def explained(answer: dict[str, Any], status: JobStatus) -> dict[str, Any]:
    """The replica's answer, where it knows the job; else what its status says. With the scheduler's silence, if it is silent."""
    if not answer.pop("known", True):
        said = (
            f"ended as {status.phase.value}: {status.reason}"
            if status.phase.terminal
            else "the scheduler's read replica has not caught up with it yet"
        )
        answer = answer | {
            "namespace": status.namespace,
            "name": status.name,
            "phase": status.phase.value,
            "reason": status.reason,
            "text": status.message or said,
        }
    silent_s = answer.get("schedulerSilentS")
    if silent_s is not None and not status.phase.terminal:
        answer["text"] += f"; the scheduler has decided nothing for {silent_s} s: it is being replaced, or hangs (opentinker status)"
    return answer


async def ask_replica(context: GatewayContext, path: str, last_known: dict[str, str] | None = None, **params: str) -> dict[str, Any]:
    """What the scheduler's read replica answers. Raises ProblemError 503 if it does not, with what is known anyway."""
    url = context.settings.scheduler.replica_url
    try:
        headers = {"Authorization": f"Bearer {context.api_key}"}
        answer = await context.http.get(url.rstrip("/") + path, headers=headers, params=params, timeout=NEIGHBOUR_TIMEOUT_S)
        if answer.status_code < 400:
            found: dict[str, Any] = answer.json()
            return found
        reason = f"answers {answer.status_code}"
    except (httpx.HTTPError, ValueError) as error:
        reason = f"does not answer ({type(error).__name__})"
    detail = (
        f"the scheduler's read replica {reason}; start it (`python -m opentinker.scheduler_stream.replica`, part of `opentinker up`) and ask again"
    )
    raise ProblemError(503, detail, headers={"Retry-After": "5"}, lastKnown=last_known)


def _phases(given: list[str]) -> list[JobPhase]:
    found = []
    for text in (part.strip() for item in given for part in item.split(",") if part.strip()):
        try:
            found.append(JobPhase(text))
        except ValueError:
            guess = nearest(text, list(JobPhase))
            remedy = f"did you mean {guess}?" if guess else f"use one of {', '.join(JobPhase)}"
            error = FieldError(field="query phase", message=f"unknown phase {text[:40]!r}", remedy=remedy)
            raise ProblemError(422, error.text(), [error]) from None
    return found


def _newer(tail: list[Entry[TrainingMetrics]], name: str, rank: int, behind: int, to_step: int | None) -> list[list[Any]]:
    """Samples that have not reached the database yet."""
    samples = (entry.item for entry in tail if entry.item.replica_rank == rank and name in entry.item.values)
    rows = [
        [sample.global_step, number(sample.values[name]), sample.attempt_number, sample.time_ms]
        for sample in samples
        if sample.global_step > behind and (to_step is None or sample.global_step <= to_step)
    ]
    return sorted(rows)


def number(value: float | str) -> float | str:
    """A value as JSON can hold it: NaN and infinities as text."""
    if isinstance(value, str) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def log_line_view(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "attempt": line["attempt_number"],
        "replicaRank": line["replica_rank"],
        "stream": line["stream"],
        "node": line["node"],
        "time": iso(line["time_ms"]),
        "lineNumber": line["line_number"],
        "text": line["text"],
        "dropped": line["dropped"],
    }


def _now() -> str | None:
    return iso(time.time_ns() // 1_000_000)
