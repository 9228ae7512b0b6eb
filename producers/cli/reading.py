"""Private readers of topics for commands: all partitions, any offset, nothing committed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click
from aiokafka import AIOKafkaConsumer, TopicPartition
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import topic_named

__all__ = ["read_through", "topic_reader"]

_SILENCE_MAX = 20  # polls of half a second without headway, after which a reader gives up
_POLL_MS = 500
_FETCH_BYTES = 8 * 2**20  # of one partition at a time; a larger record still comes, alone


@asynccontextmanager
async def topic_reader(settings: KafkaSettings, topic: str) -> AsyncIterator[tuple[AIOKafkaConsumer, list[TopicPartition]]]:
    """A reader that is assigned every partition of a topic, at no position yet. A topic that is not there is said so."""
    async with kafka.started(kafka.groupless_consumer(settings, "opentinker-cli", max_partition_fetch_bytes=_FETCH_BYTES)) as reader:
        if topic not in await reader.topics():
            raise click.ClickException(
                f"Kafka has no topic {topic}, or this user may not see it; opentinker topics ensure makes topics, opentinker access plan says who may what"
            )
        places = [TopicPartition(topic, number) for number in range(_partition_count(settings, topic))]
        reader.assign(places)
        yield reader, places


def _partition_count(settings: KafkaSettings, topic: str) -> int:
    if topic.endswith(".dlq"):
        return 1
    count = topic_named(topic).partitions
    return settings.partitions if count == "inputs" else count


async def read_through(reader: AIOKafkaConsumer, place: TopicPartition, start: int, end: int) -> AsyncIterator[InputRecord]:
    """The committed records of [start, end) of one partition, by position: offsets may hold none. Other partitions are paused meanwhile."""
    others = [other for other in reader.assignment() if other != place]
    reader.pause(*others)
    try:
        reader.seek(place, start)
        silent = 0
        position = start
        while position < end:
            for record in (await reader.getmany(place, timeout_ms=_POLL_MS)).get(place, ()):
                if record.offset < end:
                    yield kafka.input_record(record)
            before, position = position, await reader.position(place)
            silent = silent + 1 if position == before else 0
            if silent > _SILENCE_MAX:
                raise click.ClickException(f"{place.topic} partition {place.partition} gives nothing at offset {position}; is Kafka well?")
    finally:
        reader.resume(*others)
