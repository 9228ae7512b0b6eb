"""One partition of the journal topic, behind four operations; and a twin in memory that can be made to misbehave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from opentinker.compose.runtime.kafka import admin_client, bounds, groupless_consumer, read_range, started
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.topics import JOURNAL, JOURNAL_BYTES_MAX

from .errors import RecordTooLargeError, TruncatedError, UnreadableError

__all__ = ["RECORD_BYTES_MAX", "KafkaLog", "Log", "LogEntry", "MemoryLog"]

RECORD_BYTES_MAX = JOURNAL_BYTES_MAX - 1024  # the broker's bound is on the batch: the record and less than 100 bytes around it


@dataclass(frozen=True, slots=True)
class LogEntry:
    offset: int
    value: bytes


class Log(Protocol):
    async def append(self, value: bytes) -> int:
        """Write one record; returns its offset once it is durable. Raises RecordTooLargeError and then has written nothing."""

    async def read(self, start: int, end: int) -> list[LogEntry]:
        """What is left of the records of [start, end); offsets may hold none. Raises TruncatedError if the log ends before `end`."""

    async def bounds(self) -> tuple[int, int]:
        """(first offset that is left, offset behind the last)."""

    async def trim(self, before: int, older_than_ms: int) -> None:
        """Give up the records before an offset that are also older than a broker time. Never more than there is."""


class KafkaLog:
    """The real one. The producer is idempotent and has one append in flight, since `append` is awaited by a single writer; None: read only."""

    def __init__(self, settings: KafkaSettings, partition: int, producer: AIOKafkaProducer | None, topic: str = JOURNAL) -> None:
        self._settings, self._partition, self._producer, self._topic = settings, partition, producer, topic

    async def append(self, value: bytes) -> int:
        assert self._producer is not None
        _check_size(value)
        answer = await self._producer.send_and_wait(self._topic, value, partition=self._partition)
        return int(answer.offset)

    async def read(self, start: int, end: int) -> list[LogEntry]:
        if start >= end:
            return []
        _check_end(end, (await self.bounds())[1])
        try:
            records = await read_range(self._settings, self._topic, self._partition, start, end)
        except TimeoutError:
            raise UnreadableError(
                f"the journal's offsets {start} to {end - 1} could not be read in time: the broker is slow, or somebody else has a transaction open "
                "on the journal; only the scheduler may write there"
            ) from None
        return [LogEntry(record.offset, record.value or b"") for record in records]

    async def bounds(self) -> tuple[int, int]:
        # By the uncommitted end: behind an outsider's open transaction our own records stand all the same.
        async with started(groupless_consumer(self._settings, f"journal-bounds-{self._partition}", isolation_level="read_uncommitted")) as reader:
            return await bounds(reader, TopicPartition(self._topic, self._partition))

    async def trim(self, before: int, older_than_ms: int) -> None:
        place = TopicPartition(self._topic, self._partition)
        first, end = await self.bounds()
        async with started(groupless_consumer(self._settings, f"journal-times-{self._partition}")) as reader:
            young = (await reader.offsets_for_times({place: older_than_ms})).get(place)
        limit = min(before, end) if young is None else min(before, young.offset)
        if limit <= first:
            return
        admin = admin_client(self._settings, f"journal-trim-{self._partition}")
        await admin.start()
        try:
            await admin.delete_records({place: RecordsToDelete(limit)})
        finally:
            await admin.close()


def _check_size(value: bytes) -> None:
    if len(value) > RECORD_BYTES_MAX:
        raise RecordTooLargeError(f"a journal record of {len(value)} bytes, {RECORD_BYTES_MAX} are allowed; please report what led to it")


def _check_end(wanted: int, end: int) -> None:
    if end < wanted:
        raise TruncatedError(f"the journal ends at offset {end}, yet {wanted - 1} was written: it was cut short or made anew")


class MemoryLog:
    """The twin: the same contract, plus what can go wrong. `skip` leaves a hole, `rival` appends in between, `lose_ack` hides an answer."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.stamps: dict[int, int] = {}
        self.now_ms = 0  # the broker's time
        self.end = 0
        self.first = 0
        self.lose_ack = False

    async def append(self, value: bytes) -> int:
        _check_size(value)
        offset = self.rival(value)
        if self.lose_ack:
            await asyncio.Event().wait()
        return offset

    def rival(self, value: bytes) -> int:
        """What another writer does."""
        offset, self.end = self.end, self.end + 1
        self.records[offset], self.stamps[offset] = value, self.now_ms
        return offset

    def skip(self) -> None:
        """An offset that holds no record, as a transaction's marker."""
        self.end += 1

    async def read(self, start: int, end: int) -> list[LogEntry]:
        if start >= end:
            return []
        _check_end(end, self.end)
        return [LogEntry(offset, self.records[offset]) for offset in sorted(self.records) if max(start, self.first) <= offset < end]

    async def bounds(self) -> tuple[int, int]:
        return self.first, self.end

    async def trim(self, before: int, older_than_ms: int) -> None:
        young = next((offset for offset, stamp in self.stamps.items() if stamp >= older_than_ms), self.end)
        self.first = max(self.first, min(before, young))
        for offset in [offset for offset in self.records if offset < self.first]:
            del self.records[offset], self.stamps[offset]
