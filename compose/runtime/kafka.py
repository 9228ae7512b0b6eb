"""Kafka clients as every service makes them: one place for security, idempotence, sizes and timeouts.

Rules: every producer is idempotent with acks=all; every consumer says where it starts and reads committed records only; topics are made and compared by
`ensure_topics`, never by the broker. Versions and hazards: aiokafka 0.14.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, TopicAlreadyExistsError, for_code
from aiokafka.structs import ConsumerRecord
from opentinker.schemas.records import InputRecord, OutputRecord
from opentinker.schemas.topics import JOURNAL_BYTES_MAX, topic_table

from . import lenient_records
from .settings import KafkaSettings

__all__ = [
    "TopicMismatchError",
    "admin_client",
    "bounds",
    "client_options",
    "consumer",
    "end_offsets",
    "ensure_topics",
    "groupless_consumer",
    "input_record",
    "producer",
    "read_range",
    "send",
    "started",
    "transactional_producer",
    "wait_for_broker",
]

_REQUEST_BYTES_MAX = JOURNAL_BYTES_MAX + 2**20  # the largest record there is, and its frame
_SEND_TIMEOUT_MS = 5_000  # a send without an answer in this time ends its process, which a supervisor restarts

T = TypeVar("T")
C = TypeVar("C", AIOKafkaConsumer, AIOKafkaProducer)

lenient_records.install()


class TopicMismatchError(Exception):
    """A topic exists with another shape. The text names topic, setting, what is and what should be, and the remedy."""


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """Address and security, the same for every kind of client."""
    options: dict[str, Any] = {"bootstrap_servers": settings.bootstrap_servers, "security_protocol": settings.security_protocol}
    if settings.security_protocol.startswith("SASL"):
        options |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.sasl_username,
            "sasl_plain_password": settings.sasl_password.get_secret_value(),
        }
    if settings.security_protocol.endswith("SSL"):
        options["ssl_context"] = ssl.create_default_context(cafile=str(settings.ssl_cafile) if settings.ssl_cafile else None)
    return options


def producer(settings: KafkaSettings, client_id: str, **overrides: Any) -> AIOKafkaProducer:
    """An idempotent producer. Start it before use."""
    options = client_options(settings) | {
        "client_id": client_id,
        "enable_idempotence": True,
        "acks": "all",
        "linger_ms": 0,
        "max_request_size": _REQUEST_BYTES_MAX,
        "request_timeout_ms": _SEND_TIMEOUT_MS,
    }
    return AIOKafkaProducer(**(options | overrides))


def transactional_producer(settings: KafkaSettings, client_id: str, transactional_id: str) -> AIOKafkaProducer:
    """A producer whose start fences every earlier one with the same id."""
    return producer(settings, client_id, transactional_id=transactional_id, transaction_timeout_ms=10_000)


def consumer(settings: KafkaSettings, client_id: str, group_id: str, *topics: str, **overrides: Any) -> AIOKafkaConsumer:
    """A member of a group that commits only what it is told to."""
    options = client_options(settings) | {
        "client_id": client_id,
        "group_id": group_id,
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "isolation_level": "read_committed",
        "session_timeout_ms": 10_000,
        "heartbeat_interval_ms": 2_000,
    }
    return AIOKafkaConsumer(*topics, **(options | overrides))


def groupless_consumer(settings: KafkaSettings, client_id: str, **overrides: Any) -> AIOKafkaConsumer:
    """A private reader: it is given partitions and positions, and commits nothing."""
    options = client_options(settings) | {
        "client_id": client_id,
        "group_id": None,
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "isolation_level": "read_committed",
    }
    return AIOKafkaConsumer(**(options | overrides))


@asynccontextmanager
async def started(client: C) -> AsyncIterator[C]:
    """A reader or a sender that is stopped in the end, also when it could not start: aiokafka complains of one that is only forgotten."""
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


async def bounds(reader: AIOKafkaConsumer, place: TopicPartition) -> tuple[int, int]:
    """The first offset that is left of a partition, and the one behind its last record, as far as the reader's isolation level lets it see."""
    first, end = await asyncio.gather(reader.beginning_offsets([place]), reader.end_offsets([place]))
    return int(first[place]), int(end[place])


def admin_client(settings: KafkaSettings, client_id: str) -> AIOKafkaAdminClient:
    return AIOKafkaAdminClient(client_id=client_id, request_timeout_ms=10_000, **client_options(settings))


async def send(sender: AIOKafkaProducer, record: OutputRecord, timestamp_ms: int | None = None) -> asyncio.Future[Any]:
    """Queue one record; await the returned future for the broker's answer. `timestamp_ms`: for topics that keep the producer's time; None: now."""
    key = record.key.encode() if record.key else None
    future: asyncio.Future[Any] = await sender.send(
        record.topic, record.value, key=key, partition=record.partition, timestamp_ms=timestamp_ms, headers=list(record.headers)
    )
    return future


def input_record(record: ConsumerRecord) -> InputRecord:
    """aiokafka's record as our value."""
    return InputRecord(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        append_time_ms=record.timestamp,
        key=record.key,
        value=record.value,
        headers=tuple((name, value) for name, value in record.headers),
    )


async def read_range(
    settings: KafkaSettings, topic: str, partition: int, start: int, end: int, timeout_s: float = 60.0, isolation_level: str = "read_committed"
) -> list[InputRecord]:
    """The records of [start, end), committed ones unless said otherwise, by position: offsets may hold no record. Raises TimeoutError without headway."""
    if start >= end:
        return []
    async with started(groupless_consumer(settings, f"range-{topic}-{partition}", isolation_level=isolation_level)) as reader:
        place = TopicPartition(topic, partition)
        reader.assign([place])
        reader.seek(place, start)
        found: list[InputRecord] = []
        async with asyncio.timeout(timeout_s):
            while await reader.position(place) < end:
                for batch in (await reader.getmany(place, timeout_ms=200)).values():
                    found.extend(input_record(record) for record in batch if start <= record.offset < end)
        return found


async def end_offsets(settings: KafkaSettings, topic: str, partitions: Sequence[int]) -> dict[int, int]:
    """The offset behind the last record of each partition, by private reader."""
    async with started(groupless_consumer(settings, f"ends-{topic}")) as reader:
        ends = await reader.end_offsets([TopicPartition(topic, partition) for partition in partitions])
        return {place.partition: offset for place, offset in ends.items()}


async def wait_for_broker(attempt: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Repeat an attempt while the broker refuses connections; bounded. Raises the last error."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            return await attempt()
        except (KafkaConnectionError, OSError):
            if loop.time() > deadline:
                raise
            await asyncio.sleep(0.2)


async def ensure_topics(settings: KafkaSettings, namespaces: Sequence[str] = ()) -> list[str]:
    """Make the topics that are missing, those of the namespaces among them, compare those that exist; returns the names it made.

    Raises TopicMismatchError for a wrong partition count or a wrong setting: neither can be mended without deciding about the data.
    """
    table = topic_table(settings.partitions, namespaces)
    admin = admin_client(settings, "ensure-topics")
    try:
        await admin.start()
        existing = set(await admin.list_topics())
        missing = [name for name in table if name not in existing]
        if missing:
            new = [NewTopic(name, table[name][0], settings.replication, topic_configs=table[name][1]) for name in missing]
            response = await admin.create_topics(new)
            for name, code, *_ in response.topic_errors:
                error = for_code(code)
                if code and error is not TopicAlreadyExistsError:  # another process was faster: compared below
                    raise error(f"topic {name} could not be made")
        await _compare(admin, table)
        return missing
    finally:
        await admin.close()


async def _compare(admin: AIOKafkaAdminClient, table: dict[str, tuple[int, dict[str, str]]]) -> None:
    for _ in range(50):  # metadata of fresh topics needs a moment
        described = {topic["topic"]: topic for topic in await admin.describe_topics(list(table))}
        if all(described[name]["partitions"] for name in table):
            break
        await asyncio.sleep(0.1)
    problems = [
        f"topic {name} has {len(described[name]['partitions'])} partitions, not {count}"
        for name, (count, _) in table.items()
        if len(described[name]["partitions"]) != count
    ]
    resources = [ConfigResource(ConfigResourceType.TOPIC, name, dict.fromkeys(config)) for name, (_, config) in table.items()]
    for response in await admin.describe_configs(resources):
        for code, _, _, name, entries in response.resources:
            if code:
                raise for_code(code)(f"the settings of topic {name} cannot be read")
            actual = {entry[0]: entry[1] for entry in entries}
            wanted = table[name][1]
            problems += [f"topic {name} has {key}={actual.get(key)}, not {value}" for key, value in wanted.items() if actual.get(key) != value]
    if problems:
        raise TopicMismatchError(
            "; ".join(problems)
            + ". Set OPENTINKER_KAFKA__PARTITIONS to the existing count, change the topics with Kafka's own tools, or drop a local stack's data"
            " with opentinker up --fresh"
        )
