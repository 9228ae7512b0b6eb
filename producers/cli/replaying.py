"""`opentinker replay`: fold the inputs behind a journal again, with today's core, and compare. Needs Kafka alone, or a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
from aiokafka import AIOKafkaConsumer, TopicPartition
from opentinker.compose.runtime.kafka import bounds, read_range
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.scheduler_stream.core.policy import CORE_VERSION
from opentinker.scheduler_stream.errors import SchedulerError
from opentinker.scheduler_stream.log import KafkaLog
from opentinker.scheduler_stream.recorded_log import Entry, Header, LogFile, RecordedLogError, read_file, read_journal
from opentinker.scheduler_stream.replay import Outcome, Recorded, Replay
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import INPUT_TOPICS

from .connect import configured
from .output import safe
from .reading import read_through, topic_reader

__all__ = ["replay_command"]

_QUIET_S = 2.0


@click.command("replay")
@click.option("--partition", type=click.IntRange(0), default=None, help="Only this partition; otherwise all, one after another.")
@click.option(
    "--from", "start", type=click.IntRange(0), default=None, metavar="OFFSET", help="Begin at this journal offset; otherwise where recovery would."
)
@click.option("--to", "end", type=click.IntRange(0), default=None, metavar="OFFSET", help="End before this journal offset; otherwise at its end.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE", help="Also write the log to a file.")
@click.option("--log", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None, metavar="FILE", help="Replay a saved log.")
def replay_command(partition: int | None, start: int | None, end: int | None, save: Path | None, file: Path | None) -> None:
    """Fold recorded inputs with this version's scheduler core and compare with what was decided then.

    Exit 0: identical. Exit 1: not; the first difference is shown. Without --from it begins where the newest sweep of the state did, so that it covers
    what was decided lately; --partition and --from go further back. A journal reaches two days back, a log in a file as long as the file is kept.
    """
    if file is not None:
        if any(given is not None for given in (partition, start, end, save)):
            raise click.UsageError("--log replays a whole file: leave the other options out")
        outcomes: list[Outcome | None] = [_replay_file(file)]
    else:
        settings = configured().kafka
        if partition is None and any(given is not None for given in (start, end, save)):
            raise click.UsageError("--from, --to and --save are about one partition: give --partition")
        if partition is not None and partition >= settings.partitions:
            raise click.UsageError(f"--partition: there are {settings.partitions}, 0 to {settings.partitions - 1}")
        chosen = range(settings.partitions) if partition is None else [partition]
        outcomes = [asyncio.run(_replay_partition(settings, number, start, end, save, optional=partition is None)) for number in chosen]
    if any(outcome is not None and outcome.difference is not None for outcome in outcomes):
        raise click.exceptions.Exit(1)


@dataclass(slots=True)
class _Progress:
    """What comes out of the feeding, told now and then."""

    what: str
    replay: Replay
    versions: set[int] = field(default_factory=set)
    shown: float = field(default_factory=time.monotonic)
    first: int | None = None  # offsets in the journal
    last: int = 0

    @property
    def over(self) -> bool:
        return self.replay.outcome.difference is not None

    def feed(self, entry: Entry) -> None:
        """Nothing, once a difference is found."""
        if self.over:
            return
        if isinstance(entry, Recorded):
            self.versions.add(entry.core_version)
            self.first = entry.offset if self.first is None else self.first
            self.last = entry.offset
        outcome = self.replay.outcome
        if time.monotonic() - self.shown > _QUIET_S:
            self.shown = time.monotonic()
            click.echo(f"{self.what}: {outcome.records:,} records, {outcome.inputs:,} inputs, journal offset {entry.offset:,}", err=True)
        self.replay.feed(entry)

    def end(self) -> Outcome:
        outcome = self.replay.end()
        if others := sorted(self.versions - {CORE_VERSION}):
            said = ", ".join(map(str, others))
            click.echo(f"{self.what}: recorded by core version {said}, this is {CORE_VERSION}: other decisions are to be expected", err=True)
        where = "" if self.first is None else f"journal {self.first:,} to {self.last:,}, "
        counts = f"{where}{outcome.records:,} records, {outcome.inputs:,} inputs, {outcome.outputs:,} outputs"
        if outcome.difference is None:
            click.echo(f"{self.what}: {counts}: identical, state {outcome.hash}")
        else:
            click.echo(f"{self.what}: {counts}: different at")
            for line in outcome.difference.text().splitlines():
                click.echo(safe(line))
        return outcome


def _replay_file(path: Path) -> Outcome:
    try:
        header, entries = read_file(path)
        progress = _Progress(f"{path} (partition {header.partition})", Replay(partitions=header.partitions))
        for entry in entries:
            progress.feed(entry)
            if progress.over:
                break
        return progress.end()
    except SchedulerError as error:
        raise click.ClickException(str(error)) from None


async def _replay_partition(
    settings: KafkaSettings, partition: int, start: int | None, end: int | None, save: Path | None, *, optional: bool
) -> Outcome | None:
    """None: an empty journal, where that is no mistake."""
    log = KafkaLog(settings, partition, None)
    if optional and (await log.bounds())[1] == 0:
        click.echo(f"partition {partition}: its journal is empty")
        return None
    progress = _Progress(f"partition {partition}", Replay(partitions=settings.partitions))
    try:
        async with AsyncExitStack() as stack:
            header = Header(partition=partition, partitions=settings.partitions, note=f"journal from {start} to {end}")
            file = None if save is None else stack.enter_context(LogFile(save, header))
            inputs = await stack.enter_async_context(_inputs_of(settings, partition))
            async for entry in read_journal(log, inputs, start, end):
                if file is not None:
                    file.add(entry)
                elif progress.over:
                    break
                progress.feed(entry)
        return progress.end()
    except SchedulerError as error:
        raise click.ClickException(f"partition {partition}: {error}") from None


class _ForwardReader:
    """One input topic's partition, read forward once."""

    def __init__(self, reader: AIOKafkaConsumer, place: TopicPartition, first: int, end: int) -> None:
        self.first = first
        self._reader, self._place, self._end = reader, place, end
        self._records: AsyncIterator[InputRecord] | None = None
        self._held: InputRecord | None = None  # read, and behind what was asked for

    async def read(self, start: int, end: int) -> list[InputRecord]:
        found: list[InputRecord] = []
        if self._records is None:
            self._records = read_through(self._reader, self._place, max(start, self.first), self._end)
        while True:
            held = self._held or await anext(self._records, None)
            self._held = held if held is not None and held.offset >= end else None
            if held is None or self._held is not None:
                return found
            if held.offset >= start:
                found.append(held)


class _Inputs:
    """The scheduler's inputs of one partition, each by a reader of its own."""

    def __init__(self, settings: KafkaSettings, partition: int, readers: Mapping[str, _ForwardReader]) -> None:
        self._settings, self._partition, self._readers = settings, partition, readers

    async def first(self, topic: str) -> int:
        return self._readers[topic].first

    async def read(self, topic: str, start: int, end: int) -> list[InputRecord]:
        return await self._readers[topic].read(start, end)

    async def at(self, topic: str, offset: int) -> InputRecord:
        found = await read_range(self._settings, topic, self._partition, offset, offset + 1)
        if not found:
            raise RecordedLogError(f"{topic} offset {offset} of partition {self._partition} holds no record any more")
        return found[0]


@asynccontextmanager
async def _inputs_of(settings: KafkaSettings, partition: int) -> AsyncIterator[_Inputs]:
    readers: dict[str, _ForwardReader] = {}
    async with AsyncExitStack() as stack:
        for topic in INPUT_TOPICS:
            reader, places = await stack.enter_async_context(topic_reader(settings, topic))
            place = places[partition]
            readers[topic] = _ForwardReader(reader, place, *await bounds(reader, place))
        yield _Inputs(settings, partition, readers)
