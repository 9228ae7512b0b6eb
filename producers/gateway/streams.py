"""Server-sent events: jobs, metrics and log lines as they come.

Heartbeat comments keep proxies and readers awake; a metric's event id is its place on the topic, so a reader that was away goes on from `Last-Event-ID`, or
is told once to read anew (`resync`). Queues are bounded: who is too slow gets a `resync` too. A dropped stream changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from opentinker.compose.runtime.http import ProblemError
from opentinker.compose.runtime.metrics import gauge
from opentinker.schemas.messages import JobStatus, LogLines, TrainingMetrics

from ..core.tail import Entry, parse_position
from ..core.views import iso, job_view
from ..live import Channel, Lagged, Subscription
from .context import GatewayContext
from .jobs import Namespace, log_line_view, number

__all__ = ["stream_routes"]

_HEARTBEAT_S = 10  # proxies cut quiet connections at 30 to 60 s
_STREAMS_MAX = 500  # each holds a task and a bounded queue
_LOST = "event: resync\ndata: {}\n\n"

_STREAMS = gauge("gateway_streams", "Open event streams")


def stream_routes(context: GatewayContext) -> APIRouter:
    router = APIRouter()
    streams = _Streams(context)

    @router.get("/v1/jobs/stream", response_class=StreamingResponse)
    async def jobs(namespace: Annotated[str | None, Query(max_length=63)] = None) -> Response:
        """Every change of a job, as it becomes known. Read the list first; after a reconnect read it again."""

        def frame(entry: Entry[JobStatus]) -> str:
            return "" if namespace not in (None, entry.item.namespace) else _frame("job", job_view(entry.item))

        return streams.open(("jobs", ""), lambda subscription: streams.follow(subscription, frame))

    @router.get("/v1/jobs/{job}/metrics/stream", response_class=StreamingResponse)
    async def metrics(job: str, request: Request, namespace: Namespace = "default", rank: Annotated[int, Query(ge=0, lt=4096)] = 0) -> Response:
        """New samples of a job's metrics."""
        job_uid = (await context.job(job, namespace)).job_uid
        last = request.headers.get("last-event-id", "")
        return streams.open(("metrics", job_uid), lambda subscription: _metrics(context, streams, subscription, job_uid, rank, last))

    @router.get("/v1/jobs/{job}/logs")
    async def logs(
        job: str,
        namespace: Namespace = "default",
        lines: Annotated[int, Query(ge=1, le=5000)] = 200,
        rank: Annotated[int | None, Query(ge=0, lt=4096)] = None,
        attempt: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
        follow: bool = False,
    ) -> Response:
        """The newest lines of a job's output; with `follow`, an event stream that goes on."""
        job_uid = (await context.job(job, namespace)).job_uid

        async def tail() -> list[dict[str, Any]]:
            return [log_line_view(line) for line in await context.read.log_tail(job_uid, lines=lines, rank=rank, attempt=attempt)]

        if not follow:
            return JSONResponse({"items": await tail()})
        return streams.open(("logs", job_uid), lambda subscription: _logs(streams, subscription, tail, rank, attempt))

    return router


class _Streams:
    """Opens streams within the bound, and ends them when the service stops."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._open = 0

    def open(self, channel: Channel, frames: Callable[[Subscription], AsyncIterator[str]]) -> Response:
        if self._open >= _STREAMS_MAX:
            raise ProblemError(503, f"{_STREAMS_MAX} streams are open here; try again later or ask without a stream", headers={"Retry-After": "10"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._run(channel, frames), media_type="text/event-stream", headers=headers)

    async def _run(self, channel: Channel, frames: Callable[[Subscription], AsyncIterator[str]]) -> AsyncIterator[str]:
        self._open += 1
        _STREAMS.set(self._open)
        try:
            with self._context.feed.listen(channel) as subscription:
                yield "retry: 2000\n\n"
                async for frame in frames(subscription):
                    yield frame
        finally:
            self._open -= 1
            _STREAMS.set(self._open)

    async def follow(self, subscription: Subscription, frame: Callable[[Entry[Any]], str]) -> AsyncIterator[str]:
        """Frames of entries as they come, with heartbeats; ends with the service."""
        quiet_s = 0
        while not self._context.stop.is_set():
            try:
                entry = await subscription.next(1.0)
            except Lagged:
                yield _LOST
                continue
            text = frame(entry) if entry is not None else ""
            quiet_s = 0 if text else quiet_s + (1 if entry is None else 0)
            if text:
                yield text
            elif quiet_s >= _HEARTBEAT_S:
                quiet_s = 0
                yield ": still here\n\n"


async def _metrics(
    context: GatewayContext, streams: _Streams, subscription: Subscription, job_uid: str, rank: int, last_event_id: str
) -> AsyncIterator[str]:
    """What came after `last_event_id`, or a resync; then what comes."""
    sent: dict[int, int] = {}  # partition → newest offset that was sent; the queue may repeat what the ring held

    def frame(entry: Entry[TrainingMetrics]) -> str:
        if entry.item.replica_rank != rank or entry.offset <= sent.get(entry.partition, -1):
            return ""
        sent[entry.partition] = entry.offset
        return _frame("metrics", _sample_view(entry.item), entry.position)

    if last_event_id:
        position = parse_position(last_event_id)
        missed = context.feed.metrics.after(job_uid, position) if position else None
        if missed is None:
            yield _LOST
        for entry in missed or ():
            if text := frame(entry):
                yield text
    async for text in streams.follow(subscription, frame):
        yield text


async def _logs(streams: _Streams, subscription: Subscription, tail: Callable[[], Any], rank: int | None, attempt: int | None) -> AsyncIterator[str]:
    """The tail, then new lines, each once: the live topic and the database overlap."""
    sent: dict[tuple[int, int, str], int] = {}

    def fresh(line: dict[str, Any]) -> bool:
        place = (line["attempt"], line["rank"], line["stream"])
        if line["line"] <= sent.get(place, -1):
            return False
        sent[place] = line["line"]
        return True

    def frame(entry: Entry[LogLines]) -> str:
        block = entry.item
        if rank not in (None, block.replica_rank) or attempt not in (None, block.attempt_number):
            return ""
        lines = [line for line in _block_view(block) if fresh(line)]
        return _frame("lines", {"items": lines}, entry.position) if lines else ""

    history = await tail()
    yield _frame("lines", {"items": [line for line in history if fresh(line)]})
    async for text in streams.follow(subscription, frame):
        yield text


def _block_view(block: LogLines) -> list[dict[str, Any]]:
    return [
        log_line_view(
            {
                "attempt_number": block.attempt_number,
                "replica_rank": block.replica_rank,
                "stream": block.stream,
                "node": block.node,
                "time_ms": block.time_ms,
                "line_number": block.first_line + position,
                "text": text,
                "dropped": block.dropped if position == 0 else 0,
            }
        )
        for position, text in enumerate(block.lines)
    ]


def _sample_view(sample: TrainingMetrics) -> dict[str, Any]:
    return {
        "attempt": sample.attempt_number,
        "rank": sample.replica_rank,
        "node": sample.node,
        "globalStep": sample.global_step,
        "update": sample.update,
        "time": iso(sample.time_ms),
        "timeMs": sample.time_ms,
        "values": {name: number(value) for name, value in sample.values.items()},
    }


def _frame(event: str, data: dict[str, Any], identifier: str = "") -> str:
    """One event. JSON holds no raw newline, so one data line is enough."""
    head = f"id: {identifier}\n" if identifier else ""
    return f"{head}event: {event}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
