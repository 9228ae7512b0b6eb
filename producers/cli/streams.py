"""Commands that speak to Kafka directly: topics, training metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import click
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.messages import TrainingMetrics
from opentinker.schemas.records import decode
from opentinker.schemas.topics import DEAD_LETTERS_KEPT_MS, METRICS, TOPICS, accepted_types, dead_letter_topic, topic_table

from ..client import Client
from ..client.errors import OpenTinkerError
from .connect import configured, uid_of
from .output import format_option, print_data, print_table, safe
from .reading import topic_reader

__all__ = ["metrics", "topics"]

_POLL_MS = 2_000


@click.group()
def topics() -> None:
    """Make, compare and list the Kafka topics."""


@topics.command()
def ensure() -> None:
    """Make the topics that are missing and compare those that exist. Safe to repeat; refuses a topic of another shape."""
    settings = configured()
    made = asyncio.run(kafka.ensure_topics(settings.kafka, settings.ingress.namespaces))
    click.echo(f"{len(made)} topics made, {len(topic_table(1, settings.ingress.namespaces)) - len(made)} as they should be")


@topics.command("list")
@click.option("--all", "everything", is_flag=True, help="Dead-letter topics as well.")
@format_option
def list_topics(everything: bool, output: str) -> None:
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
    if everything:
        rows += [
            {
                "topic": dead_letter_topic(topic.name),
                "key": "as original",
                "kind": f"{DEAD_LETTERS_KEPT_MS // 3_600_000} h",
                "written_by": "whoever could not read it",
                "read_by": "operators",
                "summary": f"What could not be read on {topic.name}; see opentinker dlq",
            }
            for topic in TOPICS.values()
            if topic.dead_letters
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
@click.option("--job", default=None, metavar="NAME|UID", help="Only this job; ends when it has ended.")
@click.option("-n", "--namespace", default="default", show_default=True, envvar="OPENTINKER_NAMESPACE", help="Namespace of a job given by name.")
@click.option("--from-beginning", is_flag=True, help="Everything the topic still holds, not only what comes.")
@click.option("--count", type=click.IntRange(1), default=None, help="Stop after that many samples.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Form; json prints one object a line.")
def tail(job: str | None, namespace: str, from_beginning: bool, count: int | None, output: str) -> None:
    """Print samples as they come, until interrupted. Of a job that has ended already: those that the topic still holds."""
    settings, uid = configured().kafka, None if job is None else uid_of(job, namespace)
    ended = uid is not None and _phase(uid) in ("Completed", "Failed", "Cancelled")
    shown = asyncio.run(_tail(settings, uid, from_beginning or ended, count, output))
    if uid is not None and (count is None or shown < count):
        click.echo(f"job {job} is {_phase(uid) or 'not known to the gateway'}; {shown:,} samples shown", err=True)


def _phase(uid: str) -> str:
    """Empty where no gateway tells: the topic can be read without one."""
    try:
        with Client(timeout_s=5.0, attempts=1) as client:
            return client.job(uid).status.phase
    except OpenTinkerError:
        return ""


async def _tail(settings: KafkaSettings, job_uid: str | None, from_beginning: bool, count: int | None, form: str) -> int:
    """How many were shown. Ends by itself once a job that was asked for has ended and nothing more comes."""
    shown = 0
    async with topic_reader(settings, METRICS) as (reader, places):
        await (reader.seek_to_beginning(*places) if from_beginning else reader.seek_to_end(*places))
        while True:
            batches = await reader.getmany(timeout_ms=_POLL_MS)
            for record in (record for records in batches.values() for record in records):
                sample = decode(tuple(record.headers), record.value, accepted_types(METRICS)).message
                assert isinstance(sample, TrainingMetrics)
                if job_uid is not None and sample.job_uid != job_uid:
                    continue
                click.echo(sample.model_dump_json() if form == "json" else _line(sample))
                shown += 1
                if count is not None and shown >= count:
                    return shown
            if not batches and job_uid is not None and await asyncio.to_thread(_phase, job_uid) in ("Completed", "Failed", "Cancelled"):
                return shown


def _line(sample: TrainingMetrics) -> str:
    values = "  ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in sorted(sample.values.items()))
    return safe(f"{sample.job_uid[:8]} attempt {sample.attempt_number} step {sample.global_step:>9,}  {values}")
