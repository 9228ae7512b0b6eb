"""Reading on past a record that the Kafka client cannot even parse.

aiokafka 0.14 decodes header names as UTF-8 while it parses a batch; one name that is not raises out of `getmany`, again and again (measured). Other clients can
send such a record, so after that error the partitions are read one record at a time from what is committed, and each unreadable place is answered and
stepped over. What follows it in the same batch cannot be read either; batches hold records of one producer only.
"""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, TopicPartition
from opentinker.compose.runtime.kafka import input_record
from opentinker.schemas.errors import FieldError
from opentinker.schemas.records import InputRecord

from .handler import RequestHandler

__all__ = ["read_carefully"]

_RECORDS_MAX = 500  # a partition and call: then the other partitions get their turn


async def read_carefully(reader: AIOKafkaConsumer, handler: RequestHandler) -> None:
    """Handle and commit one record at a time until nothing is waiting or the bound is reached."""
    for place in reader.assignment():
        # The failed call may have moved other partitions on without handing out their records.
        committed = await reader.committed(place)
        if committed is None:
            await reader.seek_to_beginning(place)
        else:
            reader.seek(place, committed)
    for place in reader.assignment():
        await _read_one_by_one(reader, place, handler)


async def _read_one_by_one(reader: AIOKafkaConsumer, place: TopicPartition, handler: RequestHandler) -> None:
    ends = await reader.end_offsets([place])
    for _ in range(_RECORDS_MAX):
        if await reader.position(place) >= ends[place]:
            return
        try:
            found = await reader.getmany(place, timeout_ms=1_000, max_records=1)
        except UnicodeDecodeError:
            position = await reader.position(place)
            await handler.refuse(_unreadable(place, position), _ERROR)
            reader.seek(place, position + 1)
            await reader.commit({place: position + 1})
            continue
        for batch in found.values():
            await handler.handle([input_record(record) for record in batch])
            await reader.commit({place: batch[-1].offset + 1})


_ERROR = FieldError(field="headers", message="a header name is not UTF-8, so the record cannot be read", remedy="name headers in UTF-8")


def _unreadable(place: TopicPartition, offset: int) -> InputRecord:
    """What is known of the record: its place."""
    return InputRecord(topic=place.topic, partition=place.partition, offset=offset, append_time_ms=0, key=None, value=None, headers=())
