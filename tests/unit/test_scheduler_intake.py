"""Inputs on their way to the cycle: nothing missing, nothing twice, nothing unbounded, nobody behind a flood."""

from __future__ import annotations

import asyncio
import contextlib
import random

from memory_inputs import MemoryInputs
from opentinker.scheduler_stream import intake as intake_module
from opentinker.scheduler_stream.codec import InputSpan
from opentinker.scheduler_stream.intake import BATCH_INPUTS_MAX, Intake
from opentinker.schemas.messages import CancelJob
from opentinker.schemas.records import InputRecord, encode
from opentinker.schemas.topics import ADMIN, COMMANDS, INPUT_TOPICS, REPORTS


def filled(**counts: int) -> MemoryInputs:
    inputs = MemoryInputs()
    for topic in INPUT_TOPICS:
        for number in range(counts.get({COMMANDS: "commands", REPORTS: "reports", ADMIN: "admin"}[topic], 0)):
            inputs.append(topic, str(number).encode())
    return inputs


async def everything(intake: Intake) -> list[InputRecord]:
    taken: list[InputRecord] = []
    while batch := await intake.take(0.01):
        assert len(batch.records) <= BATCH_INPUTS_MAX
        taken += batch.records
    return taken


async def test_whatever_the_stream_delivers_each_record_is_taken_once_and_in_its_topics_order() -> None:
    for seed in range(30):
        chance, inputs = random.Random(seed), filled(commands=400, reports=300, admin=20)
        intake = Intake(inputs, {})
        deliveries = [record for records in inputs.records.values() for record in records]
        chance.shuffle(deliveries)
        deliveries = sorted(deliveries, key=lambda record: record.offset + chance.randrange(30))
        taken = []
        for record in deliveries:
            if chance.random() < 0.9:  # some never come
                intake.offer(record)
            if chance.random() < 0.05:
                taken += (await intake.take(0)).records
        await intake.look()
        taken += await everything(intake)
        for topic in INPUT_TOPICS:
            assert [record.offset for record in taken if record.topic == topic] == list(range(len(inputs.records[topic])))


async def test_it_begins_behind_the_position_and_knows_what_came_before_it() -> None:
    inputs = filled(commands=10)
    intake = Intake(inputs, {COMMANDS: InputSpan(0, 6, 0, 0)})
    await intake.look()
    assert [record.offset for record in await everything(intake)] == [7, 8, 9]
    intake.offer(inputs.records[COMMANDS][3])
    assert not await intake.take(0.01)


async def test_offsets_without_records_are_no_obstacle() -> None:
    inputs = filled(reports=20)
    for gone in (3, 4, 9, 19):
        inputs.records[REPORTS][gone] = inputs.records[REPORTS][gone - 1]  # a marker: `read` gives nothing of that offset
    inputs.records[REPORTS] = [record for number, record in enumerate(inputs.records[REPORTS]) if record.offset == number or number == 0]

    async def read(topic: str, start: int, end: int) -> list[InputRecord]:
        return [record for record in inputs.records[topic] if start <= record.offset < end]

    inputs.read = read  # type: ignore[method-assign]
    intake = Intake(inputs, {})
    for record in inputs.records[REPORTS]:
        intake.offer(record)
    assert [record.offset for record in await everything(intake)] == [number for number in range(20) if number not in (3, 4, 9, 19)]


async def test_a_flood_of_commands_fills_neither_memory_nor_the_batch() -> None:
    inputs = filled(commands=20_000, reports=200, admin=5)
    intake = Intake(inputs, {})
    for record in inputs.records[COMMANDS]:
        intake.offer(record)
    for topic in (REPORTS, ADMIN):
        for record in inputs.records[topic]:
            intake.offer(record)
    assert sum(len(line.waiting) for line in intake._lines.values()) <= 1_024 + 205
    batches = [(await intake.take(0)).records for _ in range(5)]
    assert all(sum(record.topic == REPORTS for record in batch) >= 40 for batch in batches[:4])
    assert sum(record.topic == REPORTS for batch in batches for record in batch) == 200
    assert sum(record.topic == ADMIN for batch in batches for record in batch) == 5
    assert all(sum(record.topic == COMMANDS for record in batch) >= 16 for batch in batches), "commands are not starved either"
    left = sum(len(line.waiting) + max(0, line.seen - line.tail) for line in intake._lines.values())
    assert left == 20_205 - sum(map(len, batches)), "what was not taken is known to be there"


async def test_the_scout_finds_cancellations_far_behind_and_offers_each_once() -> None:
    inputs = filled(commands=5_000)
    message = CancelJob(job_uid="6f1c2b1e-7f1b-5c44-9b5e-0d6a3b5f0c11", namespace="default", pool="default", requested_by="me")
    value, headers = encode(message, id="1", source="s", time_ms=0)
    for offset in (4_000, 4_998):
        inputs.records[COMMANDS][offset] = InputRecord(
            topic=COMMANDS, partition=0, offset=offset, append_time_ms=0, key=None, value=value, headers=headers
        )  # fmt: skip
    intake = Intake(inputs, {})
    await intake.look()
    scouting = asyncio.create_task(intake.scout())
    try:
        urgent = []
        for _ in range(20):
            urgent += (await intake.take(0.01)).urgent
            await asyncio.sleep(intake_module._SCOUT_INTERVAL_S / 5)
        assert [record.offset for record in urgent] == [4_000, 4_998]
    finally:
        scouting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await scouting
