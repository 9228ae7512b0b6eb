"""`opentinker audit` and `opentinker replay`: what happened, from the topics themselves, and whether it would happen again. Both need Kafka alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

import click
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.errors import InvalidMessage, nearest, shorten
from opentinker.schemas.messages import AttemptEnded, JobStatus
from opentinker.schemas.records import InputRecord, decode, iso_time
from opentinker.schemas.topics import CHECKPOINTS, COMMANDS, EVENTS, PLACEMENTS, REPORTS, STATUS, accepted_types, partition_of, topic_named

from ..client.errors import ConflictError, NotFoundError
from ..client.naming import check_job, check_name, looks_like_uid, may_begin_uid
from ..core.audit import AUDITED_TOPICS, History, JobSearch, audit
from .connect import configured
from .jobs import namespace_option
from .output import print_data, print_table, safe
from .reading import read_through, topic_reader

__all__ = ["audit_command"]

_RECORDS_MAX = 2_000_000  # of one topic: about a minute of reading
_FOUND_MAX = 100_000  # records of one job; a job of a thousand attempts makes a tenth of that
_NAMED_MAX = 5  # jobs that a beginning may mean
_MARGIN_MS = 3_600_000  # clocks of other machines may be wrong by this much
_QUIET_S = 2.0  # then progress is shown
_ENDED: Final = AttemptEnded.ce_type().encode()


@dataclass(slots=True)
class _Progress:
    """One line on standard error, once it takes long."""

    began: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self.began > _QUIET_S and now - self.shown > _QUIET_S:
            self.shown = now
            click.echo(text, err=True)


@click.command("audit")
@click.argument("job")
@namespace_option
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True, help="Form.")
def audit_command(job: str, namespace: str, output: str) -> None:
    """A job's exact history, from the topics: every line with its time at the broker, its place and its cause.

    JOB is a name (the newest job of that name), a uid, or the first eight characters of one. Topics keep two to thirty days; what is gone is said.
    """
    settings = configured().kafka
    uid, status = asyncio.run(_find(settings, check_job(job), check_name("namespace", namespace)))
    history, begins = asyncio.run(_history(settings, uid, status))
    if not history.entries:
        raise NotFoundError(f"no topic holds a record of job {job}; its records are past their retention, or it never was", 404)
    if output != "table":
        entries = [entry.data(iso_time(entry.time_ms)) for entry in history.entries]
        phase = status.phase.value if status else None
        print_data({"job_uid": uid, "phase": phase, "entries": entries, "begins": begins, "warnings": list(history.warnings)}, output)
        return
    if status is not None:
        click.echo(f"job {status.namespace}/{status.name} {uid}: {status.phase.value}, revision {status.revision}")
    rows = [
        (
            iso_time(entry.time_ms),
            "" if entry.revision is None else entry.revision,
            entry.type,
            entry.text + (f" ×{entry.published} published" if entry.published > 1 else ""),
            entry.place,
            entry.cause,
        )
        for entry in history.entries
    ]
    print_table(("TIME", "REVISION", "TYPE", "WHAT", "RECORD", "CAUSE"), rows, "nothing")
    for topic, text in begins.items():
        click.echo(f"{topic}: {text}", err=True)
    for warning in history.warnings:
        click.echo(f"warning: {safe(warning)}", err=True)


async def _find(settings: KafkaSettings, job: str, namespace: str) -> tuple[str, JobStatus | None]:
    """The job's uid and its newest status, if the compacted topic has one."""
    uid = job if looks_like_uid(job) else None
    search, progress = JobSearch(job, namespace, begins_uid=may_begin_uid(job)), _Progress()
    async with topic_reader(settings, STATUS) as (reader, places):
        for place in places if uid is None else [places[partition_of(uid, len(places))]]:
            first, end = await kafka.bounds(reader, place)
            async for record in read_through(reader, place, first, end):
                progress.tell(f"looking for {shorten(job)} in {STATUS} partition {place.partition}: {record.offset:,} of {end:,}")
                if (uid is None or record.key == uid.encode()) and (status := _status(record)) is not None:
                    search.take(status)
    if uid is not None:
        return uid, next(iter(search.found), None)
    if not search.found:
        guess = nearest(job, search.names)
        raise NotFoundError(
            f"namespace {namespace} has no job {shorten(job)}; {f'did you mean {guess}?' if guess else 'see opentinker get jobs'}", 404
        )
    if len(search.found) > 1:
        listed = ", ".join(f"{status.job_uid} ({status.namespace}/{status.name})" for status in search.found[:_NAMED_MAX])
        raise ConflictError(f"job: several uids begin with {job}: {listed}; write more of it", 409)
    return search.found[0].job_uid, search.found[0]


def _status(record: InputRecord) -> JobStatus | None:
    try:
        message = decode(record.headers, record.value, accepted_types(STATUS)).message
    except InvalidMessage:
        return None
    return message if isinstance(message, JobStatus) else None


async def _history(settings: KafkaSettings, uid: str, status: JobStatus | None) -> tuple[History, dict[str, str]]:
    """Everything the topics hold of the job, and what must be known about where they begin and how far they were read."""
    found: list[InputRecord] = []
    begins: dict[str, str] = {}
    pool = status.pool if status else None
    for topic in (EVENTS, PLACEMENTS, CHECKPOINTS, COMMANDS, REPORTS):
        if pool is None and topic in (COMMANDS, REPORTS):
            pool = _pool_of(found, uid)
        if pool is None and topic in (COMMANDS, REPORTS):
            begins[topic] = "not read: nothing says which pool the job was in, so its partition is not known"
            continue
        inputs = topic in (COMMANDS, REPORTS)
        partition = partition_of(str(pool), settings.partitions) if inputs else partition_of(uid, int(topic_named(topic).partitions))
        records, note = await _scan(settings, topic, partition, uid, status)
        found += records[: max(0, _FOUND_MAX - len(found))]
        if note:
            begins[topic] = note
    assert {EVENTS, PLACEMENTS, CHECKPOINTS, COMMANDS, REPORTS} == set(AUDITED_TOPICS)
    return audit(found, uid), begins


def _pool_of(records: list[InputRecord], uid: str) -> str | None:
    for record in records:
        if record.topic == EVENTS and record.key == uid.encode():
            try:
                return str(getattr(decode(record.headers, record.value, accepted_types(EVENTS)).message, "pool", "")) or None
            except InvalidMessage:
                continue
    return None


async def _scan(settings: KafkaSettings, topic: str, partition: int, uid: str, status: JobStatus | None) -> tuple[list[InputRecord], str]:
    """The records of one partition that name the job, from when it was submitted."""
    progress, wanted = _Progress(), uid.encode()
    found: list[InputRecord] = []
    async with topic_reader(settings, topic) as (reader, places):
        place = places[partition]
        first, end = await kafka.bounds(reader, place)
        start, note = first, ""
        if status is not None and end > first:
            since = (await reader.offsets_for_times({place: max(0, status.submitted_ms - _MARGIN_MS)})).get(place)
            start = end if since is None else max(first, since.offset)
        if first > 0 and start == first:
            note = f"begins at offset {first} of partition {partition}; older records are past their retention"
        stop = min(end, start + _RECORDS_MAX)
        async for record in read_through(reader, place, start, stop):
            progress.tell(f"reading {topic} partition {partition}: {record.offset - start:,} of {stop - start:,}")
            if _names(record, wanted) and len(found) < _FOUND_MAX:
                found.append(record)
    if stop < end:
        note = f"{note}; ".lstrip("; ") + f"read up to offset {stop} of {end} in partition {partition}: the rest is beyond what one command reads"
    return found, note


def _names(record: InputRecord, uid: bytes) -> bool:
    """Whether a record is about the job, without decoding it. Heartbeats are not part of the history: what they changed is an event."""
    if record.topic == REPORTS and ("ce_type", _ENDED) not in record.headers:
        return False
    return record.key == uid or uid in (record.value or b"")
