"""A broker that takes requests and does not answer: the worker ends, soon and by name, and what it may have written is not done twice."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from broker_proxy import PRODUCE, BrokerProxy
from opentinker.schemas.messages import JobCompleted, JobPhase, JobSubmitted
from scheduler_process import FakeNode, Publisher, Worker, events_of, statuses, until_logged

pytestmark = pytest.mark.stack


async def test_a_worker_whose_appends_are_not_answered_ends_and_another_goes_on(stack: Any, tmp_path: Path) -> None:
    settings = stack.settings.kafka
    publisher = Publisher(settings, f"pool-{uuid.uuid4().hex[:8]}")
    await publisher.start()
    async with BrokerProxy(settings.bootstrap_servers) as proxy, FakeNode(settings, publisher, f"n-{publisher.pool}") as node:
        worker = Worker(stack.environment(OPENTINKER_KAFKA__BOOTSTRAP_SERVERS=proxy.bootstrap), tmp_path / "worker.log")
        other = None
        try:
            await until_logged(worker, "partition owned", settings.partitions)
            proxy.swallowing = {PRODUCE}
            uid = await publisher.submit("written-or-not")
            assert await asyncio.to_thread(worker.process.wait, 40) == 1
            assert "no answer from the journal within 5 s" in worker.path.read_text()
            assert proxy.swallowed
            other = Worker(stack.environment(), tmp_path / "other.log")
            assert (await statuses(settings, {uid}))[uid].phase is JobPhase.COMPLETED
        finally:
            for each in (worker, other):
                if each is not None:
                    await asyncio.to_thread(each.stop)
        kinds = [type(event) for event in await events_of(settings, {uid})]
        assert kinds.count(JobSubmitted) == kinds.count(JobCompleted) == 1
        assert node.overlaps == []
    await publisher.stop()
