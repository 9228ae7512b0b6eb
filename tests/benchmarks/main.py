"""`make bench-main`: the figures of the main job. Warm start, idle memory, submit to placement through real Kafka, the demo and its training time.

Everything runs in homes of its own and is stopped at the end.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import stack as stack_benchmark
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import settings_of
from opentinker.compose.local.progress import SilentProgress
from opentinker.compose.local.stack import down
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.producers.client import Client
from opentinker.schemas.messages import StartAttempt
from opentinker.schemas.topics import COMMANDS, PLACEMENTS, REPORTS
from own_stack import own_stack
from report import Figure, quantile, report
from scheduler_process import FakeNode, Publisher, TopicReader

_JOBS_PER_S, _JOBS = 20, 600


async def scheduling(settings: KafkaSettings) -> list[Figure]:
    """Broker stamp of SubmitJob to broker stamp of StartAttempt, at 20 jobs a second; beside it, a bare append to the same broker."""
    publisher = Publisher(settings, f"bench-{uuid.uuid4().hex[:8]}")
    await publisher.start()
    commands, placements = TopicReader(settings, COMMANDS), TopicReader(settings, PLACEMENTS)
    await commands.start()
    await placements.start()
    async with FakeNode(settings, publisher, f"n-{publisher.pool}", gpus=256):
        await asyncio.sleep(2)
        began = time.monotonic()
        for number in range(_JOBS):
            await publisher.submit(f"job-{number}")
            await asyncio.sleep(max(0.0, began + (number + 1) / _JOBS_PER_S - time.monotonic()))
        await asyncio.sleep(2)
        for reader in (commands, placements):
            while await reader.more(500):
                pass
    submitted = {
        getattr(envelope.message, "job_uid", ""): record.timestamp for envelope, record in zip(commands.decoded(), commands.records, strict=True)
    }
    waits = []
    for envelope, record in zip(placements.decoded(), placements.records, strict=True):
        message = envelope.message
        if isinstance(message, StartAttempt) and message.attempt_number == 1 and message.job_uid in submitted:
            waits.append(record.timestamp - submitted[message.job_uid])
    bare = await _bare_appends(publisher)
    for closing in (commands, placements, publisher):
        await closing.stop()
    return [
        Figure(name=f"submit → placement p50 at {_JOBS_PER_S} jobs/s", value=quantile(waits, 0.5), unit="ms", beside=("bare append p50, ms", quantile(bare, 0.5))),
        Figure(
            name=f"submit → placement p95 at {_JOBS_PER_S} jobs/s", value=quantile(waits, 0.95), unit="ms", goal=50,
            beside=("bare append p95, ms", quantile(bare, 0.95)),
        ),
        Figure(name="jobs placed", value=len(waits), unit="jobs", goal=_JOBS, at_least=True),
    ]  # fmt: skip


async def _bare_appends(publisher: Publisher) -> list[float]:
    waits = []
    for _ in range(300):
        began = time.monotonic()
        await publisher.raw(REPORTS + ".dlq", b"x" * 3_000, (), partition=0)
        waits.append((time.monotonic() - began) * 1000)
    return waits


def training(home: Path) -> list[Figure]:
    """A warm `make demo`, and how long its gang of four trained."""
    environment = {**os.environ, "OPENTINKER_HOME": str(home)}
    down(Home(home), SilentProgress())
    began = time.monotonic()
    status = subprocess.run([sys.executable, "-m", "opentinker.compose.local.demo"], env=environment, check=False).returncode
    seconds = time.monotonic() - began
    settings = settings_of(home)
    with Client(settings.gateway.url, settings.api_key_file.read_text().strip()) as client:
        view = client.job("cartpole-v1")
    assert view.status.started_at
    assert view.status.finished_at
    trained = (datetime.fromisoformat(view.status.finished_at) - datetime.fromisoformat(view.status.started_at)).total_seconds()
    progress = view.status.progress
    return [
        Figure(name="warm make demo, start-up included", value=seconds, unit="s", goal=150),
        Figure(name="make demo exit code", value=status, unit="", goal=0),
        Figure(name="CartPole solved by a gang of four", value=trained, unit="s", goal=120),
        Figure(name="mean return of the last 100 episodes", value=progress.mean_return or 0.0, unit="", goal=475, at_least=True),
        Figure(name="environment steps trained", value=progress.global_step, unit="steps"),
        Figure(name="environment steps per second", value=progress.global_step / trained, unit="steps/s"),
    ]


def main() -> None:
    figures = stack_benchmark.measure()
    with own_stack() as stack:
        figures += asyncio.run(scheduling(stack.settings.kafka))
        figures += training(stack.home)
    report("main", figures)


if __name__ == "__main__":
    main()
