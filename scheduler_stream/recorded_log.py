"""Recorded logs: put together from a journal and its inputs, and kept in one compressed file.

A file is gzip over: a header, then entries, each MessagePack behind its length. Both directions work entry by entry, so a log may be longer than memory.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Protocol, cast

import msgspec
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import INPUT_TOPICS

from .codec import InputSpan, JournalRecord, OwnerStarted, PackedChange, ReplayFrom
from .errors import SchedulerError
from .log import Log, LogEntry
from .recovery import Fold, decode, find_replay_from
from .replay import Recorded, RecordedInput, Recovered

__all__ = ["Entry", "Header", "LogFile", "RecordedLogError", "read_file", "read_journal", "step_order"]

Entry = Recovered | Recorded
Order = tuple[tuple[int, int], ...]

_FORMAT: Final = "opentinker recorded log 1"
_CHUNK: Final = 500  # journal offsets read at a time
_ENTRY_BYTES_MAX: Final = 2**30  # a state of a million jobs


class RecordedLogError(SchedulerError):
    """A recorded log cannot be had: something is past its retention, or a file is not one. The text says what to do."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a whole log."""

    format: str = _FORMAT
    partition: int
    partitions: int
    note: str = ""


class InputSource(Protocol):
    """The inputs of one partition, read forward."""

    async def first(self, topic: str) -> int:
        """The first offset that is left."""

    async def read(self, topic: str, start: int, end: int) -> list[InputRecord]:
        """The records of [start, end); `start` never goes back."""

    async def at(self, topic: str, offset: int) -> InputRecord:
        """One record, wherever it stands."""


async def read_journal(log: Log, inputs: InputSource, start: int | None = None, end: int | None = None) -> AsyncIterator[Entry]:
    """A partition's log of [start, end) of its journal; `start` None: where recovery would start, or the first place behind it whose inputs are left.

    Raises RecordedLogError when the state at `start`, or the inputs behind it, are past their retention.
    """
    first, last = await log.bounds()
    end = last if end is None else min(end, last)
    begin = max(first, (await find_replay_from(log)).replay_from.offset) if start is None else start
    if not first <= begin < end:
        holds = f"holds offsets {first} to {last - 1}" if last > first else "is empty"
        raise RecordedLogError(f"the journal {holds}; choose --from and --to among them")
    oldest = {topic: await inputs.first(topic) for topic in INPUT_TOPICS}
    fold, loads, offset = await _state_at(log, first, begin, end, exactly=start is not None)
    exact = begun = False
    async for entry in _entries(log, offset, end):
        before = dict(fold.positions)
        record = fold.apply(entry)
        fold.unpublished.clear()  # a replay publishes nothing
        if isinstance(record, OwnerStarted):
            (_, loads), exact = await _folded(log, record.replay_from, entry.offset), True
            if begun:
                yield Recovered(offset=entry.offset, loads=tuple(loads), exact=True)
        elif record is not None:
            if not begun and (gone := _gone(before, oldest)):
                if start is not None:
                    raise RecordedLogError(f"{gone}: leave --from out for the first possible start")
                loads += (*record.sweep, *record.changes)
                exact = False
                continue
            if not begun:
                yield Recovered(offset=entry.offset, loads=tuple(loads), exact=exact)
                begun = True
            yield await _recorded(inputs, before, entry.offset, record)
    if not begun:
        raise RecordedLogError("no record of that range has all of its inputs left, which are kept for two days; choose a later range")


async def _state_at(log: Log, first: int, start: int, end: int, *, exactly: bool) -> tuple[Fold, list[PackedChange], int]:
    """The state before the record at `start`; if that needs what the journal no longer holds, and it need not be there, before the next that does not."""
    async for entry in _entries(log, start, end):
        begin = decode(entry).replay_from
        if begin.offset >= first:
            return *await _folded(log, begin, entry.offset), entry.offset
        if exactly:
            raise RecordedLogError(
                f"the state at journal offset {start} needs the journal from {begin.offset}, which begins at {first}; leave --from out for the first possible"
            )
    raise RecordedLogError("the journal no longer holds a whole state before any record of that range; choose a later range")


async def _folded(log: Log, begin: ReplayFrom, offset: int) -> tuple[Fold, list[PackedChange]]:
    """What a worker that recovers before `offset` has loaded, in its order."""
    fold = Fold(owner_epoch=begin.owner_epoch, replay_from=begin)
    loads: list[PackedChange] = []
    async for entry in _entries(log, begin.offset, offset):
        if isinstance(found := fold.apply(entry), JournalRecord):
            loads += (*found.sweep, *found.changes)
        fold.unpublished.clear()
    return fold, loads


async def _entries(log: Log, start: int, end: int) -> AsyncIterator[LogEntry]:
    while start < end:
        stop = min(end, start + _CHUNK)
        for entry in await log.read(start, stop):
            yield entry
        start = stop


def _gone(positions: Mapping[str, InputSpan], oldest: Mapping[str, int]) -> str:
    """Which inputs behind these positions are no longer on their topic; empty: none."""
    for topic, span in positions.items():
        if oldest[topic] > span.through + 1:
            return f"the inputs from {topic} offset {span.through + 1} on are needed, the topic begins at {oldest[topic]}"
    return ""


async def _recorded(inputs: InputSource, before: Mapping[str, InputSpan], offset: int, record: JournalRecord) -> Recorded:
    by_topic: dict[str, list[InputRecord]] = {}
    for topic in INPUT_TOPICS:
        known, span = before.get(topic), record.inputs.get(topic)
        if span is None or (known is not None and known.through >= span.through):
            continue
        found = await inputs.read(topic, known.through + 1 if known else 0, span.through + 1)
        last = found[-1] if found else None
        if last is None or (last.offset, zlib.crc32(last.value or b""), last.append_time_ms) != (span.through, span.crc, span.append_time_ms):
            raise RecordedLogError(f"{topic} offset {span.through} is not the record that the journal folded: the topic was made anew, or cut")
        by_topic[topic] = found
    # A journal of before this field says no order: then as one batch is stepped, which may not be how it was.
    order = record.order or tuple((INPUT_TOPICS.index(topic), found[-1].offset) for topic, found in by_topic.items())
    ahead = [(INPUT_TOPICS[-1 - number], at) for number, at in order if number < 0]
    early = {(topic, at): await inputs.at(topic, at) for topic, at in ahead}
    stepped = step_order(by_topic, order, early, {topic: span.early for topic, span in before.items()})
    return Recorded(
        offset=offset,
        core_version=record.core_version,
        inputs=tuple(RecordedInput.of(each, record.inputs[each.topic].generation) for each in stepped),
        changes=record.changes,
        outputs=record.outputs,
        ordered=bool(record.order) or len(by_topic) <= 1,
    )


def step_order(
    by_topic: Mapping[str, list[InputRecord]],
    order: Order,
    early: Mapping[tuple[str, int], InputRecord],
    known_early: Mapping[str, tuple[int, ...]],
) -> Iterator[InputRecord]:
    """The inputs of one record as they were stepped, run by run: (number of the topic, last offset of the run), or (-1 - number, one offset that came early).

    `early`: those; `known_early`: offsets that earlier records have stepped so, which are passed over when their turn comes.
    """
    taken = dict.fromkeys(by_topic, 0)
    passed = {(topic, offset) for topic, offsets in known_early.items() for offset in offsets}
    for number, through in order:
        topic = INPUT_TOPICS[number if number >= 0 else -1 - number]
        if number < 0:
            passed.add((topic, through))
            yield early[topic, through]
            continue
        records = by_topic.get(topic, [])
        while taken.get(topic, 0) < len(records) and records[taken[topic]].offset <= through:
            record = records[taken[topic]]
            taken[topic] += 1
            if (topic, record.offset) not in passed:
                yield record
    assert all(taken[topic] == len(records) for topic, records in by_topic.items()), "an order that leaves inputs out"


class LogFile:
    """Writes a recorded log, entry by entry, inside a `with`. The file is there when that has ended well; otherwise what was there stays."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._header = header

    def __enter__(self) -> LogFile:
        self._raw = self._part.open("wb")
        # No name and no time in it: the same log is the same file.
        self._file = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, mtime=0)
        self._write(msgspec.msgpack.encode(self._header))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        self._raw.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink()

    def add(self, entry: Entry) -> None:
        self._write(_encoder.encode(entry))

    def _write(self, data: bytes) -> None:
        self._file.write(len(data).to_bytes(4, "big") + data)


_encoder: Final = msgspec.msgpack.Encoder()
_entry_decoder: Final = msgspec.msgpack.Decoder(Recovered | Recorded)
_header_decoder: Final = msgspec.msgpack.Decoder(Header)


def read_file(path: Path) -> tuple[Header, Iterator[Entry]]:
    """A log's header and its entries. Raises RecordedLogError for what is no log of this form."""
    try:
        file = cast("BinaryIO", gzip.open(path, "rb"))  # noqa: SIM115 the iterator that is returned closes it
        header = _header_decoder.decode(_framed(file) or b"")
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise RecordedLogError(f"{path} is not a recorded log ({error}); opentinker replay --save writes one") from None
    if header.format != _FORMAT:
        raise RecordedLogError(f"{path} is of form {header.format!r}, this release reads {_FORMAT!r}")
    return header, _file_entries(path, file)


def _file_entries(path: Path, file: BinaryIO) -> Iterator[Entry]:
    with file:
        try:
            while (data := _framed(file)) is not None:
                yield _entry_decoder.decode(data)
        except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
            raise RecordedLogError(f"{path} is cut or damaged ({error}); record it anew") from None


def _framed(file: BinaryIO) -> bytes | None:
    """The next piece; None at the end. Raises EOFError if it is cut."""
    head = file.read(4)
    if not head:
        return None
    length = int.from_bytes(head, "big")
    data = file.read(length) if len(head) == 4 and length <= _ENTRY_BYTES_MAX else b""
    if len(data) != length or len(head) < 4:
        raise EOFError("it ends in the middle of an entry")
    return data
