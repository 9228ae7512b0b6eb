"""Growth of dead letters on the real broker and database: told once, whatever is read again, on the topic that people watch."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiokafka import AIOKafkaProducer
from opentinker.compose.runtime.kafka import end_offsets, producer, read_range, send
from opentinker.registry.core.growth import COUNT_MAX
from opentinker.registry.outbox import publish_pending
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError
from opentinker.schemas.messages import DeadLettersGrow
from opentinker.schemas.records import InputRecord, decode
from opentinker.schemas.topics import ADMIN, ALERTS, REPORTS, accepted_types

from .conftest import Registry
from .test_projections import projecting

T0 = 1_900_000_000_000
ERROR = [FieldError(field="", message="is wrong", remedy="mend it")]


async def alert_all(sender: AIOKafkaProducer, topic: str, offsets: range) -> None:
    """The alerts of dead letters, as their readers publish them."""
    for offset in offsets:
        record = InputRecord(topic=topic, partition=0, offset=offset, append_time_ms=T0 + offset, key=None, value=b"", headers=())
        _, alert = dead_letter(record, ERROR, source="test", time_ms=T0 + offset)
        await (await send(sender, alert))


async def growths(stack: Any, start: int) -> list[tuple[str, DeadLettersGrow]]:
    end = (await end_offsets(stack.settings.kafka, ALERTS, [0]))[0]
    records = await read_range(stack.settings.kafka, ALERTS, 0, start, end)
    decoded = [decode(record.headers, record.value, accepted_types(ALERTS)) for record in records]
    return [(each.id, each.message) for each in decoded if isinstance(each.message, DeadLettersGrow) and each.message.topic in (ADMIN, REPORTS)]


async def test_growth_is_told_once_also_when_everything_is_read_again(registry: Registry, stack: Any) -> None:
    sender = producer(stack.settings.kafka, "test-growth")
    await sender.start()
    try:
        start = (await end_offsets(stack.settings.kafka, ALERTS, [0]))[0]
        async with projecting(registry, stack, sender):
            await alert_all(sender, ADMIN, range(COUNT_MAX + 40))
            await alert_all(sender, REPORTS, range(COUNT_MAX))  # not one too many
        async with projecting(registry, stack, sender):  # a restart between
            await alert_all(sender, ADMIN, range(COUNT_MAX + 40))  # published twice: the same ids
            await alert_all(sender, ADMIN, range(COUNT_MAX + 40, COUNT_MAX + 60))
        await registry.pool.execute("DELETE FROM projection_offsets WHERE topic = $1", ALERTS)
        async with projecting(registry, stack, sender):  # the whole topic again
            pass
        async with asyncio.timeout(20):
            while await publish_pending(registry.pool, sender):
                pass
        async with projecting(registry, stack, sender):  # reads its own alert, which is a row already
            pass
        [(identifier, alert)] = await growths(stack, start)
        assert identifier == f"dead-letters-grow:dead-letter:{ADMIN}:0:{COUNT_MAX}"
        assert (alert.count, alert.since_ms, alert.time_ms) == (COUNT_MAX + 1, T0, T0 + COUNT_MAX)
        rows = await registry.pool.fetch("SELECT id FROM alerts WHERE type = 'DeadLettersGrow' AND subject = ANY($1)", [ADMIN, REPORTS])
        assert [row["id"] for row in rows] == [identifier]
    finally:
        with contextlib.suppress(Exception):
            await sender.stop()
