"""What the gateway's routes share: the live view, the writer to Kafka, the read side, and the neighbours over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from opentinker.compose.runtime.http import ProblemError
from opentinker.compose.runtime.settings import Settings
from opentinker.registry.read import ReadSide
from opentinker.schemas.errors import FieldError
from opentinker.schemas.messages import JobPhase, JobStatus

from ..client.naming import may_begin_uid
from ..limits import QueueLimits
from ..live import LiveFeed
from ..writer import CommandWriter

__all__ = ["GatewayContext", "NEIGHBOUR_TIMEOUT_S"]  # noqa: RUF022

NEIGHBOUR_TIMEOUT_S = 5.0
_UID_DASHES = (8, 13, 18, 23)
_CANDIDATES_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    settings: Settings
    feed: LiveFeed
    writer: CommandWriter
    read: ReadSide
    http: httpx.AsyncClient
    environments: Mapping[str, float | None]  # id → the mean return that counts as solved, where one is registered
    api_key: str  # which the scheduler's replica asks for, too
    registry_token: str | None  # None: this gateway gives no download URLs
    stop: asyncio.Event
    limits: QueueLimits
    doubtful: dict[str, None] = field(default_factory=dict)  # submissions by uid that Kafka may have or not, the newest last; a bounded number
    in_flight: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # submissions by uid that wait for Kafka's ack

    async def job(self, identifier: str, namespace: str) -> JobStatus:
        """The job of that uid, or the newest of that name, or the only one whose uid begins so; from the live view, else, by its whole uid, from history.

        Raises ProblemError 404, or 409 where several begin so.
        """
        if looks_like_uid(identifier):
            status = self.feed.jobs.get(identifier) or history_status(await self.read.job(identifier))
        else:
            status = self.feed.jobs.named(namespace, identifier) or self._beginning(identifier)
        if status is None:
            where = "" if looks_like_uid(identifier) else f" in namespace {namespace[:63]!r}"
            error = FieldError(field="job", message=f"there is no job {identifier[:63]!r}{where}", remedy="see opentinker get jobs")
            raise ProblemError(404, error.text(), [error])
        return status

    def _beginning(self, identifier: str) -> JobStatus | None:
        if not may_begin_uid(identifier):
            return None
        found = self.feed.jobs.beginning(identifier, _CANDIDATES_MAX)
        if len(found) > 1:
            listed = ", ".join(f"{status.job_uid} ({status.namespace}/{status.name})" for status in found)
            error = FieldError(field="job", message=f"several uids begin with {identifier}: {listed}", remedy="write more of it")
            raise ProblemError(409, error.text(), [error])
        return found[0] if found else None


def looks_like_uid(text: str) -> bool:
    return len(text) == 36 and all(text[position] == "-" for position in _UID_DASHES)


def history_status(row: dict[str, Any] | None) -> JobStatus | None:
    """A job that the live view has forgotten, as far as the registry's history tells."""
    if row is None:
        return None
    spec = row["spec"] or {}
    return JobStatus.model_construct(
        job_uid=row["job_uid"],
        namespace=row["namespace"],
        name=row["name"],
        pool=row["pool"],
        revision=row["revision"],
        phase=JobPhase(row["phase"]),
        reason=row["reason"],
        message=row["message"],
        labels=row["labels"] or {},
        spec=spec,
        spec_digest=row["spec_digest"] or "",
        submitted_by=row["submitted_by"] or "",
        attempt_number=row["attempt_number"],
        replicas=int(spec.get("replicas", 1)),
        stop_reason=row["stop_reason"] or "",
        submitted_ms=row["submitted_ms"] or row["updated_ms"],
        finished_ms=row["finished_ms"],
        updated_ms=row["updated_ms"],
    )
