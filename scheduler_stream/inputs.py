"""The input topics of one partition, read beside the stream: holes, what came before a takeover, how far the topics are."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, TopicPartition
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.records import InputRecord

__all__ = ["KafkaInputs"]


class KafkaInputs:
    """The input topics of one partition by a private, groupless reader that is kept open."""

    def __init__(self, settings: KafkaSettings, partition: int, group: str) -> None:
        self._settings, self._partition, self._group = settings, partition, group
        self._reader: AIOKafkaConsumer | None = None

    async def start(self) -> None:
        self._reader = kafka.groupless_consumer(self._settings, f"scheduler-inputs-{self._partition}")
        await self._reader.start()

    async def stop(self) -> None:
        if self._reader is not None:
            await self._reader.stop()

    async def bounds(self, topic: str) -> tuple[int, int]:
        assert self._reader is not None
        return await kafka.bounds(self._reader, TopicPartition(topic, self._partition))

    async def read(self, topic: str, start: int, end: int) -> list[InputRecord]:
        return await kafka.read_range(self._settings, topic, self._partition, start, end)

    async def committed(self, topic: str) -> int | None:
        async with kafka.started(kafka.consumer(self._settings, f"scheduler-committed-{self._partition}", self._group)) as member:
            member.assign([TopicPartition(topic, self._partition)])
            offset = await member.committed(TopicPartition(topic, self._partition))
            return None if offset is None else int(offset)
