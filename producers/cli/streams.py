"""Commands that speak to Kafka directly: topics, training metrics, dead letters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click
from aiokafka import AIOKafkaConsumer, TopicPartition
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings, load_settings
from opentinker.schemas.errors import nearest
from opentinker.schemas.messages import TrainingMetrics
from opentinker.schemas.records import UNREADABLE_HEADER, decode
from opentinker.schemas.topics import METRICS, TOPICS, accepted_types, dead_letter_topic, topic_table

from .output import format_option, print_data, print_table, safe

__all__ = ["dlq", "metrics", "topics"]

_LETTERS_MAX = 10_000
_ADDED_HEADERS = {"ot-error", "ot-errors", "ot-reader", UNREADABLE_HEADER}


@click.group()
def topics() -> None:
    """Make, compare and list the Kafka topics."""


@topics.command()
def ensure() -> None:
    """Make the topics that are missing and compare those that exist. Safe to repeat; refuses a topic of another shape."""
    made = asyncio.run(kafka.ensure_topics(load_settings().kafka))
    click.echo(f"{len(made)} topics made, {len(topic_table(1)) - len(made)} as they should be")


@topics.command("list")
@format_option
def list_topics(output: str) -> None:
    """Every topic: key, retention, who writes and reads it."""
    rows: list[dict[str, Any]] = [
        {
            "topic": topic.name,
            "key": topic.key,
            "kind": topic.cleanup if topic.cleanup == "compact" else f"{topic.retention_ms // 3_600_000} h" if topic.retention_ms > 0 else "kept",
            "written_by": topic.written_by,
            "read_by": topic.read_by,
            "summary": topic.summary,
        }
        for topic in TOPICS.values()
    ]
    if output in ("json", "yaml"):
        print_data(rows, output)
    elif output == "name":
        for row in rows:
            click.echo(row["topic"])
    else:
        print_table(("TOPIC", "KEY", "KEPT", "WRITTEN BY", "READ BY"), [tuple(row.values())[:5] for row in rows], "no topics")


@click.group()
def metrics() -> None:
    """Follow training metrics on their topic."""


@metrics.command()
@click.option("--job", "job_uid", default=None, help="Only this job's uid.")
@click.option("--from-beginning", is_flag=True, help="Everything the topic still holds, not only what comes.")
@click.option("--count", type=click.IntRange(1), default=None, help="Stop after that many samples.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Form; json prints one object a line.")
def tail(job_uid: str | None, from_beginning: bool, count: int | None, output: str) -> None:
    """Print samples as they come, until interrupted."""
    asyncio.run(_tail(load_settings().kafka, job_uid, from_beginning, count, output))


async def _tail(settings: KafkaSettings, job_uid: str | None, from_beginning: bool, count: int | None, form: str) -> None:
    shown = 0
    async with _reader(settings, METRICS) as (reader, places):
        await (reader.seek_to_beginning(*places) if from_beginning else reader.seek_to_end(*places))
        async for record in reader:
            sample = decode(tuple(record.headers), record.value, accepted_types(METRICS)).message
            assert isinstance(sample, TrainingMetrics)
            if job_uid is not None and sample.job_uid != job_uid:
                continue
            if form == "json":
                click.echo(sample.model_dump_json())
            else:
                values = "  ".join(
                    f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in sorted(sample.values.items())
                )
                click.echo(safe(f"{sample.job_uid[:8]} attempt {sample.attempt_number} step {sample.global_step:>9,}  {values}"))
            shown += 1
            if count is not None and shown >= count:
                return


@click.group()
def dlq() -> None:
    """Dead letters: records that could not be read, kept with their bytes, headers and the error."""


@dlq.command("list")
@click.option("--topic", default=None, help="Only dead letters of this topic.")
@format_option
def list_letters(topic: str | None, output: str) -> None:
    """List dead letters, oldest first."""
    rows = asyncio.run(_letters(load_settings().kafka, _dead_letter_topics(topic)))
    if output in ("json", "yaml"):
        print_data([_letter_data(record) for record in rows], output)
        return
    shown = [
        (record.topic, record.offset, _header(record, "ot-error").splitlines()[0][:100] if _header(record, "ot-error") else "") for record in rows
    ]
    print_table(("TOPIC", "OFFSET", "ERROR"), shown, "no dead letters")


@dlq.command()
@click.argument("topic")
@click.argument("offset", type=click.IntRange(0))
@click.option("--value-file", type=click.File("rb"), default=None, help="Send these bytes in place of the original ones.")
def replay(topic: str, offset: int, value_file: Any) -> None:
    """Send one dead letter to its topic again, with its original headers; mended bytes by --value-file."""
    names = _dead_letter_topics(topic.removesuffix(".dlq"))
    answer = asyncio.run(_replay(load_settings().kafka, names[0], offset, value_file.read() if value_file else None))
    click.echo(answer)


def _dead_letter_topics(topic: str | None) -> list[str]:
    known = [name for name, entry in TOPICS.items() if entry.dead_letters]
    if topic is None:
        return [dead_letter_topic(name) for name in known]
    if topic not in known:
        guess = nearest(topic, known)
        raise click.UsageError(f"{topic} has no dead letters; {f'did you mean {guess}?' if guess else 'choose one of ' + ', '.join(known)}")
    return [dead_letter_topic(topic)]


async def _letters(settings: KafkaSettings, names: list[str]) -> list[Any]:
    found: list[Any] = []
    for name in names:
        async with _reader(settings, name) as (reader, places):
            ends = await reader.end_offsets(places)
            await reader.seek_to_beginning(*places)
            while len(found) < _LETTERS_MAX and any([await reader.position(place) < ends[place] for place in places]):
                for batch in (await reader.getmany(timeout_ms=500)).values():
                    found.extend(batch)
    return found


async def _replay(settings: KafkaSettings, name: str, offset: int, value: bytes | None) -> str:
    async with _reader(settings, name) as (reader, places):
        first, end = (await reader.beginning_offsets(places))[places[0]], (await reader.end_offsets(places))[places[0]]
        if not first <= offset < end:
            raise click.UsageError(f"{name} holds offsets {first} to {end - 1}; see opentinker dlq list")
        reader.seek(places[0], offset)
        record = await asyncio.wait_for(reader.getone(), 10)
    target = _header(record, "ot-original-topic")
    if value is None and (size := _header(record, "ot-original-bytes")):
        raise click.UsageError(f"only the first {len(record.value):,} of {int(size):,} bytes were kept; give the whole record by --value-file")
    headers = [(key, content) for key, content in record.headers if not key.startswith("ot-original") and key not in _ADDED_HEADERS]
    original_key = next((content for key, content in record.headers if key == "ot-original-key"), None)
    partition = int(_header(record, "ot-original-partition"))
    sender = kafka.producer(settings, "dlq-replay")
    try:
        await sender.start()
        sent = await sender.send_and_wait(target, record.value if value is None else value, key=original_key, partition=partition, headers=headers)
    finally:
        await sender.stop()
    return f"sent to {target} partition {sent.partition} offset {sent.offset}; the dead letter stays until its retention ends"


@asynccontextmanager
async def _reader(settings: KafkaSettings, topic: str) -> AsyncIterator[tuple[AIOKafkaConsumer, list[TopicPartition]]]:
    """A private reader of all partitions of a topic."""
    reader = kafka.groupless_consumer(settings, "opentinker-cli")
    try:
        await reader.start()
        table = topic_table(settings.partitions)
        places = [TopicPartition(topic, number) for number in range(table[topic][0])]
        reader.assign(places)
        yield reader, places
    finally:
        await reader.stop()


def _header(record: Any, name: str) -> str:
    return next((content.decode(errors="replace") for key, content in record.headers if key == name), "")


def _letter_data(record: Any) -> dict[str, Any]:
    errors = _header(record, "ot-errors")
    return {
        "topic": record.topic,
        "offset": record.offset,
        "original": f"{_header(record, 'ot-original-topic')}:{_header(record, 'ot-original-partition')}:{_header(record, 'ot-original-offset')}",
        "errors": json.loads(errors) if errors else [],
        "headers": {key: content.decode(errors="replace") for key, content in record.headers if not key.startswith("ot-")},
        "value": (record.value or b"").decode(errors="replace"),
    }
