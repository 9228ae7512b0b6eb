"""`make bench-plane`: the event plane's figures, on one broker with one scheduler and nodes without processes.

Latency is from the broker's stamp on SubmitJob to its stamp on StartAttempt, both on this machine. `python tests/benchmarks/plane.py NAME...` runs some.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import psutil
from campaign import owned_partitions
from fleet import Fleet, Submitter, pools_of
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.scheduler_stream.core.state import State
from opentinker.scheduler_stream.core.step import StepInput, step
from opentinker.schemas.messages import AgentStarted, CancelJob, Device, Heartbeat, JobCancelled, NodeCapacity
from opentinker.schemas.topics import COMMANDS, EVENTS, REPORTS
from own_stack import clean_environment, own_stack
from report import Figure, quantile, report
from scheduler_process import Publisher, TopicReader, Worker

_QUEUED = 100_000


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


async def _owned(worker: Worker, partition: int, timeout_s: float = 120.0) -> float:
    """Seconds until a worker says that it owns a partition."""
    began = time.monotonic()
    while partition not in owned_partitions(worker):
        if time.monotonic() - began > timeout_s:
            raise AssertionError(worker.path.read_text()[-2000:])
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def rates(settings: KafkaSettings, home: Path) -> list[Figure]:
    """Submit to placement at 20 and at 200 jobs a second in one partition: three inputs and up to nine outputs a job."""
    figures = []
    for jobs_per_s, seconds, goals in ((20, 30, (15, 40)), (200, 60, (None, 100))):
        pools = pools_of(settings.partitions, "rate")[:1]
        worker = Worker(clean_environment(home), home / f"rate-{jobs_per_s}.log")
        try:
            async with Fleet(settings, pools, nodes=8) as fleet, Submitter(settings, pools) as submitter:
                await asyncio.sleep(8)
                process, wanted = psutil.Process(worker.process.pid), jobs_per_s * seconds
                before, began = _cpu_s(process), time.monotonic()
                await submitter.at_rate(jobs_per_s, wanted)
                cores = (_cpu_s(process) - before) / (time.monotonic() - began)
                await fleet.until_placed(wanted, 30)
                waits = [fleet.placed_ms[uid] - stamp for uid, stamp in submitter.submitted.items() if uid in fleet.placed_ms]
        finally:
            worker.stop()
        what = f"at {jobs_per_s} jobs/s"
        figures += [
            Figure(name=f"placed {what} for {seconds} s", value=len(waits), unit="jobs", goal=wanted, at_least=True),
            Figure(name=f"submit → placement p50 {what}", value=quantile(waits, 0.5), unit="ms", goal=goals[0]),
            Figure(name=f"submit → placement p95 {what}", value=quantile(waits, 0.95), unit="ms", goal=goals[1]),
            Figure(name=f"scheduler's share of a core {what}", value=cores, unit="cores"),
        ]
    return figures


async def flood(settings: KafkaSettings, home: Path) -> list[Figure]:
    """100,000 submits as fast as Kafka takes them, cancels and placements in the middle of it; then a restart with that queue."""
    pools = pools_of(settings.partitions, "flood")[:1]
    publisher = Publisher(settings, pools[0])
    await publisher.start()
    events = TopicReader(settings, EVENTS)
    await events.start()
    worker = Worker(clean_environment(home), home / "flood.log")
    try:
        async with Fleet(settings, pools, nodes=1, gpus=4) as fleet, Submitter(settings, pools, resources={"cpu": 1, "gpu": 64}) as submitter:
            await asyncio.sleep(8)
            victims = [await publisher.submit(f"victim-{number}", resources={"cpu": 1, "gpu": 64}) for number in range(40)]
            pouring = asyncio.create_task(submitter.at_rate(100_000, _QUEUED))
            waits = []
            for uid in victims:
                await asyncio.sleep(0.5)
                waits.append(await _cancel(publisher, events, uid))
            began = time.monotonic()
            await pouring
            probe = await publisher.submit("small", resources={"cpu": 1, "gpu": 1})
            while probe not in fleet.placed_ms and time.monotonic() - began < 300:
                await events.more(500)
            drained = time.monotonic() - began
            lost = sum(node.acknowledged == 0 for node in fleet.nodes.values())
        worker.stop()
        again = Worker(clean_environment(home), home / "flood-again.log")
        try:
            ready = await _owned(again, publisher.partition)
            memory = psutil.Process(again.process.pid).memory_info().rss / 2**20
        finally:
            again.stop()
    finally:
        worker.stop()
        await publisher.stop()
        await events.stop()
    return [
        Figure(name="cancel p95 in a flood of 100,000 submits", value=quantile(waits, 0.95) / 1000, unit="s", goal=2),
        Figure(name="the flood is stepped after", value=drained, unit="s"),
        Figure(name="nodes lost meanwhile", value=lost, unit="nodes", goal=0),
        Figure(name="restart with 100,000 queued jobs, process start to owned", value=ready, unit="s", goal=8),
        Figure(name="memory of that scheduler", value=memory, unit="MiB"),
    ]


async def _cancel(publisher: Publisher, events: TopicReader, uid: str) -> float:
    """Milliseconds from the broker's stamp on CancelJob to its stamp on JobCancelled."""
    sent = await publisher.put(COMMANDS, CancelJob(job_uid=uid, namespace="default", pool=publisher.pool, requested_by="bench"))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for record in await events.more(50):
            kind = next(value for name, value in record.headers if name == "ce_type")
            if kind == JobCancelled.ce_type().encode() and uid.encode() in record.value:
                return float(record.timestamp - sent.timestamp)
        events.records.clear()
    return 120_000.0


async def heartbeats(settings: KafkaSettings, home: Path) -> list[Figure]:
    """A day of heartbeats of 200 nodes through the core, and ten minutes of them through the broker: memory stays flat."""
    first, last, steps, seconds = _a_day_in_the_core()
    minutes = float(os.environ.get("HEARTBEAT_MINUTES", "10"))
    pools = pools_of(settings.partitions, "beats")[:1]
    worker = Worker(clean_environment(home), home / "beats.log")
    try:
        async with Fleet(settings, pools, nodes=200, gpus=1):
            await asyncio.sleep(30)
            process = psutil.Process(worker.process.pid)
            before = process.memory_info().rss / 2**20
            await asyncio.sleep(minutes * 60)
            after = process.memory_info().rss / 2**20
    finally:
        worker.stop()
    return [
        Figure(name="a day of heartbeats of 200 nodes in the core: growth after the first hour", value=last - first, unit="MiB", goal=2),
        Figure(name="heartbeats stepped in the core", value=steps, unit="steps", beside=("steps/s", steps / seconds)),
        Figure(name=f"{minutes:g} min of 200 heartbeats/s through the broker: growth", value=after - before, unit="MiB", goal=8, beside=("MiB at first", before)),
    ]  # fmt: skip


def _a_day_in_the_core() -> tuple[float, float, int, float]:
    """(MiB after an hour, MiB after the day, steps, seconds)."""
    state, now, offset, began = State(), 1_800_000_000_000, 0, time.monotonic()
    capacity = NodeCapacity(cpu_millis=8000, memory_bytes=2**34, devices=tuple(Device(index=i) for i in range(8)))
    names = [f"node-{number}" for number in range(200)]

    def put(message: AgentStarted | Heartbeat) -> None:
        nonlocal offset
        offset += 1
        step(state, StepInput(topic=REPORTS, partition=0, offset=offset, append_time_ms=now, message=message))

    for name in names:
        put(
            AgentStarted(
                node=name, incarnation="1", pool="default", boot_id="b", agent_version="0", capacity=capacity, address="127.0.0.1", port_low=1024, port_high=2048
            )
        )  # fmt: skip
    resident, first = psutil.Process(), 0.0
    for second in range(0, 86_400, 2):
        for name in names:
            now += 10
            put(Heartbeat(node=name, incarnation="1", pool="default", sequence=second // 2 + 1, applied_seq=0))
        if second == 3_600:
            first = resident.memory_info().rss / 2**20
        if second % 7_200 == 0:
            print(f"  hour {second // 3600} of 24, {resident.memory_info().rss / 2**20:.1f} MiB", flush=True)
    return first, resident.memory_info().rss / 2**20, offset, time.monotonic() - began


PARTS: dict[str, Callable[[KafkaSettings, Path], Awaitable[list[Figure]]]] = {"rates": rates, "flood": flood, "heartbeats": heartbeats}


def main() -> None:
    figures: list[Figure] = []
    for name in sys.argv[1:] or PARTS:
        with own_stack("kafka") as stack:
            figures += asyncio.run(PARTS[name](stack.settings.kafka, stack.home))  # type: ignore[arg-type]
    report("plane", figures)


if __name__ == "__main__":
    main()
