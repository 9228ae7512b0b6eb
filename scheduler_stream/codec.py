"""Journal records as bytes and back: MessagePack of whole entities, so that re-applying any suffix is harmless.

A record of CORE_VERSION N is read by N and N+1: entities may gain fields with defaults, never lose or change one. Version N−1 reads it only if it holds
nothing that N−1 would drop (`unknown_parts`): what a newer core knows is never lost by going back to an older one (docs/decisions/0012).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from .core.entities import KINDS, Entity
from .core.state import Change

__all__ = [
    "Adoption",
    "InputSpan",
    "JournalOutput",
    "JournalRecord",
    "OwnerStarted",
    "ReplayFrom",
    "StateRecord",
    "Sweep",
    "decode_change",
    "decode_record",
    "decode_state",
    "encode_change",
    "encode_record",
    "unknown_parts",
]

# `changes` and `sweep` hold (kind, id, entity as MessagePack | None): decoding is by kind, and only done when the record is folded.
PackedChange = tuple[str, str, bytes | None]


@dataclass(frozen=True, slots=True)
class InputSpan:
    """Which inputs of one topic a record covers: offsets from..through, and what stands at `through`."""

    first: int
    through: int
    crc: int  # CRC-32 of the value at `through`
    append_time_ms: int
    generation: int = 0  # rises when an administrator adopts other inputs in the topic's place: its offsets may come again and mean something else
    early: tuple[int, ...] = ()  # offsets behind `through` that were stepped ahead of their order: cancellations in a long backlog


@dataclass(frozen=True, slots=True)
class ReplayFrom:
    """Where recovery starts, and the owner epoch that is in force there."""

    offset: int = 0
    owner_epoch: int = -1


@dataclass(frozen=True, slots=True)
class JournalOutput:
    """The recorded bytes of one output; what is published is this and nothing else."""

    topic: str
    key: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    latency_since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """How far a sweep has come: where it began, and the last entity of it that is written down. The next owner goes on from there."""

    began: ReplayFrom
    kind: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """What of a JournalRecord makes the state. Outputs are most of its bytes, and recovery needs those of the last few records only."""

    owner_epoch: int
    core_version: int
    inputs: dict[str, InputSpan]
    changes: tuple[PackedChange, ...]
    sweep: tuple[PackedChange, ...] = ()
    swept: Sweep | None = None  # None: with this record a sweep was through, or none had begun
    replay_from: ReplayFrom
    published_fast: int  # outputs of records up to this journal offset are known to be published
    published_status: int  # the same for the status topic


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord(StateRecord):
    """All of it. Encoded as a map, so that a StateRecord reads the same bytes."""

    outputs: tuple[JournalOutput, ...]
    # How its inputs were stepped: runs of (number of the topic, last offset of the run); -1 - number: that one offset, ahead of its order.
    order: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """An administrator's decision to go on although the logs contradict each other."""

    adopted_by: str
    reason: str
    time_ms: int
    start: str  # "beginning" or "end" of what the adopted topics held
    contradictions: tuple[str, ...]
    instead_of: dict[str, InputSpan | None]  # what the journal said when it was decided; if it says something else by now, a topic is not adopted


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerStarted:
    """A worker takes the partition over, or an administrator does for a moment. Its own offset is its owner epoch."""

    worker: str
    boot_id: str
    core_version: int
    replay_from: ReplayFrom
    adopted: dict[str, InputSpan] = field(default_factory=dict)  # positions from here on, by an administrator's decision
    adoption: Adoption | None = None
    outputs: tuple[JournalOutput, ...] = ()  # to be published by whoever owns the partition next


class _Envelope(msgspec.Struct, array_like=True):
    kind: str
    body: msgspec.Raw


_TYPES: Final[dict[str, type[JournalRecord | OwnerStarted]]] = {"record": JournalRecord, "owner": OwnerStarted}
_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final[dict[str, Any]] = {kind: msgspec.msgpack.Decoder(type_) for kind, type_ in KINDS.items()}
_record_decoders: Final[dict[str, Any]] = {kind: msgspec.msgpack.Decoder(type_) for kind, type_ in _TYPES.items()}
_state_decoder: Final = msgspec.msgpack.Decoder(StateRecord)
_envelope_decoder: Final = msgspec.msgpack.Decoder(_Envelope)
_any_decoder: Final = msgspec.msgpack.Decoder()
_NOTHING: Final = object()


def encode_change(change: Change) -> PackedChange:
    return change.kind, change.id, None if change.value is None else _encoder.encode(change.value)


def decode_change(packed: PackedChange) -> tuple[str, str, Entity | None]:
    kind, id, value = packed
    return kind, id, None if value is None else _decoders[kind].decode(value)


def unknown_parts(value: bytes) -> list[str]:
    """What of a record this version would drop: fields and kinds that it does not know, by path. Slow; only for records of a newer core."""
    envelope = _envelope_decoder.decode(value)
    record = decode_record(value)
    found = _dropped(_any_decoder.decode(envelope.body), _any_decoder.decode(_encoder.encode(record)), "")
    changes = (*record.sweep, *record.changes) if isinstance(record, JournalRecord) else ()
    for kind, _, entity in changes:
        if kind not in KINDS:
            found.append(kind)
        elif entity is not None:
            found += _dropped_of(kind, entity)
    return sorted(set(found))


def _dropped_of(kind: str, entity: bytes) -> list[str]:
    try:
        kept = _encoder.encode(_decoders[kind].decode(entity))
    except msgspec.ValidationError as error:  # a new value of an enum, for example
        return [f"{kind}: {error}"]
    return _dropped(_any_decoder.decode(entity), _any_decoder.decode(kept), kind)


def _dropped(original: Any, kept: Any, path: str) -> list[str]:
    """Where two decoded values differ, by field."""
    if isinstance(original, dict) and isinstance(kept, dict):
        inner = ((key, original.get(key, _NOTHING), kept.get(key, _NOTHING)) for key in original)
        return [each for key, before, after in inner for each in _dropped(before, after, f"{path}.{key}".lstrip("."))]
    if isinstance(original, list) and isinstance(kept, list) and len(original) == len(kept):
        return [each for before, after in zip(original, kept, strict=True) for each in _dropped(before, after, path)]
    return [] if original == kept else [path]


def encode_record(record: JournalRecord | OwnerStarted) -> bytes:
    kind = "owner" if isinstance(record, OwnerStarted) else "record"
    return _encoder.encode(_Envelope(kind, msgspec.Raw(_encoder.encode(record))))


def decode_record(value: bytes) -> JournalRecord | OwnerStarted:
    """Raises msgspec.DecodeError for bytes that are no journal record: somebody else wrote there."""
    envelope = _envelope_decoder.decode(value)
    decoder = _record_decoders.get(envelope.kind)
    if decoder is None:
        raise msgspec.ValidationError(f"unknown journal record {envelope.kind!r}")
    record: JournalRecord | OwnerStarted = decoder.decode(envelope.body)
    return record


def decode_state(value: bytes) -> StateRecord | OwnerStarted:
    """The same without the outputs, in a fraction of the time."""
    envelope = _envelope_decoder.decode(value)
    if envelope.kind != "record":
        found = decode_record(value)
        assert isinstance(found, OwnerStarted)
        return found
    record: StateRecord = _state_decoder.decode(envelope.body)
    return record
