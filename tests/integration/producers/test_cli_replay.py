"""`opentinker replay` of a real journal, after two real schedulers have written it."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from command import ok, opentinker
from opentinker.compose.runtime.kafka import end_offsets
from opentinker.scheduler_stream.recorded_log import read_file
from opentinker.scheduler_stream.replay import Recorded, Recovered
from opentinker.schemas.topics import JOURNAL
from scheduler_process import FakeNode, Publisher, Worker, statuses

pytestmark = pytest.mark.stack


async def command(stack: Any, *arguments: str) -> Any:
    return await asyncio.to_thread(opentinker, stack, "replay", *arguments)


async def test_a_journal_of_two_workers_replays_the_same_and_so_does_its_file(stack: Any, tmp_path: Path) -> None:
    publisher = Publisher(stack.settings.kafka, f"pool-{uuid.uuid4().hex[:8]}")
    await publisher.start()
    partition, path = str(publisher.partition), tmp_path / "saved.log.gz"
    start = (await end_offsets(stack.settings.kafka, JOURNAL, [publisher.partition]))[publisher.partition]
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}", gpus=4):
        for turn in range(2):
            # Some before the worker is there, some while heartbeats and ticks are held back for a record of their own.
            uids = {await publisher.submit(f"job-{turn}-{number}", replicas=1 + number % 3) for number in range(12)}
            worker = Worker(stack.environment(), tmp_path / f"worker-{turn}.log")
            try:
                await statuses(stack.settings.kafka, uids)
                for number in range(3):
                    await asyncio.sleep(2.3)
                    await statuses(stack.settings.kafka, {await publisher.submit(f"late-{turn}-{number}")})
            finally:
                assert worker.stop() == 0, worker.path.read_text()[-2000:]
    await publisher.stop()
    done = await command(stack, "--partition", partition, "--from", str(start), "--save", str(path))
    assert ": identical, state " in ok(done)
    _, entries = read_file(path)
    found = list(entries)
    assert sum(isinstance(entry, Recovered) for entry in found) == 2
    assert sum(len(entry.inputs) for entry in found if isinstance(entry, Recorded)) > 60
    assert ok(await command(stack, "--log", str(path))).partition(": ")[2] == ok(done).partition(": ")[2]
    assert "identical" in ok(await command(stack))
    wrong = await command(stack, "--partition", partition, "--from", "999999")
    assert (wrong.returncode, "the journal holds offsets" in wrong.stderr) == (1, True)
    for usage in (["--from", "1"], ["--log", str(path), "--partition", "0"], ["--partition", "99"]):
        assert (await command(stack, *usage)).returncode == 2
