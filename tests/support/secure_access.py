"""The secure broker with the table of rights applied, and what a client of any role can be seen to get done there."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError
from opentinker.compose.runtime import access, kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.access import Role, principal, roles
from scheduler_load import fold_of
from secure_kafka import SecureBroker, secure_broker

__all__ = ["Access", "granted_access", "journal_positions", "read_one", "scheduler_state", "write_one"]


@dataclass(frozen=True, slots=True)
class Access:
    """The broker, its topics, and the table applied to it."""

    broker: SecureBroker
    roles: tuple[Role, ...]
    passwords: dict[str, str]

    def of(self, role: str) -> KafkaSettings:
        """Settings of a client that logs in as this role."""
        return self.broker.settings(principal(role), self.passwords[principal(role)])

    def environment(self, role: str, home: Path, **more: str) -> dict[str, str]:
        return self.broker.environment(home, principal(role), self.passwords[principal(role)], **more)

    def variables(self, role: str) -> dict[str, str]:
        return self.broker.variables(principal(role), self.passwords[principal(role)])


@asynccontextmanager
async def granted_access(directory: Path, namespaces: Sequence[str]) -> AsyncIterator[Access]:
    with secure_broker(directory) as broker:
        await kafka.wait_for_broker(lambda: kafka.ensure_topics(broker.settings(), namespaces), 30)
        wanted = roles(namespaces)
        passwords = access.passwords(directory / "passwords", [role.principal for role in wanted])
        await access.apply(broker.settings(), wanted, passwords)
        yield Access(broker, wanted, passwords)


async def write_one(producer: AIOKafkaProducer, topic: str, value: bytes = b"{}") -> KafkaError | None:
    """What Kafka answers to one record; None: it took it."""
    try:
        async with asyncio.timeout(20):
            await producer.send_and_wait(topic, value, key=b"key", partition=0)
    except KafkaError as error:
        return error
    return None


async def read_one(settings: KafkaSettings, topic: str) -> KafkaError | None:
    """What Kafka answers to a read of a topic that holds a record; None: the record came."""
    reader = AIOKafkaConsumer(
        topic, **kafka.client_options(settings), group_id=None, enable_auto_commit=False, auto_offset_reset="earliest", fetch_max_wait_ms=50
    )
    try:
        async with asyncio.timeout(20):
            await reader.start()
            await reader.getone()
    except KafkaError as error:
        return error
    finally:
        await reader.stop()
    return None


async def journal_positions(settings: KafkaSettings) -> dict[tuple[str, int], int]:
    """(topic, partition) → the last input that is written down as stepped."""
    folds = [await fold_of(settings, partition) for partition in range(settings.partitions)]
    return {(topic, partition): span.through for partition, fold in enumerate(folds) for topic, span in fold.positions.items()}


async def scheduler_state(settings: KafkaSettings) -> str:
    """A digest of everything that the journals of all partitions say, but the clock, which ticks move."""
    digest = hashlib.sha256()
    for partition in range(settings.partitions):
        fold = await fold_of(settings, partition)
        for kind, id in fold.state.entity_keys():
            if kind != "clock":
                digest.update(orjson.dumps((partition, kind, id, fold.state.get(kind, id)), option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()
