"""`opentinker scheduler adopt` on the real broker: a worker that refuses to guess, an administrator who decides, and what happens to jobs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from broker_mischief import make_anew
from command import ok, opentinker
from opentinker.schemas.messages import JobFailed, JobPhase, JournalAdopted
from opentinker.schemas.topics import ALERTS, COMMANDS, JOURNAL, STATUS
from scheduler_process import FakeNode, Publisher, TopicReader, Worker, events_of, statuses

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture
def stack(own_kafka: Any) -> Any:
    """Of its own: topics are deleted here, and whoever came later would be refused."""
    return own_kafka


@pytest.fixture
async def alerts(stack: Any) -> AsyncIterator[TopicReader]:
    reader = TopicReader(stack.settings.kafka, ALERTS, 1)
    await reader.start()
    yield reader
    await reader.stop()


async def publisher_of(stack: Any, pool: str) -> Publisher:
    made = Publisher(stack.settings.kafka, pool)
    await made.start()
    return made


async def refusal(stack: Any, path: Path) -> str:
    """What a worker says that will not start."""
    worker = Worker(stack.environment(), path)
    try:
        assert await asyncio.to_thread(worker.process.wait, 60) == 1
    finally:
        await asyncio.to_thread(worker.stop)
    return await asyncio.to_thread(path.read_text)


async def command(stack: Any, *arguments: str, **options: Any) -> Any:
    return await asyncio.to_thread(opentinker, stack, "scheduler", "adopt", *arguments, **options)


async def adopt_all(stack: Any, start: str) -> list[int]:
    """Decide for every partition that needs it; returns which did."""
    adopted = []
    for partition in range(stack.settings.kafka.partitions):
        said = ok(await command(stack, "--partition", str(partition), "--from", start, "--reason", "deleted by mistake", "--yes"))
        if "adopted: journal offset" in said:
            adopted.append(partition)
        else:
            assert "there is nothing to adopt" in said
    return adopted


async def adoption(alerts: TopicReader, partition: int) -> JournalAdopted:
    """What was told of one partition: once, however often workers start."""

    def found(seen: list[Any]) -> list[JournalAdopted]:
        return [each.message for each in seen if isinstance(each.message, JournalAdopted) and each.message.partition == partition]

    told = await alerts.until(found, 30)
    assert len(told) == 1
    return told[0]


async def test_an_input_topic_made_anew_is_adopted_and_finished_jobs_do_not_run_again(stack: Any, tmp_path: Path, alerts: TopicReader) -> None:
    settings, pool = stack.settings.kafka, f"pool-{uuid.uuid4().hex[:8]}"
    publisher = await publisher_of(stack, pool)
    async with FakeNode(settings, publisher, f"n-{pool}") as node:
        worker = Worker(stack.environment(), tmp_path / "first.log")
        before = {await publisher.submit(f"before-{number}") for number in range(5)}
        await statuses(settings, before)
        assert await asyncio.to_thread(worker.stop) == 0
        await make_anew(stack.settings.kafka, COMMANDS)
        later = await publisher_of(stack, pool)
        waiting = await later.submit("waiting")

        said = await refusal(stack, tmp_path / "refused.log")
        assert "was made anew" in said
        assert "opentinker scheduler adopt --partition" in said
        shown = await command(stack, "--partition", str(publisher.partition))
        assert shown.returncode == 2
        assert f"{COMMANDS} holds offsets 0 to 0: 1 inputs, 1 of them job submissions" in shown.stdout
        assert "nothing was changed; decide with --from beginning|end and --reason TEXT" in shown.stderr
        refused = await command(stack, "--partition", str(publisher.partition), "--from", "end", "--reason", "x", stdin="n\n")
        assert refused.returncode == 130
        assert publisher.partition in await adopt_all(stack, "beginning")

        worker = Worker(stack.environment(), tmp_path / "second.log")
        after = await later.submit("after")
        found = await statuses(settings, {waiting, after})
        assert {status.phase for status in found.values()} == {JobPhase.COMPLETED}
        assert await asyncio.to_thread(worker.stop) == 0
        assert sorted(uid for uid, _ in node.ended) == sorted({*before, waiting, after})
        assert node.overlaps == []
        alert = await adoption(alerts, publisher.partition)
        assert (alert.reason, alert.start, alert.positions) == ("deleted by mistake", "beginning", {COMMANDS: 0})
        await later.stop()
    await publisher.stop()


async def test_after_a_lost_journal_live_jobs_end_by_name_and_finished_ones_stay_finished(stack: Any, tmp_path: Path, alerts: TopicReader) -> None:
    settings = stack.settings.kafka
    quick = await publisher_of(stack, f"pool-{uuid.uuid4().hex[:8]}")
    slow = await publisher_of(stack, f"pool-{uuid.uuid4().hex[:8]}")
    async with FakeNode(settings, quick, f"n-{quick.pool}") as node, FakeNode(settings, slow, f"n-{slow.pool}", run_s=600) as busy:
        worker = Worker(stack.environment(), tmp_path / "first.log")
        finished, live = await quick.submit("finished"), await slow.submit("live")
        await statuses(settings, {finished})
        await running(settings, live)
        assert await asyncio.to_thread(worker.stop) == 0
        await make_anew(stack.settings.kafka, JOURNAL)

        assert "the journal was lost" in await refusal(stack, tmp_path / "refused.log")
        shown = await command(stack, "--partition", str(slow.partition))
        assert "Jobs that jobs.status shows as live: 1" in shown.stdout
        assert live in shown.stdout
        assert {quick.partition, slow.partition} <= set(await adopt_all(stack, "end"))

        worker = Worker(stack.environment(), tmp_path / "second.log")
        lost = (await statuses(settings, {live}))[live]
        assert (lost.phase, lost.reason) == (JobPhase.FAILED, "JournalLost")
        for each in (node, busy):
            await each.announce()
        after = await quick.submit("after")
        assert (await statuses(settings, {after}))[after].phase is JobPhase.COMPLETED
        async with asyncio.timeout(30):
            while busy.live:  # noqa: ASYNC110 (its node obeys)
                await asyncio.sleep(0.1)
        assert await asyncio.to_thread(worker.stop) == 0
        assert [uid for uid, _ in node.ended] == [finished, after]
        assert [type(event) for event in await events_of(settings, {live})].count(JobFailed) == 1
        assert (await adoption(alerts, slow.partition)).jobs_ended == 1
    for publisher in (quick, slow):
        await publisher.stop()


async def running(settings: Any, uid: str) -> None:
    reader = TopicReader(settings, STATUS)
    await reader.start(from_beginning=True)
    await reader.until(lambda seen: any(e.message.job_uid == uid and e.message.phase is JobPhase.RUNNING for e in seen))
    await reader.stop()
