"""Records that no well-meaning client sends: mutated from golden messages by a seed, and one that clients cannot even write, with a header name that is no text."""

from __future__ import annotations

import copy
import json
import random
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.util import calc_crc32c
from bad_manifests import good_manifest
from opentinker.compose.runtime.kafka import producer
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.topics import REQUESTS, accepted_types, partition_of

__all__ = ["HOSTILE", "HostileRecord", "hostile_records", "send_hostile_header"]

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**53, 2**63, 2**70, -(2**70), 1e308, float("nan"), float("-inf"), "", "\0", "\ud800",
    "x" * 63, "x" * 253, "x" * 256, "x" * 4_096, "x" * 5_000, "../../etc", "\x1b[2J",
    [], {}, [[]], {"a": 2**70}, {"a": float("nan")}, {"a": {"b": "\0"}}, "2026-12-01",
)  # fmt: skip
_HEADER_VALUES = (b"", b"\xff\xfe", b"a\nb", b"x" * 300, b"x" * 20_000, b"null", b"io.opentinker.Nothing.v1", b"2020-01-01T00:00:00Z", b"text/yaml")
_GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
_SUBMISSION = "SubmitTrainingJob"

Headers = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class HostileRecord:
    """What to send; `partition` None: where the producer likes."""

    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    partition: int | None


def hostile_records(seed: int, topic: str, count: int, partitions: int) -> Iterator[HostileRecord]:
    """Valid records, and every way to spoil one: about a fifth are as they should be. The same seed gives the same records, but for ids and times."""
    chance = random.Random(f"{seed} {topic}")
    samples = _samples(topic)
    for _ in range(count):
        name, headers, value = chance.choice(samples)
        value = _fresh(chance, copy.deepcopy(value))
        said = dict(headers) | {"ce_id": uuid.UUID(int=chance.getrandbits(128)).hex, "ce_type": f"io.opentinker.{name}.v1", "ce_time": _now()}
        made = _Draft(json.dumps(value).encode(), [(key, text.encode()) for key, text in said.items()], _place(topic, value, partitions))
        chance.choices([spoil for spoil, _ in _SPOILS], [weight for _, weight in _SPOILS])[0](chance, made, value)
        if chance.random() < 0.03:
            made.partition = chance.randrange(partitions)
        key = chance.choice((None, b"", b"default", b"\xff\xfe", chance.randbytes(200)))
        if key is None and made.value is None:
            key = b"nothing"  # our own client refuses a record of neither
        yield HostileRecord(made.value, key, tuple(made.headers), made.partition)


@dataclass(slots=True)
class _Draft:
    value: bytes | None
    headers: Headers
    partition: int | None


def _samples(topic: str) -> list[tuple[str, dict[str, str], Any]]:
    """(type, headers, value) of every message that may stand on the topic."""
    found = []
    for message in accepted_types(topic).values():
        stored = json.loads((_GOLDEN / f"{message.__name__}.v{message.schema_version}.json").read_text())
        found.append((message.__name__, stored["headers"], stored["value"]))
    if topic != REQUESTS:
        return found
    outside = found[0][1] | {"ce_source": "hostile"}  # that of the golden message is ours alone
    return [(name, outside, value) for name, _, value in found] + [(_SUBMISSION, outside, good_manifest())]


def _fresh(chance: random.Random, value: Any) -> Any:
    """Another job, another name, so that not all of them are one."""
    if isinstance(value, dict):
        if "job_uid" in value and chance.random() < 0.5:
            value["job_uid"] = str(uuid.UUID(int=chance.getrandbits(128)))
        for place in (value, value.get("metadata")):
            if isinstance(place, dict) and "name" in place:
                place["name"] = f"job-{chance.getrandbits(40)}"
    return value


def _place(topic: str, value: Any, partitions: int) -> int | None:
    """Where a well-meaning producer of an input of the scheduler puts it."""
    pool = value.get("pool") if isinstance(value, dict) else None
    if isinstance(value, dict) and "partition" in value and "worker" in value:
        return int(value["partition"]) % partitions
    return partition_of(pool, partitions) if isinstance(pool, str) and topic != REQUESTS else None


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat()


def _as_it_is(chance: random.Random, draft: _Draft, value: Any) -> None:
    del chance, draft, value


def _field_replaced(chance: random.Random, draft: _Draft, value: Any) -> None:
    *parents, last = chance.choice(list(_paths(value)))
    place = value
    for part in parents:
        place = place[part]
    place[last] = chance.choice(HOSTILE)
    draft.value = json.dumps(value).encode()


def _field_lost(chance: random.Random, draft: _Draft, value: Any) -> None:
    value.pop(chance.choice(list(value)))
    draft.value = json.dumps(value).encode()


def _field_added(chance: random.Random, draft: _Draft, value: Any) -> None:
    value[chance.choice(("unknown", "spec", "replicas", "__proto__", "\0", "x" * 3_000))] = chance.choice(HOSTILE)
    draft.value = json.dumps(value).encode()


def _cut(chance: random.Random, draft: _Draft, value: Any) -> None:
    whole = json.dumps(value).encode()
    draft.value = whole[: chance.randrange(len(whole))]


def _flipped(chance: random.Random, draft: _Draft, value: Any) -> None:
    spoiled = bytearray(json.dumps(value).encode())
    for _ in range(chance.randint(1, 4)):
        spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
    draft.value = bytes(spoiled)


def _noise(chance: random.Random, draft: _Draft, value: Any) -> None:
    draft.value = chance.choice((None, b"", b"null", b"0", b"[]", b'"text"', b"NaN", chance.randbytes(chance.randrange(4_000))))


def _deep(chance: random.Random, draft: _Draft, value: Any) -> None:
    depth = chance.choice((50, 500, 20_000))
    draft.value = b"[" * depth + b"]" * depth if chance.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth


def _large(chance: random.Random, draft: _Draft, value: Any) -> None:
    value["unknown"] = "x" * chance.choice((70_000, 300_000, 900_000))
    draft.value = json.dumps(value).encode()


def _header_spoiled(chance: random.Random, draft: _Draft, value: Any) -> None:
    position = chance.randrange(len(draft.headers))
    draft.headers[position] = (draft.headers[position][0], chance.choice(_HEADER_VALUES))


def _header_lost(chance: random.Random, draft: _Draft, value: Any) -> None:
    draft.headers.pop(chance.randrange(len(draft.headers)))


def _headers_many(chance: random.Random, draft: _Draft, value: Any) -> None:
    draft.headers += [(f"h{number}", chance.randbytes(20)) for number in range(chance.choice((1, 300, 2_000)))] + [("ce_id", b"twice")]


_SPOILS: tuple[tuple[Callable[[random.Random, _Draft, Any], None], int], ...] = (
    (_as_it_is, 20), (_field_replaced, 30), (_field_lost, 6), (_field_added, 6), (_cut, 6), (_flipped, 8), (_noise, 6), (_deep, 2), (_large, 1),
    (_header_spoiled, 8), (_header_lost, 5), (_headers_many, 2),
)  # fmt: skip


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for part in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, part)
        yield from _paths(value[part], (*before, part))


_build = BatchBuilder._build


def _with_a_hostile_header_name(self: BatchBuilder) -> bytearray:
    batch = bytearray(_build(self)).replace(b"MARKMARK", b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe")
    batch[17:21] = struct.pack(">I", calc_crc32c(bytes(batch[21:])))
    self._buffer = batch
    return batch


async def send_hostile_header(settings: KafkaSettings, topic: str, partition: int, value: bytes = b"{}") -> Any:
    """One record whose header name is eight bytes that are no text; returns its place."""
    sender = producer(settings, "hostile", enable_idempotence=False)
    await sender.start()
    try:
        with patch.object(BatchBuilder, "_build", _with_a_hostile_header_name):
            return await sender.send_and_wait(topic, value, partition=partition, headers=[("MARKMARK", b"1")])
    finally:
        await sender.stop()
