"""What others may do to the topics of a broker: delete one, write under a wrong clock, write within transactions, send records again and late."""

from __future__ import annotations

import asyncio
import time
import uuid

from aiokafka import AIOKafkaProducer
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.messages import Tick
from opentinker.schemas.records import encode
from opentinker.schemas.topics import INPUT_TOPICS, REPORTS

__all__ = ["make_anew", "outsider", "send_again", "set_stamps", "tick_stamped", "two_transactions"]


async def make_anew(settings: KafkaSettings, topic: str) -> None:
    """Delete a topic and make it again, as by mistake."""
    admin = kafka.admin_client(settings, "test-delete")
    await admin.start()
    try:
        await admin.delete_topics([topic])
        async with asyncio.timeout(30):
            while topic in await admin.list_topics():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    finally:
        await admin.close()
    async with asyncio.timeout(30):
        while True:
            try:
                if topic in await kafka.ensure_topics(settings):
                    return
            except TopicAlreadyExistsError:
                await asyncio.sleep(0.2)


async def set_stamps(settings: KafkaSettings, kind: str) -> None:
    """Who stamps the reports: `LogAppendTime`, the broker, as always; `CreateTime`, the writer, so that a record can carry the stamp of a wrong clock."""
    admin = kafka.admin_client(settings, "test-clock")
    await admin.start()
    try:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, REPORTS, {"message.timestamp.type": kind})])
    finally:
        await admin.close()


async def tick_stamped(settings: KafkaSettings, partition: int, ahead_ms: int) -> None:
    """A report that a broker whose clock is `ahead_ms` off would have stamped so. Needs `CreateTime`."""
    now_ms = int(time.time() * 1000)
    tick = Tick(partition=partition, worker="test", sequence=1, sent_ms=now_ms)
    value, headers = encode(tick, id=f"tick{ahead_ms}", source="test", time_ms=now_ms)
    producer = kafka.producer(settings, "test-clock")
    await producer.start()
    try:
        await producer.send_and_wait(REPORTS, value, partition=partition, headers=list(headers), timestamp_ms=now_ms + ahead_ms)
    finally:
        await producer.stop()


async def two_transactions(sender: AIOKafkaProducer, partitions: int) -> None:
    """On every input one that commits and one that does not: markers leave offsets without records, an aborted one a record nobody may read."""
    for commit in (True, False):
        await sender.begin_transaction()
        for topic in INPUT_TOPICS:
            for partition in range(partitions):
                await sender.send(topic, b"{", partition=partition)  # no message of ours: a dead letter if committed
        await (sender.commit_transaction() if commit else sender.abort_transaction())


def outsider(settings: KafkaSettings) -> AIOKafkaProducer:
    """Who writes within transactions and is no scheduler."""
    return kafka.transactional_producer(settings, "outsider", f"outsider-{uuid.uuid4().hex}")


async def send_again(settings: KafkaSettings, count: int, after_s: float) -> int:
    """The newest inputs of every partition once more, byte for byte, `after_s` later; how many those were."""
    found = []
    for topic in INPUT_TOPICS:
        for partition, end in (await kafka.end_offsets(settings, topic, range(settings.partitions))).items():
            found += await kafka.read_range(settings, topic, partition, max(0, end - count), end)
    await asyncio.sleep(after_s)
    sender = kafka.producer(settings, "late")
    await sender.start()
    try:
        for record in found:
            await sender.send_and_wait(record.topic, record.value, key=record.key, partition=record.partition, headers=list(record.headers))
    finally:
        await sender.stop()
    return len(found)
