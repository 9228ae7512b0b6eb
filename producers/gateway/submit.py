"""Submitting and cancelling over HTTP. A job is accepted when Kafka has acked its command, never before."""

from __future__ import annotations

import asyncio
import time
import uuid

import structlog
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from opentinker.compose.runtime.http import ProblemError, media_type
from opentinker.compose.runtime.metrics import counter
from opentinker.compose.runtime.tracing import ATTRIBUTE_JOB_UID, ATTRIBUTE_NAMESPACE, SPAN_ACCEPT, span
from opentinker.schemas.errors import FieldError, InvalidMessage
from opentinker.schemas.manifest import TrainingJob
from opentinker.schemas.messages import CancelJob, JobStatus, SubmitJob
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.documents import read_json, read_yaml
from ..core.jobs_view import provisional_status
from ..core.submission import Repeat, command_record, effective_rows, judge_repeat, namespace_of, plan_submission, queue_full
from ..core.views import job_view
from ..writer import KafkaUnavailable
from .context import GatewayContext

__all__ = ["submit_routes"]

SOURCE = "opentinker/gateway"
_WHO = "api-key:bootstrap"
_YAML = {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"}
_DOUBTFUL_MAX = 10_000  # submissions that are remembered as such
_KEY_CHARACTERS_MAX = 128
_RETRY_AFTER_S = "5"
_FULL_RETRY_AFTER_S = "10"

_SUBMISSIONS = counter("gateway_submissions_total", "Submissions answered, by outcome", ("outcome",))
for _outcome in ("accepted", "repeated", "invalid", "conflict", "unavailable", "queue-full", "dry-run"):
    _SUBMISSIONS.labels(_outcome)


class _Cancellation(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=1000)


def submit_routes(context: GatewayContext) -> APIRouter:
    router = APIRouter()
    manifest = {"schema": TrainingJob.model_json_schema()}
    body = {"requestBody": {"required": True, "content": {"application/json": manifest, "application/yaml": manifest}}}

    @router.post("/v1/jobs", status_code=202, openapi_extra=body)
    async def submit(request: Request, dry_run: bool = Query(False, alias="dryRun")) -> Response:
        """Submit a TrainingJob manifest as JSON or YAML. `Idempotency-Key` makes repeating safe for at least 24 hours."""
        document = await _document(request)
        try:
            key = _idempotency_key(request) or str(uuid.uuid4())
            command, ce_id = _command(context, document, key)
        except InvalidMessage as error:
            _SUBMISSIONS.labels("invalid").inc()
            raise ProblemError(422, error.errors[0].text(), error.errors) from None
        conflict: str | None = None
        try:
            repeat = _judge(context, command)
        except ProblemError as error:
            if not dry_run:
                _SUBMISSIONS.labels("conflict").inc()
                raise
            conflict = error.detail
        if dry_run:
            _SUBMISSIONS.labels("dry-run").inc()
            return JSONResponse({"dryRun": True, "effective": effective_rows(document, context.environments), "conflict": conflict})
        with structlog.contextvars.bound_contextvars(job_uid=command.job_uid):
            if repeat is Repeat.NEW:
                _check_room(context, command)
                await _accept(context, command, ce_id, key, request.headers.get("traceparent", ""))
            else:
                await _wait_for_first(context, command.job_uid)
        _SUBMISSIONS.labels("accepted" if repeat is Repeat.NEW else "repeated").inc()
        status = context.feed.jobs.get(command.job_uid)
        if status is None:  # the first submission of this key has just failed
            raise _unavailable(key)
        headers = {"Location": f"/v1/jobs/{command.job_uid}"} | ({} if repeat is Repeat.NEW else {"Idempotent-Replayed": "true"})
        return JSONResponse(job_view(status), 202, headers)

    @router.post("/v1/jobs/{job}/cancel", status_code=202)
    async def cancel(
        job: str, request: Request, namespace: str = Query("default", max_length=63), reason: str = Query("", max_length=1000)
    ) -> Response:
        """Cancel a job by uid or name. It is asked to checkpoint and stop. `reason`, here or in a JSON body, goes into its history."""
        return JSONResponse(job_view(await _cancel(context, job, namespace, await _reason(request) or reason, request)), 202)

    @router.delete("/v1/jobs/{job}", status_code=202)
    async def delete(job: str, request: Request, namespace: str = Query("default", max_length=63)) -> Response:
        """Cancel a job; what it left (history, checkpoints, models) stays."""
        return JSONResponse(job_view(await _cancel(context, job, namespace, "", request)), 202)

    return router


async def _document(request: Request) -> object:
    kind = media_type(request)
    try:
        if kind == "application/json":
            return read_json(await request.body())
        if kind in _YAML:
            return read_yaml(await request.body())
    except InvalidMessage as error:
        _SUBMISSIONS.labels("invalid").inc()
        raise ProblemError(422, error.errors[0].text(), error.errors) from None
    _SUBMISSIONS.labels("invalid").inc()
    said = f"is {kind[:60]!r}" if kind else "is missing"
    error_ = FieldError(field="header content-type", message=said, remedy="send application/json or application/yaml")
    raise ProblemError(415, error_.text(), [error_], {"Accept": "application/json, application/yaml"})


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= _KEY_CHARACTERS_MAX or not key.isascii() or not key.isprintable():
        message = f"must be 1 to {_KEY_CHARACTERS_MAX} printable ASCII characters"
        error = FieldError(field="header Idempotency-Key", message=message, remedy="use a UUID")
        raise ProblemError(422, error.text(), [error])
    return key


def _command(context: GatewayContext, document: object, key: str) -> tuple[SubmitJob, str]:
    """The command and its `ce_id`, which carries the namespace: the same key in two namespaces is two jobs."""
    ce_id = f"{namespace_of(document)}:{key}"
    return plan_submission(document, ce_source=SOURCE, ce_id=ce_id, submitted_by=_WHO, environments=context.environments), ce_id


def _judge(context: GatewayContext, command: SubmitJob) -> Repeat:
    """New or a repetition. Raises ProblemError for a used key (422) or name (409)."""
    jobs = context.feed.jobs
    namesake = jobs.known_name(command.namespace, command.name)
    repeat = judge_repeat(command, jobs.known(command.job_uid), namesake)
    if repeat is Repeat.OTHER_PAYLOAD:
        message = f"was used for another manifest (job {command.job_uid})"
        error = FieldError(field="header Idempotency-Key", message=message, remedy="use a new key for each manifest")
        raise ProblemError(422, error.text(), [error], jobUid=command.job_uid)
    if repeat is Repeat.NAME_TAKEN:
        assert namesake is not None
        message = f"{command.name} is the name of live job {namesake.job_uid}"
        error = FieldError(field="metadata.name", message=message, remedy="cancel that job or choose another name")
        raise ProblemError(409, error.text(), [error], jobUid=namesake.job_uid)
    return repeat


def _check_room(context: GatewayContext, command: SubmitJob) -> None:
    """Raises ProblemError 429 when the namespace has as many jobs waiting as it may. The scheduler has the last word; this only says it sooner."""
    limit = context.limits.queued_max(command.pool, command.namespace)
    queued = context.feed.jobs.waiting(command.pool, command.namespace)
    error = queue_full(command, queued, limit)
    if error is None:
        return
    _SUBMISSIONS.labels("queue-full").inc()
    counts = {"pool": command.pool, "namespace": command.namespace, "queued": queued, "queuedMax": limit}
    raise ProblemError(429, error.text(), [error], {"Retry-After": _FULL_RETRY_AFTER_S}, reason="QueueFull", limit=counts)


async def _accept(context: GatewayContext, command: SubmitJob, ce_id: str, key: str, traceparent: str) -> None:
    """Write the command. The provisional entry holds key and name meanwhile; it goes again if Kafka does not take the command."""
    now_ms = time.time_ns() // 1_000_000
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    context.in_flight[command.job_uid] = done
    context.feed.put_provisional(provisional_status(command, now_ms))
    try:
        with span(SPAN_ACCEPT, traceparent, {ATTRIBUTE_JOB_UID: command.job_uid, ATTRIBUTE_NAMESPACE: command.namespace}) as own:
            record = command_record(
                command, ce_id=ce_id, ce_source=SOURCE, time_ms=now_ms, traceparent=own, partitions=context.settings.kafka.partitions
            )
            await context.writer.write([record])
    except KafkaUnavailable as error:
        known = context.feed.jobs.get(command.job_uid)
        if known is not None and known.revision == 0:
            context.feed.jobs.remove(command.job_uid)
        _SUBMISSIONS.labels("unavailable").inc()
        if error.sent:
            _doubt(context, command.job_uid)
        # Where an earlier try may have reached Kafka, this one's failure does not say that nothing was accepted.
        raise _unavailable(key if command.job_uid in context.doubtful else None) from None
    finally:
        del context.in_flight[command.job_uid]
        done.set_result(None)
    structlog.get_logger().info("job accepted", namespace=command.namespace, name=command.name, pool=command.pool)


def _doubt(context: GatewayContext, job_uid: str) -> None:
    context.doubtful.pop(job_uid, None)
    context.doubtful[job_uid] = None
    while len(context.doubtful) > _DOUBTFUL_MAX:
        del context.doubtful[next(iter(context.doubtful))]


async def _wait_for_first(context: GatewayContext, job_uid: str) -> None:
    """The same key came twice at once: the second is answered when the first is."""
    first = context.in_flight.get(job_uid)
    if first is not None:
        await asyncio.shield(first)


async def _reason(request: Request) -> str:
    body = await request.body()
    if not body:
        return ""
    try:
        return _Cancellation.model_validate_json(body).reason
    except ValidationError:
        error = FieldError(field="reason", message="the body must be an object with a text `reason`", remedy='send {"reason": "…"} or nothing')
        raise ProblemError(422, error.text(), [error]) from None


async def _cancel(context: GatewayContext, job: str, namespace: str, reason: str, request: Request) -> JobStatus:
    status = await context.job(job, namespace)
    if status.phase.terminal:
        error = FieldError(field="job", message=f"job {status.job_uid} is over ({status.phase.value})", remedy="there is nothing to cancel")
        raise ProblemError(409, error.text(), [error], phase=status.phase.value)
    command = CancelJob(job_uid=status.job_uid, namespace=status.namespace, pool=status.pool, requested_by=_WHO, reason=reason)
    with (
        structlog.contextvars.bound_contextvars(job_uid=status.job_uid),
        span(SPAN_ACCEPT, request.headers.get("traceparent", ""), {ATTRIBUTE_JOB_UID: status.job_uid}) as own,
    ):
        record = command_record(
            command,
            ce_id=str(uuid.uuid4()),
            ce_source=SOURCE,
            time_ms=time.time_ns() // 1_000_000,
            traceparent=own,
            partitions=context.settings.kafka.partitions,
        )
        try:
            await context.writer.write([record])
        except KafkaUnavailable as error:
            raise _unavailable(None if not error.sent else "") from None
        structlog.get_logger().info("cancellation accepted")
    return context.feed.jobs.get(status.job_uid) or status


def _unavailable(key: str | None) -> ProblemError:
    """503. `key` None: nothing left this process. Otherwise the command may have reached Kafka, and the key makes repeating it safe."""
    if key is None:
        return ProblemError(503, "Kafka does not answer, so nothing was accepted; try again", headers={"Retry-After": _RETRY_AFTER_S})
    detail = "Kafka has not acknowledged in time, so it is not known whether this was accepted; send the same again"
    if not key:  # a cancellation, which may be repeated as it is
        return ProblemError(503, detail, headers={"Retry-After": _RETRY_AFTER_S})
    return ProblemError(503, f"{detail} with Idempotency-Key: {key}", headers={"Retry-After": _RETRY_AFTER_S}, idempotencyKey=key)
