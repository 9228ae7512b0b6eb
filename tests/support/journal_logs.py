"""The journal's log in a test's hand, in memory and on the real broker, with the same ways to misbehave."""

from __future__ import annotations

import asyncio
import uuid
from typing import Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic
from broker_proxy import PRODUCE, BrokerProxy
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.scheduler_stream.log import KafkaLog, Log, MemoryLog
from opentinker.schemas.topics import JOURNAL, TOPICS

__all__ = ["JournalLog", "KafkaJournalLog", "MemoryJournalLog"]


class JournalLog(Protocol):
    log: Log

    async def rival(self, value: bytes) -> int:
        """Another writer appends."""

    async def leave_hole(self) -> int:
        """Use offsets up without a record; returns how many."""

    async def marker(self, value: bytes) -> int:
        """Another writer appends in a transaction that it commits: a record, and a marker behind it."""

    async def lose_answers(self) -> None:
        """From now on appends take effect and their answers are lost, until `new_writer`."""

    async def new_writer(self) -> None:
        """The log as the next process finds it."""

    async def stamp(self, offset: int) -> int:
        """The broker's time of a record."""

    async def pass_time(self) -> None:
        """What is appended afterwards has a later broker time."""

    async def cut(self, end: int) -> None:
        """The same log without what stood at `end` and behind, as a restored copy may be. Only of a log without holes."""


class MemoryJournalLog:
    def __init__(self) -> None:
        self.log = MemoryLog()

    async def rival(self, value: bytes) -> int:
        return self.log.rival(value)

    async def leave_hole(self) -> int:
        self.log.skip()
        self.log.skip()
        return 2

    async def marker(self, value: bytes) -> int:
        offset = self.log.rival(value)
        self.log.skip()
        return offset

    async def lose_answers(self) -> None:
        self.log.lose_ack = True

    async def new_writer(self) -> None:
        self.log.lose_ack = False

    async def stamp(self, offset: int) -> int:
        return self.log.stamps[offset]

    async def pass_time(self) -> None:
        self.log.now_ms += 10

    async def cut(self, end: int) -> None:
        for offset in range(end, self.log.end):
            del self.log.records[offset], self.log.stamps[offset]
        self.log.end = end


class KafkaJournalLog:
    """A topic of its own on the real broker, with the settings of the journal's."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._topic = ""
        self._producers: list[AIOKafkaProducer] = []
        self._proxy = BrokerProxy(settings.bootstrap_servers)
        self.log: Log = None  # type: ignore[assignment]

    async def __aenter__(self) -> KafkaJournalLog:
        await self._proxy.__aenter__()
        await self._make_topic()
        await self.new_writer()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(producer.stop() for producer in self._producers))
        await self._proxy.__aexit__()

    async def _make_topic(self) -> None:
        self._topic = f"test-journal-{uuid.uuid4().hex}"
        admin = kafka.admin_client(self._settings, "test-journal")
        await admin.start()
        await admin.create_topics([NewTopic(self._topic, 1, 1, topic_configs=TOPICS[JOURNAL].config())])
        await admin.close()

    async def _producer(self, settings: KafkaSettings) -> AIOKafkaProducer:
        producer = kafka.producer(settings, "test-journal")
        await producer.start()
        self._producers.append(producer)
        return producer

    async def new_writer(self) -> None:
        """By way of the proxy. The former one finds its broker again, too, and asks once more for the answer that it missed."""
        if self._proxy.swallowing:
            assert self._proxy.swallowed, "an answer must have been lost"
            await self._proxy.recover()
        producer = await self._producer(self._settings.model_copy(update={"bootstrap_servers": self._proxy.bootstrap}))
        self.log = KafkaLog(self._settings, 0, producer, self._topic)

    async def lose_answers(self) -> None:
        self._proxy.swallowing = {PRODUCE}

    async def rival(self, value: bytes) -> int:
        rival = KafkaLog(self._settings, 0, await self._producer(self._settings), self._topic)
        return await rival.append(value)

    async def leave_hole(self) -> int:
        outsider = await self._outsider()
        await outsider.begin_transaction()
        answer = await outsider.send_and_wait(self._topic, b"never", partition=0)
        await outsider.abort_transaction()
        await self._until_end(answer.offset + 2)
        return 2  # the aborted record and the marker

    async def marker(self, value: bytes) -> int:
        outsider = await self._outsider()
        async with outsider.transaction():
            answer = await outsider.send_and_wait(self._topic, value, partition=0)
        await self._until_end(answer.offset + 2)
        return int(answer.offset)

    async def _until_end(self, end: int) -> None:
        """The broker writes a transaction's marker a little after it has said that the transaction is over."""
        async with asyncio.timeout(10):
            while (await self.log.bounds())[1] < end:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _outsider(self) -> AIOKafkaProducer:
        outsider = kafka.transactional_producer(self._settings, "outsider", f"outsider-{uuid.uuid4().hex}")
        await outsider.start()
        self._producers.append(outsider)
        return outsider

    async def stamp(self, offset: int) -> int:
        [record] = await kafka.read_range(self._settings, self._topic, 0, offset, offset + 1)
        return record.append_time_ms

    async def pass_time(self) -> None:
        await asyncio.sleep(0.01)

    async def cut(self, end: int) -> None:
        kept = await self.log.read(0, end)
        assert [entry.offset for entry in kept] == list(range(end))
        await self._make_topic()
        await self.new_writer()
        for entry in kept:
            await self.log.append(entry.value)
