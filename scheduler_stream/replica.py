"""The read replica: folds the journal like the scheduler, decides nothing, and answers questions over HTTP.

`python -m opentinker.scheduler_stream.replica`. Routes, behind the API key: `GET /v1/explain/{job_uid}`, `/v1/nodes`, `/v1/limits`; open: `/health`, `/ready`,
`/metrics`. It may lag by milliseconds, and says as of when it speaks.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from opentinker.compose.runtime import kafka, metrics
from opentinker.compose.runtime.http import add_health, add_problem_handlers, check_bearer, metrics_response, serve
from opentinker.compose.runtime.secrets import read_secret
from opentinker.compose.runtime.service import run
from opentinker.compose.runtime.settings import KafkaSettings, Settings
from opentinker.schemas.topics import JOURNAL, partition_of

from .core.explain import explain_job, list_limits, list_nodes, usual_limits
from .log import KafkaLog, LogEntry
from .recovery import Fold, find_replay_from

__all__ = ["Replica", "make_app"]

LAG = metrics.gauge("replica_journal_lag_records", "Journal records not folded yet")
_STALE_S = 30.0  # ticks make the owner write every few seconds; a journal silent for this long has no owner
_SILENT_S = 8.0  # worth telling who asks why something waits


class Replica:
    """Folds of all partitions, kept up to date by one private reader."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self.folds: dict[int, Fold] = {}
        self._reader: AIOKafkaConsumer | None = None
        self._heard_at: dict[int, float] = {}  # partition → the loop's time; absent: not yet
        self._began = 0.0

    async def start(self) -> None:
        """Read every partition's journal from where recovery would start."""
        self._began = asyncio.get_running_loop().time()
        reader = self._reader = kafka.groupless_consumer(self._settings, "scheduler-replica")
        await reader.start()
        places = [TopicPartition(JOURNAL, partition) for partition in range(self._settings.partitions)]
        reader.assign(places)
        for place in places:
            found = await find_replay_from(KafkaLog(self._settings, place.partition, None))
            self.folds[place.partition] = Fold(owner_epoch=found.replay_from.owner_epoch, replay_from=found.replay_from)
            reader.seek(place, found.replay_from.offset)

    async def follow(self, stop: asyncio.Event) -> None:
        """Fold what comes until `stop` is set."""
        reader = self._reader
        assert reader is not None
        while not stop.is_set():
            for place, records in (await reader.getmany(timeout_ms=250, max_records=500)).items():
                fold = self.folds[place.partition]
                for record in records:
                    fold.follow(LogEntry(record.offset, record.value))
                fold.unpublished.clear()  # a replica publishes nothing
                self._heard_at[place.partition] = asyncio.get_running_loop().time()
            LAG.set(sum(max(0, (reader.highwater(place) or 0) - 1 - self.folds[place.partition].through) for place in reader.assignment()))
        await reader.stop()

    async def probe(self) -> dict[str, str]:
        heard = bool(self._heard_at) and min(map(self.silent_s, self._heard_at)) < _STALE_S
        return {"journal": "ok" if heard else "no scheduler has written for a while"}

    def silent_s(self, partition: int) -> float:
        """For how long nobody has written the partition's journal, as far as this process knows."""
        return asyncio.get_running_loop().time() - self._heard_at.get(partition, self._began)

    def explain(self, job_uid: str, pool: str) -> dict[str, Any]:
        """Why the job stands where it stands, or that the scheduler has not taken it; and whether the scheduler is at work at all."""
        partition = partition_of(pool, self._settings.partitions)
        found = explain_job(self.folds[partition].state, job_uid) or {"jobUid": job_uid, "pool": pool, "known": False}
        silent_s = self.silent_s(partition)
        if silent_s > _SILENT_S:
            found["schedulerSilentS"] = round(silent_s)
        return found

    def nodes(self) -> list[dict[str, Any]]:
        return [node for fold in self.folds.values() for node in list_nodes(fold.state)]

    def limits(self) -> list[dict[str, Any]]:
        return [item for fold in self.folds.values() for item in list_limits(fold.state)]


def make_app(replica: Replica, api_key: str) -> FastAPI:
    """The routes. Answers are for the gateway, which checks namespaces; the key is the deployment's own."""
    app = FastAPI(title="OpenTinker scheduler replica", docs_url=None, redoc_url=None, openapi_url=None)
    add_problem_handlers(app)
    add_health(app, "replica", replica.probe)

    @app.get("/v1/explain/{job_uid}")
    async def explain(job_uid: str, request: Request, pool: str = "default") -> Response:
        check_bearer(request, api_key, "API key")
        return JSONResponse(replica.explain(job_uid, pool))

    @app.get("/v1/nodes")
    async def nodes(request: Request) -> Response:
        check_bearer(request, api_key, "API key")
        return JSONResponse({"nodes": replica.nodes()})

    @app.get("/v1/limits")
    async def limits(request: Request) -> Response:
        check_bearer(request, api_key, "API key")
        return JSONResponse({"limits": replica.limits(), "usual": usual_limits()})

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return metrics_response()

    return app


async def _main(settings: Settings, stop: asyncio.Event) -> None:
    api_key = read_secret(settings.api_key_file, "API key")
    replica = Replica(settings.kafka)
    await replica.start()
    following = asyncio.create_task(replica.follow(stop))
    serving = asyncio.create_task(serve(make_app(replica, api_key), settings.scheduler.replica_host, settings.scheduler.replica_port, stop))
    done, _ = await asyncio.wait({following, serving}, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    structlog.get_logger().info("replica stopping", finished=[task.get_name() for task in done])
    await asyncio.gather(following, serving)


if __name__ == "__main__":
    run("replica", _main)
