"""`python -m opentinker.scheduler_stream`: one scheduler worker, until SIGTERM."""

from __future__ import annotations

import asyncio

from opentinker.compose.runtime.metrics import start_exporter
from opentinker.compose.runtime.service import run
from opentinker.compose.runtime.settings import Settings

from .shell import Worker


async def _main(settings: Settings, stop: asyncio.Event) -> None:
    worker = Worker(settings)
    start_exporter(settings.scheduler.metrics_port, ready=worker.readiness)
    await worker.run(stop)


if __name__ == "__main__":
    run("scheduler", _main)
