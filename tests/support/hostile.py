"""Records that well-meaning clients cannot send: a header name that is not UTF-8."""

from __future__ import annotations

import struct
from typing import Any
from unittest.mock import patch

from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.util import calc_crc32c
from opentinker.compose.runtime.kafka import producer
from opentinker.compose.runtime.settings import KafkaSettings

__all__ = ["send_hostile_header"]

_build = BatchBuilder._build


def _with_a_hostile_header_name(self: BatchBuilder) -> bytearray:
    batch = bytearray(_build(self)).replace(b"MARKMARK", b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe")
    batch[17:21] = struct.pack(">I", calc_crc32c(bytes(batch[21:])))
    self._buffer = batch
    return batch


async def send_hostile_header(settings: KafkaSettings, topic: str, partition: int, value: bytes = b"{}") -> Any:
    """One record whose header name is eight bytes that are no text; returns its place."""
    sender = producer(settings, "hostile", enable_idempotence=False)
    await sender.start()
    try:
        with patch.object(BatchBuilder, "_build", _with_a_hostile_header_name):
            return await sender.send_and_wait(topic, value, partition=partition, headers=[("MARKMARK", b"1")])
    finally:
        await sender.stop()
