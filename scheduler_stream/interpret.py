"""Raw input records into step inputs and encoded outputs. Pure: the same record gives the same result, so that repeats are recognised.

A record that cannot be read, stands on the wrong partition or is stale is an input like any other; its output is a dead letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError, InvalidMessage
from opentinker.schemas.messages.commands import CancelJob, SubmitJob
from opentinker.schemas.messages.reports import Tick
from opentinker.schemas.records import STALE_MS, Envelope, InputRecord, Message, decode, encode, millis_of
from opentinker.schemas.topics import INPUT_TOPICS, STATUS, accepted_types, partition_of

from .codec import JournalOutput
from .core.effects import Output
from .core.step import StepInput

__all__ = ["SOURCE", "Interpreted", "encode_outputs", "interpret"]

SOURCE: Final = "opentinker/scheduler"
_ACCEPTED: Final = {topic: accepted_types(topic) for topic in INPUT_TOPICS}


@dataclass(frozen=True, slots=True)
class Interpreted:
    item: StepInput
    letters: tuple[JournalOutput, ...] = ()


def interpret(record: InputRecord, partitions: int) -> Interpreted:
    """Decode one input. Never raises for what somebody else wrote."""
    try:
        envelope = decode(record.headers, record.value, _ACCEPTED[record.topic])
        _check_place(envelope.message, record, partitions)
        _check_age(envelope, record)
    except InvalidMessage as error:
        letters = dead_letter(record, error.errors, source=SOURCE, time_ms=record.append_time_ms)
        return Interpreted(_item(record, None, ""), tuple(JournalOutput(out.topic, out.key, out.value, out.headers) for out in letters))
    return Interpreted(_item(record, envelope.message, envelope.traceparent))


def _item(record: InputRecord, message: Message | None, traceparent: str) -> StepInput:
    return StepInput(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        append_time_ms=record.append_time_ms,
        message=message,
        traceparent=traceparent,
    )


def _check_place(message: Message, record: InputRecord, partitions: int) -> None:
    wanted = message.partition if isinstance(message, Tick) else partition_of(getattr(message, "pool", "default"), partitions)
    if wanted != record.partition:
        text = f"this pool lives in partition {wanted}, the record stands on {record.partition}"
        raise InvalidMessage(
            [FieldError(field="pool", message=text, remedy="set the partition to murmur2(pool) explicitly, or publish to jobs.requests")]
        )
    if isinstance(message, SubmitJob) and message.spec.pool != message.pool:
        raise InvalidMessage(
            [FieldError(field="spec.pool", message=f"is {message.spec.pool}, the command says {message.pool}", remedy="make them equal")]
        )


def _check_age(envelope: Envelope[Message], record: InputRecord) -> None:
    if not isinstance(envelope.message, SubmitJob | CancelJob):
        return
    said_ms = millis_of(envelope.time)
    if said_ms is None:
        raise InvalidMessage([FieldError(field="header ce_time", message="is not an ISO 8601 time", remedy="set it, with a time zone")])
    if record.append_time_ms - said_ms > STALE_MS:
        text = f"{envelope.time} is more than 24 h before it was appended"
        raise InvalidMessage([FieldError(field="header ce_time", message=text, remedy="submit again with a new ce_id if the job is still wanted")])


def encode_outputs(item: StepInput, outputs: tuple[Output, ...], generation: int = 0) -> tuple[JournalOutput, ...]:
    """Outputs as the bytes that will be recorded, then published. Ids follow from the input's place and its topic's generation."""
    place = f"{_SHORT[item.topic]}-{item.partition}-{item.offset}"
    if generation:
        place = f"{place}@{generation}"
    encoded = []
    for number, output in enumerate(outputs):
        value, headers = encode(
            output.message,
            id=f"{place}-{number}",
            source=SOURCE,
            subject=output.key,
            time_ms=item.append_time_ms,
            traceparent=output.traceparent,
        )
        encoded.append(JournalOutput(output.topic, output.key, value, headers, output.latency_since_ms))
    return tuple(encoded)


_SHORT: Final = {topic: topic.removeprefix("opentinker.").removesuffix(".v1") for topic in INPUT_TOPICS}


def is_status(output: JournalOutput) -> bool:
    """Whether an output goes through the fenced, transactional writer."""
    return output.topic == STATUS
