"""`opentinker dlq`: look at dead letters, send them again, drop them. Speaks to Kafka alone, and holds a bounded part of a topic in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import click
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import TopicAuthorizationFailedError
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings, load_settings
from opentinker.schemas.errors import nearest, printable
from opentinker.schemas.quantities import duration_s
from opentinker.schemas.records import InputRecord, iso_time
from opentinker.schemas.topics import dead_letter_topic, topic_table

from ..core.letters import Letter, hex_dump, readable_text, why_it_may_come_back, why_not_again
from .connect import configured
from .output import format_option, print_data, print_table, safe
from .reading import read_through, topic_reader

__all__ = ["dlq"]

_LIST_MAX = 10_000
_REPLAY_MAX = 10_000  # letters sent again by one command; a second one takes the next
_NAMED_MAX = 20  # letters that a question names one by one
_SHARED_BYTES_MAX = 64 * 1024  # of a value that is held for a list


@click.group()
def dlq() -> None:
    """Dead letters: records that could not be read, kept with their bytes, headers and the error."""


@dlq.command("list")
@click.option("--topic", default=None, help="Only dead letters of this topic.")
@click.option("--since", default=None, metavar="DURATION", help="Only what came within this time, for example 1h.")
@click.option("--limit", type=click.IntRange(1, _LIST_MAX), default=100, show_default=True, help="At most so many.")
@format_option
def list_letters(topic: str | None, since: str | None, limit: int, output: str) -> None:
    """List dead letters, newest first."""
    since_ms = _now_ms() - _milliseconds(since) if since else 0
    letters, more = asyncio.run(_newest(configured().kafka, _topics(topic), limit, since_ms))
    if output in ("json", "yaml"):
        print_data([letter.data() for letter in letters], output)
    elif output == "name":
        for letter in letters:
            click.echo(f"{letter.record.topic} {letter.record.offset}")
    else:
        rows = [row for letter in letters for row in _rows(letter)]
        print_table(("TOPIC", "OFFSET", "TIME", "ERROR"), rows, "no dead letters")
    if more:
        click.echo(f"up to {more:,} older ones are not shown; see --limit, --topic and --since", err=True)


@dlq.command()
@click.argument("topic")
@click.argument("offset", type=click.IntRange(0))
@format_option
def show(topic: str, offset: int, output: str) -> None:
    """Show one dead letter: where it stood, what was wrong, its headers and its value."""
    name = _topics(topic)[0]
    letter = asyncio.run(_one(configured().kafka, name, offset))
    if output in ("json", "yaml"):
        print_data(letter.data(whole=True), output)
    elif output == "name":
        click.echo(f"{letter.record.topic} {letter.record.offset}")
    else:
        _print_letter(letter)


def _rows(letter: Letter) -> list[tuple[object, ...]]:
    """One line for each thing that is wrong with it."""
    errors = [f"{error.get('field') or 'document'}: {error.get('message', '')}" for error in letter.errors] or [letter.error]
    place = (letter.record.topic, letter.record.offset, iso_time(letter.record.append_time_ms))
    return [(*(place if number == 0 else ("", "", "")), text[:100]) for number, text in enumerate(errors)]


def _print_letter(letter: Letter) -> None:
    record = letter.record
    value = record.value or b""
    click.echo(f"Letter:    {record.topic} offset {record.offset}, {iso_time(record.append_time_ms)}")
    click.echo(safe(f"Original:  {letter.place}, {iso_time(letter.original_time_ms)}"))
    click.echo(safe(f"Reader:    {letter.header('ot-reader')}"))
    click.echo("Errors:")
    for error in letter.errors:
        click.echo(safe(f"  {error.get('field') or 'document'}: {error.get('message', '')}; {error.get('remedy', '')}"))
    click.echo("Headers:")
    for key, content in letter.original_headers():
        click.echo(f"  {safe(key)}: {safe(content.decode(errors='replace'))[:500]}")
    cut = f", of which {len(value):,} are kept" if letter.original_bytes > len(value) else ""
    click.echo(f"Value:     {'none' if letter.original_value() is None else f'{letter.original_bytes:,} bytes{cut}'}")
    text = readable_text(value)
    for line in hex_dump(value) if text is None else printable(text).splitlines():
        click.echo(f"  {line}")


@dlq.command()
@click.argument("topic")
@click.argument("offsets", metavar="[OFFSET]...", nargs=-1, type=click.IntRange(0))
@click.option("--all", "everything", is_flag=True, help="Every dead letter of TOPIC, or those that --error picks.")
@click.option("--error", "text", default=None, help="With --all: only those whose error contains this text.")
@click.option("--value-file", type=click.File("rb"), default=None, help="Send these bytes in place of the original ones; for one OFFSET.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before several are sent.")
def replay(topic: str, offsets: tuple[int, ...], everything: bool, text: str | None, value_file: IO[bytes] | None, yes: bool) -> None:
    """Send dead letters to their topic again, with the key, the partition and the headers they had.

    The ids stay the same, so what was taken already is recognised. A dead letter stays until its retention ends, or until `opentinker dlq drop`.
    """
    if everything == bool(offsets):
        raise click.UsageError("name the OFFSETs to send again, or choose them with --all (and --error TEXT)")
    if text is not None and not everything:
        raise click.UsageError("--error chooses among all: give --all with it, or leave it out")
    if value_file is not None and len(offsets) != 1:
        raise click.UsageError("--value-file mends one dead letter: name exactly one OFFSET")
    settings, name = configured().kafka, _topics(topic)[0]
    mended = value_file.read() if value_file is not None else None
    chosen = asyncio.run(_choose(settings, name, offsets, text, mended is not None))
    if everything or len(offsets) > 1:
        _say_chosen(name, chosen)
        if chosen.offsets and not yes:
            click.confirm("Send them?", abort=True, err=True)
    elif chosen.refused:
        raise click.UsageError(f"{name} offset {offsets[0]}: {chosen.refused[0][1]}")
    for offset, doubt in chosen.doubtful if not (everything or len(offsets) > 1) else ():
        click.echo(f"offset {offset}: {safe(doubt)}", err=True)
    click.echo(asyncio.run(_replay(settings, name, chosen.offsets, mended)))
    if chosen.refused and not everything:
        raise click.ClickException(f"{len(chosen.refused)} of {len(offsets)} were not sent")


@dlq.command()
@click.argument("topic")
@click.option("--before", type=click.IntRange(0), required=True, metavar="OFFSET", help="Drop what stands before this offset.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def drop(topic: str, before: int, yes: bool) -> None:
    """Delete the oldest dead letters of TOPIC for good, up to an offset."""
    settings, name = configured().kafka, _topics(topic)[0]
    going = asyncio.run(_before(settings, name, before))
    if not going.count:
        click.echo(f"{name} holds nothing before offset {before}")
        return
    click.echo(f"{going.count:,} dead letters of {name} go, from offset {going.first} to {before - 1}:", err=True)
    for letter in going.named:
        click.echo(f"  {letter.record.offset}  {iso_time(letter.record.append_time_ms)}  {safe(letter.error[:100])}", err=True)
    if going.count > len(going.named):
        click.echo(f"  … and {going.count - len(going.named):,} more", err=True)
    if not yes:
        click.confirm("Delete them for good?", abort=True, err=True)
    asyncio.run(_delete(settings, name, before))
    click.echo(f"{going.count:,} dead letters dropped from {name}")


def _topics(topic: str | None) -> list[str]:
    """The dead-letter topics that are meant; a topic may be named with or without `.dlq`."""
    known = [name for name in topic_table(1, load_settings().ingress.namespaces) if name.endswith(".dlq")]
    if topic is None:
        return known
    wanted = dead_letter_topic(topic.removesuffix(".dlq"))
    if wanted not in known:
        guess = nearest(wanted, known)
        names = [name.removesuffix(".dlq") for name in known]
        remedy = f"did you mean {guess.removesuffix('.dlq')}?" if guess else f"choose one of {', '.join(names)}"
        raise click.UsageError(f"{topic} has no dead letters; {remedy}")
    return [wanted]


def _milliseconds(duration: str) -> int:
    try:
        return int(duration_s(duration) * 1000)
    except ValueError as error:
        raise click.UsageError(f"--since: {error}") from None


async def _newest(settings: KafkaSettings, names: Sequence[str], limit: int, since_ms: int) -> tuple[list[Letter], int]:
    """The newest letters of all topics, newest first; and at most how many older ones there are."""
    found: list[Letter] = []
    older = 0
    for name in names:
        async with topic_reader(settings, name) as (reader, (place, *_)):
            first, end = await kafka.bounds(reader, place)
            if since_ms:
                since = (await reader.offsets_for_times({place: since_ms})).get(place)
                first = end if since is None else max(first, since.offset)
            start, newest = end, list[Letter]()
            while start > first and len(newest) < limit:  # offsets may hold no record: step back until there are enough
                stop, start = start, max(first, start - limit)
                newest = [Letter(_lightened(record)) async for record in read_through(reader, place, start, stop)] + newest
            found += newest
            older += start - first
    found.sort(key=lambda letter: (letter.record.append_time_ms, letter.record.topic, letter.record.offset), reverse=True)
    return found[:limit], older + len(found[limit:])


def _lightened(record: InputRecord) -> InputRecord:
    """Without most of a large value, so that a list of many fits in memory. Its length is kept where the letter says one was cut."""
    value = record.value or b""
    if len(value) <= _SHARED_BYTES_MAX:
        return record
    headers = record.headers if any(key == "ot-original-bytes" for key, _ in record.headers) else (*record.headers, _length_header(value))
    return InputRecord(
        topic=record.topic, partition=record.partition, offset=record.offset, append_time_ms=record.append_time_ms, key=record.key,
        value=value[:_SHARED_BYTES_MAX], headers=headers,
    )  # fmt: skip


def _length_header(value: bytes) -> tuple[str, bytes]:
    return "ot-original-bytes", str(len(value)).encode()


async def _one(settings: KafkaSettings, name: str, offset: int) -> Letter:
    async with topic_reader(settings, name) as (reader, (place, *_)):
        return await _at(reader, place, offset)


async def _at(reader: AIOKafkaConsumer, place: TopicPartition, offset: int) -> Letter:
    first, end = await kafka.bounds(reader, place)
    if not first <= offset < end:
        holds = f"holds offsets {first} to {end - 1}" if end > first else "holds nothing"
        raise click.UsageError(f"{place.topic} {holds}; see opentinker dlq list")
    found = [Letter(record) async for record in read_through(reader, place, offset, offset + 1)]
    if not found:
        raise click.UsageError(f"{place.topic} offset {offset} holds no record; see opentinker dlq list")
    return found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What to send again; and what is not, with the reason."""

    offsets: tuple[int, ...]
    refused: tuple[tuple[int, str], ...]
    doubtful: tuple[tuple[int, str], ...]  # that are sent and may come back; the first few
    left: int = 0  # beyond what one command takes


async def _choose(settings: KafkaSettings, name: str, offsets: Sequence[int], text: str | None, mended: bool) -> _Chosen:
    async with topic_reader(settings, name) as (reader, (place, *_)):
        good: list[int] = []
        doubtful: list[tuple[int, str]] = []
        refused: list[tuple[int, str]] = []
        left = 0

        def judge(letter: Letter) -> None:
            nonlocal left
            reason = why_not_again(letter, _now_ms(), mended=mended)
            if len(good) + len(refused) >= _REPLAY_MAX:
                left += 1
            elif reason is None:
                good.append(letter.record.offset)
                if not mended and len(doubtful) < _NAMED_MAX and (doubt := why_it_may_come_back(letter)) is not None:
                    doubtful.append((letter.record.offset, doubt))
            else:
                refused.append((letter.record.offset, reason))

        if offsets:
            for offset in sorted(set(offsets)):
                judge(await _at(reader, place, offset))
        else:
            first, end = await kafka.bounds(reader, place)
            async for record in read_through(reader, place, first, end):
                if text is None or Letter(record).mentions(text):
                    judge(Letter(record))
        return _Chosen(offsets=tuple(good), refused=tuple(refused), doubtful=tuple(doubtful), left=left)


def _say_chosen(name: str, chosen: _Chosen) -> None:
    click.echo(f"{len(chosen.offsets):,} dead letters of {name} are to be sent again", err=True)
    for offset, reason in chosen.refused[:_NAMED_MAX]:
        click.echo(f"  not offset {offset}: {safe(reason)}", err=True)
    if len(chosen.refused) > _NAMED_MAX:
        click.echo(f"  … and {len(chosen.refused) - _NAMED_MAX:,} more that cannot be sent", err=True)
    for offset, doubt in chosen.doubtful:
        click.echo(f"  offset {offset}: {safe(doubt)}", err=True)
    if chosen.left:
        click.echo(f"  {chosen.left:,} more are left to the next command", err=True)


async def _replay(settings: KafkaSettings, name: str, offsets: Sequence[int], mended: bytes | None) -> str:
    if not offsets:
        return "nothing sent"
    wanted, sent, last = set(offsets), 0, ""
    try:
        async with kafka.started(kafka.producer(settings, "dlq-replay")) as sender, topic_reader(settings, name) as (reader, (place, *_)):
            async for record in read_through(reader, place, min(wanted), max(wanted) + 1):
                if record.offset in wanted:
                    last = await _send_again(sender, Letter(record), mended)
                    sent += 1
    except BaseException:
        with suppress(OSError):
            click.echo(f"{sent:,} of {len(wanted):,} were sent before this; sending them again is safe", err=True)
        raise
    if len(wanted) == 1:
        return f"{last}; the dead letter stays until its retention ends"
    return f"{sent:,} sent again; the dead letters stay until their retention ends, or opentinker dlq drop"


async def _send_again(sender: AIOKafkaProducer, letter: Letter, mended: bytes | None) -> str:
    value = letter.original_value() if mended is None else mended
    try:
        answer: Any = await sender.send_and_wait(
            letter.topic, value, key=letter.original_key, partition=letter.original_partition, headers=letter.original_headers()
        )
    except TopicAuthorizationFailedError:
        raise click.ClickException(
            f"this Kafka user may not write {letter.topic}; send it as one of a role that may (opentinker access plan), by OPENTINKER_KAFKA__SASL_USERNAME"
        ) from None
    return f"sent to {letter.topic} partition {answer.partition} offset {answer.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Going:
    first: int
    count: int
    named: tuple[Letter, ...]


async def _before(settings: KafkaSettings, name: str, before: int) -> _Going:
    async with topic_reader(settings, name) as (reader, (place, *_)):
        first, end = await kafka.bounds(reader, place)
        if before > end:
            raise click.UsageError(f"{name} ends at offset {end}: --before may be at most that")
        named: list[Letter] = []
        count = 0
        async for record in read_through(reader, place, first, before):
            count += 1
            if len(named) < _NAMED_MAX:
                named.append(Letter(_lightened(record)))
        return _Going(first=first, count=count, named=tuple(named))


async def _delete(settings: KafkaSettings, name: str, before: int) -> None:
    admin = kafka.admin_client(settings, "dlq-drop")
    try:
        await admin.start()
        await admin.delete_records({TopicPartition(name, 0): RecordsToDelete(before)})
    finally:
        await admin.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
