"""Several workers under load: rolling restarts, upgrades and rollbacks, owners that sleep through a takeover. Nothing lost, nothing twice, and the fault
was seen to bite."""

from __future__ import annotations

import asyncio
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
from failpoints import LAUNCHER, failing, hits
from opentinker.scheduler_stream.core.policy import CORE_VERSION
from opentinker.schemas.topics import EVENTS
from scheduler_load import check, fold_of, load, voids_since
from scheduler_process import FakeNode, Publisher, TopicReader, Worker, owned_epochs

pytestmark = [pytest.mark.stack, pytest.mark.slow]


class Fleet:
    """Workers that come and go; all are stopped at the end."""

    def __init__(self, stack: Any, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.workers: list[Worker] = []

    def start(self, launcher: str | None = None, environment: dict[str, str] | None = None, **additions: str) -> Worker:
        worker = Worker((environment or self._stack.environment()) | additions, self._folder / f"worker-{len(self.workers)}.log", launcher=launcher)
        self.workers.append(worker)
        return worker

    async def stop(self, worker: Worker) -> int:
        return await asyncio.to_thread(worker.stop)

    async def until_all_owned(self, partitions: int) -> None:
        """The newest owner of every partition lives."""
        for partition in range(partitions):
            async with asyncio.timeout(60):
                while (await self.until_owner(partition)).process.poll() is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    async def until_owner(self, partition: int, but: Worker | None = None) -> Worker:
        """The worker that took a partition over last; waits until one other than `but` has."""
        async with asyncio.timeout(60):
            while True:
                owners = {epoch: worker for worker in self.workers for epoch in owned_epochs(worker, partition)}
                newest = owners[max(owners)] if owners else None
                if newest is not None and newest is not but:
                    return newest
                await asyncio.sleep(0.1)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            await self.stop(worker)


async def test_a_rolling_restart_loses_nothing_and_every_worker_ends_well(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    async with Fleet(stack, tmp_path) as fleet, FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}") as node:
        for _ in range(3):
            fleet.start()
        await fleet.until_owner(publisher.partition)
        ended = []

        async def roll() -> None:
            for worker in list(fleet.workers):
                await asyncio.sleep(2)
                fleet.start()
                ended.append(await fleet.stop(worker))
                await fleet.until_all_owned(stack.settings.kafka.partitions)

        await check(stack, await load(publisher, roll(), 100), node)
        assert ended == [0, 0, 0]


async def test_upgrade_and_rollback_in_mid_load(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    """Two core versions by turns: each reads what the other wrote, as long as nothing in it is unknown to it."""
    async with Fleet(stack, tmp_path) as fleet, FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}") as node:
        worker = fleet.start(LAUNCHER, CORE_VERSION=str(CORE_VERSION - 1))
        await fleet.until_owner(publisher.partition)
        switched = []

        async def switch() -> None:
            nonlocal worker
            for version, kind in ((CORE_VERSION, signal.SIGTERM), (CORE_VERSION - 1, signal.SIGKILL), (CORE_VERSION, signal.SIGKILL)):
                await asyncio.sleep(3)
                following = fleet.start(LAUNCHER, CORE_VERSION=str(version))
                worker.signal(kind)
                await asyncio.to_thread(worker.process.wait, 30)
                owner = await fleet.until_owner(publisher.partition, but=worker)
                assert owner is following
                switched.append(version)
                worker = following

        await check(stack, await load(publisher, switch(), 200), node)
        assert switched == [CORE_VERSION, CORE_VERSION - 1, CORE_VERSION]
        refused = fleet.start(LAUNCHER, CORE_VERSION=str(CORE_VERSION - 2))
        assert await fleet.stop(worker) == 0
        assert await asyncio.to_thread(refused.process.wait, 60) == 1
        said = f"was written by core version {CORE_VERSION}, this is core version {CORE_VERSION - 2}; install the newer release again"
        assert said in refused.path.read_text()


@pytest.mark.parametrize("place", ["cycle.stepped", "cycle.appended", "status.begun", "ownership.started"])
async def test_an_owner_that_sleeps_through_a_takeover_does_no_harm(stack: Any, publisher: Publisher, tmp_path: Path, place: str) -> None:
    settings, partition = stack.settings.kafka, publisher.partition
    events = TopicReader(settings, EVENTS)
    await events.start()
    async with Fleet(stack, tmp_path) as fleet, FakeNode(settings, publisher, f"n-{publisher.pool}") as node:
        log = tmp_path / "hits.jsonl"
        after = 1 if place.startswith("ownership") else 20
        sleeper = fleet.start(LAUNCHER, failing(stack.environment(), place, "stop", log, after=after, partition=partition))
        if after > 1:
            await fleet.until_owner(partition)

        async def sleep_and_wake() -> None:
            async with asyncio.timeout(60):
                while not hits(log):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            other = fleet.start()
            assert await fleet.until_owner(partition, but=sleeper) is other
            await asyncio.sleep(1)
            sleeper.signal(signal.SIGCONT)
            if place != "ownership.started":
                assert await asyncio.to_thread(sleeper.process.wait, 60) == 1

        before = await fold_of(settings, partition)
        uids = await load(publisher, sleep_and_wake(), 100)
        await check(stack, uids, node)
        ended, said = await fleet.stop(sleeper), sleeper.path.read_text()
        if ended == 0:  # it had stepped nothing, and heard from its group first that the partition is another's: it lived on as a standby
            assert place == "ownership.started"
        else:
            # Which it meets first: the newer owner's record, its fenced producer, or that its own wait ran out while it slept.
            ways = ("a newer owner started at journal offset", "the status producer was fenced", "no answer from the journal within")
            assert any(way in said for way in ways)
        if place == "cycle.stepped":  # it wrote, and nobody counts it
            assert await voids_since(settings, partition, before) > 0
        if place == "status.begun" and "no answer from the journal within" not in said:
            assert "the status producer was fenced" in said
        same_bytes(await all_of(events))
    await events.stop()


async def all_of(reader: TopicReader) -> list[Any]:
    for _ in range(5):
        await reader.more(500)
    return reader.records


def same_bytes(records: list[Any]) -> None:
    """Published twice is published identically: one id, one value."""
    seen: dict[bytes, int] = {}
    for record in records:
        assert seen.setdefault(dict(record.headers)["ce_id"], zlib.crc32(record.value)) == zlib.crc32(record.value)
