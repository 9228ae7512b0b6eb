"""Commands that speak to Kafka directly: topics, training metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import click
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings, load_settings
from opentinker.schemas.messages import TrainingMetrics
from opentinker.schemas.records import decode
from opentinker.schemas.topics import METRICS, TOPICS, accepted_types, topic_table

from .output import format_option, print_data, print_table, safe
from .reading import topic_reader

__all__ = ["metrics", "topics"]


@click.group()
def topics() -> None:
    """Make, compare and list the Kafka topics."""


@topics.command()
def ensure() -> None:
    """Make the topics that are missing and compare those that exist. Safe to repeat; refuses a topic of another shape."""
    settings = load_settings()
    made = asyncio.run(kafka.ensure_topics(settings.kafka, settings.ingress.namespaces))
    click.echo(f"{len(made)} topics made, {len(topic_table(1, settings.ingress.namespaces)) - len(made)} as they should be")


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
    async with topic_reader(settings, METRICS) as (reader, places):
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
