"""Every operation of the API as a value, and every answer as a value or an error. No I/O: both clients share this."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentinker.schemas.errors import FieldError
from pydantic import ValidationError

from . import errors
from .naming import check_job, check_name

__all__ = [
    "ATTEMPTS_MAX",
    "Call",
    "cancel_job",
    "delay_before_retry",
    "explain_job",
    "failure_of",
    "get_job",
    "job_checkpoints",
    "job_events",
    "job_logs",
    "job_metrics",
    "list_algorithms",
    "list_jobs",
    "list_limits",
    "list_models",
    "list_nodes",
    "may_retry",
    "model_version",
    "submit_job",
]

ATTEMPTS_MAX = 4
_RETRY_STATUSES = frozenset({429, 502, 503, 504})
_RETRY_DELAY_MAX_S = 10.0
_QUEUE_FULL = "QueueFull"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request. `repeatable`: the same again does no harm."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True


def submit_job(manifest: Mapping[str, Any] | str | bytes, *, idempotency_key: str | None = None, dry_run: bool = False) -> Call:
    """A manifest as an object, or as JSON or YAML text. A key is always sent, so that a retry is not a second job."""
    if isinstance(manifest, Mapping):
        body, content_type = json.dumps(manifest).encode(), "application/json"
    else:
        body = manifest.encode() if isinstance(manifest, str) else manifest
        content_type = "application/json" if body.lstrip()[:1] in (b"{", b"[", b'"') else "application/yaml"
    headers = {"Content-Type": content_type, "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    return Call(method="POST", path="/v1/jobs", params={"dryRun": "true"} if dry_run else {}, body=body, headers=headers)


def list_jobs(*, namespace: str | None = None, phase: str | None = None, cursor: str | None = None, limit: int = 100) -> Call:
    wanted = {"namespace": None if namespace is None else check_name("namespace", namespace), "phase": phase, "cursor": cursor, "limit": str(limit)}
    return Call(method="GET", path="/v1/jobs", params={key: value for key, value in wanted.items() if value is not None})


def get_job(job: str, namespace: str = "default") -> Call:
    return _job("GET", job, "", namespace)


def cancel_job(job: str, namespace: str = "default", reason: str = "") -> Call:
    return _job("POST", job, "/cancel", namespace, {"reason": reason} if reason else {})


def explain_job(job: str, namespace: str = "default") -> Call:
    return _job("GET", job, "/explain", namespace)


def job_events(job: str, namespace: str = "default") -> Call:
    return _job("GET", job, "/events", namespace)


def job_metrics(job: str, namespace: str = "default", stream: bool = False) -> Call:
    return _job("GET", job, "/metrics/stream" if stream else "/metrics", namespace)


def job_logs(job: str, namespace: str = "default", *, tail: int = 200, follow: bool = False) -> Call:
    return _job("GET", job, "/logs", namespace, {"tail": str(tail)} | ({"follow": "true"} if follow else {}))


def list_nodes() -> Call:
    return Call(method="GET", path="/v1/nodes")


def list_limits() -> Call:
    return Call(method="GET", path="/v1/limits")


def list_models(namespace: str = "default") -> Call:
    return Call(method="GET", path="/v1/models", params={"namespace": check_name("namespace", namespace)})


def model_versions(name: str, namespace: str = "default") -> Call:
    return Call(method="GET", path=f"/v1/models/{check_name('namespace', namespace)}/{check_name('model', name)}")


def model_version(name: str, version: int, namespace: str = "default") -> Call:
    return Call(method="GET", path=f"/v1/models/{check_name('namespace', namespace)}/{check_name('model', name)}/versions/{version}")


def job_checkpoints(job: str, namespace: str = "default") -> Call:
    return _job("GET", job, "/checkpoints", namespace)


def list_algorithms() -> Call:
    return Call(method="GET", path="/v1/algorithms")


def _job(method: str, job: str, rest: str, namespace: str, more: Mapping[str, str] | None = None) -> Call:
    """A call about one job. Raises InvalidRequestError for what is no name: in an address it would mean another place."""
    params = {"namespace": check_name("namespace", namespace)} | dict(more or {})
    return Call(method=method, path=f"/v1/jobs/{check_job(job)}{rest}", params=params)


def may_retry(call: Call, status: int | None, body: bytes = b"") -> bool:
    """Whether to try again after that answer (None: no answer). A full queue is an answer, not a fault of the moment: it stays full for longer."""
    if status == 429 and _member(body, "reason") == _QUEUE_FULL:
        return False
    return call.repeatable and (status is None or status in _RETRY_STATUSES)


def _member(body: bytes, name: str) -> object:
    """Of a problem document."""
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document.get(name) if isinstance(document, dict) else None


def delay_before_retry(attempt: int, retry_after: str | None, jitter: float) -> float:
    """Seconds before attempt `attempt` + 1; `jitter` in 0..1 spreads them."""
    base = 0.2 * 2.0**attempt
    if retry_after is not None and retry_after.isdigit():
        base = max(base, float(retry_after))
    return float(min(_RETRY_DELAY_MAX_S, base) * (0.75 + jitter / 2))


def failure_of(status: int, body: bytes) -> errors.OpenTinkerError:
    """An answer of 400 and above as the typed error it is."""
    detail, found = f"the gateway answered {status}", []
    try:
        document = json.loads(body)
        detail = str(document.get("detail") or detail)
        found = [FieldError.model_validate(each) for each in document.get("errors", ())]
    except (ValueError, AttributeError, ValidationError):
        pass  # not one of our problem documents: a proxy's page, for example
    text = "\n".join(error.text() for error in found) or detail
    kinds: dict[int, type[errors.OpenTinkerError]] = {
        401: errors.AuthenticationError,
        403: errors.ForbiddenError,
        404: errors.NotFoundError,
        409: errors.ConflictError,
        429: errors.UnavailableError,
        503: errors.UnavailableError,
    }
    kind = kinds.get(status, errors.ServerError if status >= 500 else errors.InvalidRequestError)
    if status == 429 and _member(body, "reason") == _QUEUE_FULL:
        kind = errors.QueueFullError
    elif status == 503 and _member(body, "idempotencyKey"):
        kind = errors.UnknownOutcomeError
    return kind(text, status, found)
