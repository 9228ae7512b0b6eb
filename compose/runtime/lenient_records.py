"""Reading what other clients can put into a topic and aiokafka 0.14 cannot take: one such batch would stop every consumer of its topic, for ever.

Header names that are not UTF-8: aiokafka decodes them while it parses a batch, and raises out of every fetch (measured). Here the compiled parser stays in use;
a batch that it cannot read is read again by aiokafka's own Python parser with undecodable bytes replaced, from the record where the first one stopped.

Batches that expand: a topic's size limit is for compressed batches, and the broker takes 6 kB that become 200 MB (measured); aiokafka would expand them
whatever they weigh. Here one record without a value stands for such a batch, with the reason as a header; its reader dead-letters it like any other.

Source: aiokafka/record/default_records.py and aiokafka/consumer/fetcher.py of the pinned version; a test sends such a record to every kind of consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex, overload

import cramjam
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy
from opentinker.schemas.records import UNREADABLE_HEADER
from opentinker.schemas.topics import JOURNAL_BYTES_MAX

__all__ = ["install"]

_SCRATCH_BYTES: Final = (
    2**20,
    2**23,
    JOURNAL_BYTES_MAX,
)  # sizes tried one after another: most batches fit the first; none of ours is larger than the last
# Snappy is absent: its format expands by at most about 21, so that the topic's limit bounds it.
_EXPAND: Final[dict[int, Callable[[bytes, bytearray], int]]] = {
    DefaultRecordBatch.CODEC_GZIP: cramjam.gzip.decompress_into,
    DefaultRecordBatch.CODEC_LZ4: cramjam.lz4.decompress_into,
    DefaultRecordBatch.CODEC_ZSTD: cramjam.zstd.decompress_into,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _StandIn:
    """One record in place of a batch that is not read."""

    offset: int
    timestamp: int
    timestamp_type: int
    headers: list[tuple[str, bytes]]
    key: None = None
    value: None = None
    checksum: None = None


class _LenientBytes(bytearray):
    """Bytes that always decode."""

    @overload
    def __getitem__(self, key: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> bytearray: ...

    def __getitem__(self, key: SupportsIndex | slice) -> int | bytearray:
        found = super().__getitem__(key)
        return _LenientBytes(found) if isinstance(found, bytearray) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]
    _buffer: Any

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _LenientBytes(self._buffer)


class _Batch:
    """A batch by the compiled parser, with the lenient one behind it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._compiled = DefaultRecordBatch(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __next__(self) -> Any:
        return next(self._compiled)  # how the fetcher reads the marker of a control batch, which has no headers

    def __iter__(self) -> Iterator[Any]:
        if not self._expands_within_bounds():
            reason = f"its batch of {len(self._data):,} bytes cannot be expanded to at most {_SCRATCH_BYTES[-1]:,}".encode()
            batch = self._compiled
            yield _StandIn(
                offset=batch.next_offset - 1,
                timestamp=batch.max_timestamp,
                timestamp_type=batch.timestamp_type,
                headers=[(UNREADABLE_HEADER, reason)],
            )
            return
        read = -1
        try:
            for record in self._compiled:
                yield record
                read = record.offset
        except UnicodeDecodeError:
            for record in _LenientBatch(self._data):
                if record.offset > read:
                    yield record

    def _expands_within_bounds(self) -> bool:
        expand = _EXPAND.get(self._compiled.compression_type)
        if expand is None:
            return True
        packed = bytes(self._data[_DefaultRecordBatchPy.HEADER_STRUCT.size :])
        for size in _SCRATCH_BYTES:
            try:
                expand(packed, bytearray(size))
                return True
            except cramjam.DecompressionError:
                continue
        return False


class _Records(_MemoryRecordsPy):  # type: ignore[misc]
    def next_batch(self, *arguments: Any) -> Any:
        data = self._next_slice
        batch = super().next_batch(*arguments)
        return _Batch(data) if isinstance(batch, DefaultRecordBatch) else batch


def install() -> None:
    """Make every consumer of this process read that way."""
    fetcher.MemoryRecords = _Records
