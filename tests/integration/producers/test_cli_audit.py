"""`opentinker audit` on the real broker, after a real scheduler has decided."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from command import ok, opentinker
from opentinker.compose.runtime.kafka import admin_client, end_offsets, read_range
from opentinker.schemas.messages import AttemptEnded, AttemptOutcome, CheckpointCommitted, FailureClass
from opentinker.schemas.records import encode
from opentinker.schemas.topics import CHECKPOINTS, EVENTS, REPORTS, partition_of
from scheduler_process import FakeNode, Publisher, Worker, statuses

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def worker(stack: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(stack.environment(), tmp_path_factory.mktemp("audit") / "worker.log")
    yield made
    assert made.stop() == 0, made.path.read_text()[-2000:]


async def audited(stack: Any, job: str, *arguments: str) -> Any:
    return await asyncio.to_thread(opentinker, stack, "audit", job, *arguments)


async def test_the_history_of_a_job_with_a_failed_attempt(stack: Any, worker: Worker, publisher: Publisher) -> None:
    name = f"audited-{publisher.pool}"
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}", run_s=1.0) as node:
        uid = await publisher.submit(name, replicas=2, retry={"infrastructure": 2})
        async with asyncio.timeout(60):
            while uid not in node.live:  # noqa: ASYNC110 the fake node has no event for it
                await asyncio.sleep(0.02)
        start = node.live[uid]
        failed = AttemptEnded(
            node=node.name, incarnation=node.incarnation, pool=publisher.pool, job_uid=uid, attempt_number=1, lease_epoch=start.lease_epoch,
            ranks=(0, 1), outcome=AttemptOutcome.FAILED, failure_class=FailureClass.INFRASTRUCTURE, message="lost \x1b[31m", exit_codes={0: 7, 1: -9},
        )  # fmt: skip
        del node.live[uid]
        node.ended.append((uid, 1))
        await publisher.put(REPORTS, failed)
        saved = CheckpointCommitted(
            job_uid=uid, namespace="default", attempt_number=1, lease_epoch=start.lease_epoch, checkpoint_id="c-1", global_step=64, size_bytes=5,
            digest="sha256:" + "0" * 64, final=False, time_ms=1,
        )  # fmt: skip
        for _ in range(2):  # as an outbox does that crashed before its mark
            await publisher.raw(CHECKPOINTS, *_encoded(saved, f"c-{uid}"), partition=partition_of(uid, 4))
        await statuses(stack.settings.kafka, {uid})
    shown = json.loads(ok(await audited(stack, name, "-o", "json")))
    assert (shown["job_uid"], shown["phase"], shown["warnings"]) == (uid, "Completed", [])
    entries = shown["entries"]
    revisions = [entry["revision"] for entry in entries if "revision" in entry]
    assert revisions == list(range(1, len(revisions) + 1))
    types = [entry["type"] for entry in entries]
    assert types[:2] == ["SubmitJob", "JobSubmitted"]
    assert types[-1] in ("JobCompleted", "AttemptEnded")
    assert types.count("AttemptPlaced") == types.count("StartAttempt") == types.count("AttemptEnded") == 2
    assert entries[1]["cause"] == entries[0]["place"]
    [checkpoint] = [entry for entry in entries if entry["type"] == "CheckpointCommitted"]
    assert checkpoint["published"] == 2
    [ended] = [entry for entry in entries if entry["type"] == "AttemptEnded" and "rank 1 exit -9" in entry["text"]]
    [finished] = [entry for entry in entries if entry["type"] == "AttemptFinished" and entry["cause"] == ended["place"]]
    assert "Infrastructure" in finished["text"]
    [cause] = await read_range(stack.settings.kafka, REPORTS, publisher.partition, *_around(ended["place"]))
    assert uid.encode() in (cause.value or b"")
    table = ok(await audited(stack, uid))
    assert "×2 published" in table
    assert "\x1b" not in table


async def test_what_is_gone_is_told(stack: Any, worker: Worker, publisher: Publisher) -> None:
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}"):
        uid = await publisher.submit(f"forgotten-{publisher.pool}")
        await statuses(stack.settings.kafka, {uid})
    place = TopicPartition(EVENTS, partition_of(uid, 4))
    admin = admin_client(stack.settings.kafka, "test-audit")
    await admin.start()
    try:
        end = (await end_offsets(stack.settings.kafka, EVENTS, [place.partition]))[place.partition]
        await admin.delete_records({place: RecordsToDelete(end - 1)})
    finally:
        await admin.close()
    shown = json.loads(ok(await audited(stack, uid, "-o", "json")))
    assert f"begins at offset {end - 1}" in shown["begins"][EVENTS]
    assert "older ones are past their retention" in shown["warnings"][0]
    assert shown["entries"][0]["type"] == "SubmitJob"


async def test_a_job_that_never_was_is_not_found(stack: Any) -> None:
    for job, code, text in [
        (str(uuid.uuid4()), 3, "no topic holds a record"),
        ("never-was", 3, "has no job 'never-was'"),
        ("a/b", 2, "neither a name"),
    ]:
        done = await audited(stack, job)
        assert (done.returncode, text in done.stderr, done.stdout) == (code, True, "")


def _encoded(message: Any, identifier: str) -> Any:
    return encode(message, id=identifier, source="test", time_ms=1)


def _around(place: str) -> tuple[int, int]:
    offset = int(place.rpartition(":")[2])
    return offset, offset + 1
