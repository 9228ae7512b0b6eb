"""Writing commands to Kafka from a service that outlives the broker.

A send is answered by the broker or it raises KafkaUnavailable, within a bound. An idempotent producer that has failed does not recover (its sequence numbers
may have a hole), so it is thrown away and a new one is made in the background; meanwhile every send fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from opentinker.compose.runtime.kafka import producer, send
from opentinker.compose.runtime.metrics import gauge
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.records import OutputRecord

__all__ = ["CommandWriter", "KafkaUnavailable"]

_ACK_TIMEOUT_S = 4.0  # the producer gives a batch up before that
_STOP_TIMEOUT_S = 2.0
_PAUSE_S = 1.0
_UP = gauge("kafka_writer_up", "Whether commands can be written: 1 or 0")


class KafkaUnavailable(Exception):
    """Kafka has not acknowledged. `sent`: the records may have reached it all the same; sending the same ids again is safe."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class CommandWriter:
    """One producer at a time. Start it, close it."""

    def __init__(self, settings: KafkaSettings, client_id: str) -> None:
        self._settings, self._client_id = settings, client_id
        self._producer: AIOKafkaProducer | None = None
        self._making: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._producer is not None

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._renew()

    async def close(self) -> None:
        if self._making is not None:
            self._making.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._making
        if self._producer is not None:
            await _stop(self._producer)

    async def write(self, records: Sequence[OutputRecord]) -> None:
        """Write and wait until Kafka has acked every record. Raises KafkaUnavailable."""
        sender = self._producer
        if sender is None:
            raise KafkaUnavailable("Kafka does not answer", sent=False)
        try:
            async with asyncio.timeout(_ACK_TIMEOUT_S + 1):
                futures = [await send(sender, record) for record in records]
                await asyncio.gather(*futures)
        except MessageSizeTooLargeError as error:
            raise KafkaUnavailable(f"a record is too large: {error}", sent=False) from error
        except (KafkaError, OSError, TimeoutError) as error:
            structlog.get_logger().warning("Kafka did not acknowledge", error=repr(error))
            if self._producer is sender:
                self._renew()
            raise KafkaUnavailable("Kafka does not acknowledge", sent=True) from error

    def _renew(self) -> None:
        old, self._producer = self._producer, None
        _UP.set(0)
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make(old))

    async def _make(self, old: AIOKafkaProducer | None) -> None:
        if old is not None:
            await _stop(old)
        while True:
            made = producer(self._settings, self._client_id, request_timeout_ms=int(_ACK_TIMEOUT_S * 1000))
            try:
                await made.start()
            except Exception as error:
                structlog.get_logger().warning("Kafka does not answer", error=repr(error))
                await _stop(made)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._producer = made
                _UP.set(1)
                return


async def _stop(sender: AIOKafkaProducer) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await sender.stop()
