"""Server-sent events: jobs, metrics and log lines as they come.

Heartbeat comments keep proxies and readers awake; a metric's event id is its place on the topic, so a reader that was away goes on from `Last-Event-ID`,
or is told once to read anew (`resync`). Queues are bounded: who is too slow gets a `resync` too. Streams of a job that is over end with `end`. A dropped
stream changes nothing.
"""

from __future__ import annotations

import itertools
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
_QUIET_END_S = 3  # a job that is over and says nothing for this long has said everything
_STREAMS_MAX = 500  # each holds a task and a bounded queue
_RESYNC = 'event: resync\ndata: {"resync":true}\n\n'
_END = "event: end\ndata: {}\n\n"

_STREAMS = gauge("gateway_streams", "Open event streams")


def stream_routes(context: GatewayContext) -> APIRouter:
    router = APIRouter()
    streams = _Streams(context)

    @router.get("/v1/watch/jobs", response_class=StreamingResponse)
    async def jobs(namespace: Annotated[str | None, Query(max_length=63)] = None) -> Response:
        """Every change of a job, as it becomes known. Read the list first; after a reconnect read it again."""

        def frame(entry: Entry[JobStatus]) -> str:
            return "" if namespace not in (None, entry.item.namespace) else _frame("job", job_view(entry.item))

        return streams.open(("jobs", ""), lambda subscription: streams.follow(subscription, frame, None))

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
        tail: Annotated[int, Query(ge=0, le=10_000, description="lines from the end")] = 200,
        rank: Annotated[int | None, Query(ge=0, lt=4096)] = None,
        attempt: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
        follow: bool = False,
    ) -> Response:
        """The newest lines of a job's output; with `follow`, an event stream that goes on."""
        job_uid = (await context.job(job, namespace)).job_uid

        async def lines() -> list[dict[str, Any]]:
            return [log_line_view(line) for line in await context.read.log_tail(job_uid, lines=tail, rank=rank, attempt=attempt)]

        if not follow:
            return JSONResponse({"items": await lines()})
        return streams.open(("logs", job_uid), lambda subscription: _logs(streams, subscription, lines, job_uid, rank, attempt))

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

    async def follow(self, subscription: Subscription, frame: Callable[[Entry[Any]], str], job_uid: str | None) -> AsyncIterator[str]:
        """Frames of entries as they come, with heartbeats; ends with the service, and with the job if one is named."""
        quiet_s = 0
        while not self._context.stop.is_set():
            try:
                entry = await subscription.next(1.0)
            except Lagged:
                yield _RESYNC
                continue
            if entry is not None:
                quiet_s = 0
                if text := frame(entry):
                    yield text
                continue
            quiet_s += 1
            if job_uid is not None and quiet_s >= _QUIET_END_S and self._over(job_uid):
                yield _END
                return
            if quiet_s % _HEARTBEAT_S == 0:
                yield ": still here\n\n"

    def _over(self, job_uid: str) -> bool:
        status = self._context.feed.jobs.get(job_uid)
        return status is None or status.phase.terminal


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
            yield _RESYNC
        for entry in missed or ():
            if text := frame(entry):
                yield text
    async for text in streams.follow(subscription, frame, job_uid):
        yield text


async def _logs(
    streams: _Streams, subscription: Subscription, tail: Callable[[], Any], job_uid: str, rank: int | None, attempt: int | None
) -> AsyncIterator[str]:
    """The tail, then new lines, each once: the live topic and the database overlap. One event holds lines that follow each other."""
    sent: dict[tuple[int, int, str], int] = {}

    def fresh(line: dict[str, Any]) -> bool:
        place = _place(line)
        if line["lineNumber"] <= sent.get(place, -1):
            return False
        sent[place] = line["lineNumber"]
        return True

    def frames(lines: list[dict[str, Any]]) -> str:
        blocks = itertools.groupby([line for line in lines if fresh(line)], key=_place)
        return "".join(_frame("lines", _block_of(list(block))) for _, block in blocks)

    def frame(entry: Entry[LogLines]) -> str:
        block = entry.item
        if rank not in (None, block.replica_rank) or attempt not in (None, block.attempt_number):
            return ""
        return frames(_lines_of(block))

    if text := frames(await tail()):
        yield text
    async for text in streams.follow(subscription, frame, job_uid):
        yield text


def _place(line: dict[str, Any]) -> tuple[int, int, str]:
    return line["attempt"], line["replicaRank"], line["stream"]


def _block_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Lines of one replica's stream as one object."""
    first = lines[0]
    shared = {name: first[name] for name in ("attempt", "replicaRank", "stream", "node", "time")}
    texts = [line["text"] for line in lines]
    return shared | {"firstLine": first["lineNumber"], "dropped": sum(line["dropped"] for line in lines), "lines": texts}


def _lines_of(block: LogLines) -> list[dict[str, Any]]:
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
        "replicaRank": sample.replica_rank,
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
