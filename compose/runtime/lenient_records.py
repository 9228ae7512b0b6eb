"""Reading records whose header names are not UTF-8.

aiokafka 0.14 decodes header names while it parses a batch, and raises out of every fetch for ever when one is not UTF-8 (measured): one hostile record would stop
every consumer of its topic. Other clients can send such a record. Here the compiled parser stays in use; a batch that it cannot read is read again by aiokafka's own
Python parser with undecodable bytes replaced, from the record where the first one stopped.

Source: aiokafka/record/default_records.py and aiokafka/consumer/fetcher.py of the pinned version; a test sends such a record to every kind of consumer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy

__all__ = ["install"]


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
        read = -1
        try:
            for record in self._compiled:
                yield record
                read = record.offset
        except UnicodeDecodeError:
            for record in _LenientBatch(self._data):
                if record.offset > read:
                    yield record


class _Records(_MemoryRecordsPy):  # type: ignore[misc]
    def next_batch(self, *arguments: Any) -> Any:
        data = self._next_slice
        batch = super().next_batch(*arguments)
        return _Batch(data) if isinstance(batch, DefaultRecordBatch) else batch


def install() -> None:
    """Make every consumer of this process read that way."""
    fetcher.MemoryRecords = _Records
