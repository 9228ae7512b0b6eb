"""Batches that aiokafka alone would choke on, read from their bytes."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from opentinker.compose.runtime.lenient_records import _Records

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def batch(codec: str, values: list[bytes]) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=CODECS[codec], is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1, batch_size=2**30
    )
    for offset, value in enumerate(values):
        assert builder.append(offset, timestamp=5, key=None, value=value, headers=[("h", b"1")]) is not None
    return bytes(builder.build())


def read(data: bytes) -> list[Any]:
    records = _Records(data)
    return list(records.next_batch())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [10, 3_000_000, 30_000_000])
def test_batches_of_every_codec_are_read(codec: str, size: int) -> None:
    found = read(batch(codec, [b"a" * size, b"b"]))
    assert [(record.offset, len(record.value), list(record.headers)) for record in found] == [(0, size, [("h", b"1")]), (1, 1, [("h", b"1")])]


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
def test_a_batch_that_expands_beyond_the_bound_is_one_record_that_says_so(codec: str) -> None:
    data = batch(codec, [b" " * 40_000_000] * 2)
    assert len(data) < 1_000_000
    [record] = read(data)
    assert (record.offset, record.value, record.timestamp) == (1, None, 5)
    [(name, reason)] = record.headers
    assert (name, b"cannot be expanded" in reason) == ("ot-unreadable", True)
