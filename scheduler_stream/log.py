"""One partition of the journal topic, behind four operations; and a twin in memory that can be made to misbehave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from opentinker.compose.runtime.kafka import admin_client, groupless_consumer, read_range
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.topics import JOURNAL

__all__ = ["KafkaLog", "Log", "LogEntry", "MemoryLog"]


@dataclass(frozen=True, slots=True)
class LogEntry:
    offset: int
    value: bytes


class Log(Protocol):
    async def append(self, value: bytes) -> int:
        """Write one record; returns its offset once it is durable."""

    async def read(self, start: int, end: int) -> list[LogEntry]:
        """The records of [start, end); offsets may hold none."""

    async def bounds(self) -> tuple[int, int]:
        """(first offset that is left, offset behind the last)."""

    async def trim(self, before: int, older_than_ms: int) -> None:
        """Give up the records before an offset that are also older than a broker time."""


class KafkaLog:
    """The real one. The producer is idempotent and has one append in flight, since `append` is awaited by a single writer; None: read only."""

    def __init__(self, settings: KafkaSettings, partition: int, producer: AIOKafkaProducer | None) -> None:
        self._settings, self._partition, self._producer = settings, partition, producer

    async def append(self, value: bytes) -> int:
        assert self._producer is not None
        answer = await self._producer.send_and_wait(JOURNAL, value, partition=self._partition)
        return int(answer.offset)

    async def read(self, start: int, end: int) -> list[LogEntry]:
        if start >= end:
            return []
        records = await read_range(self._settings, JOURNAL, self._partition, start, end)
        return [LogEntry(record.offset, record.value or b"") for record in records]

    async def bounds(self) -> tuple[int, int]:
        reader = groupless_consumer(self._settings, f"journal-bounds-{self._partition}")
        await reader.start()
        try:
            place = TopicPartition(JOURNAL, self._partition)
            first, end = await asyncio.gather(reader.beginning_offsets([place]), reader.end_offsets([place]))
            return first[place], end[place]
        finally:
            await reader.stop()

    async def trim(self, before: int, older_than_ms: int) -> None:
        place = TopicPartition(JOURNAL, self._partition)
        reader = groupless_consumer(self._settings, f"journal-times-{self._partition}")
        await reader.start()
        try:
            young = (await reader.offsets_for_times({place: older_than_ms})).get(place)
        finally:
            await reader.stop()
        limit = before if young is None else min(before, young.offset)
        if limit <= 0:
            return
        admin = admin_client(self._settings, f"journal-trim-{self._partition}")
        await admin.start()
        try:
            await admin.delete_records({place: RecordsToDelete(limit)})
        finally:
            await admin.close()


class MemoryLog:
    """The twin: the same contract, plus what can go wrong. `skip` leaves a hole, `rival` appends in between, `lose_ack` hides an answer."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.end = 0
        self.first = 0
        self.lose_ack = False

    async def append(self, value: bytes) -> int:
        offset = self.rival(value)
        if self.lose_ack:
            await asyncio.Event().wait()
        return offset

    def rival(self, value: bytes) -> int:
        """What another writer does."""
        offset, self.end = self.end, self.end + 1
        self.records[offset] = value
        return offset

    def skip(self) -> None:
        """An offset that holds no record, as a transaction's marker."""
        self.end += 1

    async def read(self, start: int, end: int) -> list[LogEntry]:
        return [LogEntry(offset, self.records[offset]) for offset in sorted(self.records) if max(start, self.first) <= offset < end]

    async def bounds(self) -> tuple[int, int]:
        return self.first, self.end

    async def trim(self, before: int, older_than_ms: int) -> None:
        self.first = max(self.first, before)
        for offset in [offset for offset in self.records if offset < before]:
            del self.records[offset]
