"""Fold recorded inputs with today's core and compare what comes out with what was written down then. Pure.

A recorded log is a `Recovered` state, then `Recorded` journal records; a worker that took over in between left another `Recovered`. After each record the
entities that changed and the bytes of the outputs must be those of the journal; the hash of the whole state is compared at the start, now and then, and at
the end. What the journal does not hold are the indexes of a state (what is known not to fit, timers): a worker builds them as it recovers, and so does a
replay, from the same entities in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import msgspec
import orjson
from opentinker.schemas.records import InputRecord

from .codec import JournalOutput, PackedChange, decode_change
from .core.entities import Entity
from .core.state import Key, State, hash_of
from .core.step import step
from .interpret import encode_outputs, interpret

__all__ = ["Difference", "Outcome", "Recorded", "RecordedInput", "Recovered", "Replay", "differences"]

_HASH_EVERY: Final = 1_000  # records: hashing a whole state costs as much as some hundred steps
_LINES_MAX: Final = 40
_VALUE_CHARACTERS_MAX: Final = 200
_INEXACT: Final = (
    "the replay begins within a worker's time: what it had found not to fit, and its timers, were rebuilt; to be sure, begin where a worker took over"
)


class Recovered(msgspec.Struct, frozen=True, kw_only=True, tag="recovered"):
    """A worker has built its state from these entities, in this order. `exact`: that is what it did; otherwise its indexes may have been other ones."""

    offset: int  # of the journal
    loads: tuple[PackedChange, ...]
    exact: bool


class RecordedInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input as it was read; a header may have no value."""

    topic: str
    partition: int
    offset: int
    append_time_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    generation: int = 0  # of its topic, as the journal counts them

    @classmethod
    def of(cls, record: InputRecord, generation: int = 0) -> RecordedInput:
        return cls(
            topic=record.topic, partition=record.partition, offset=record.offset, append_time_ms=record.append_time_ms, key=record.key,
            value=record.value, headers=record.headers, generation=generation,
        )  # fmt: skip

    def record(self) -> InputRecord:
        return InputRecord(
            topic=self.topic, partition=self.partition, offset=self.offset, append_time_ms=self.append_time_ms, key=self.key,
            value=self.value, headers=cast("tuple[tuple[str, bytes], ...]", self.headers),
        )  # fmt: skip


class Recorded(msgspec.Struct, frozen=True, kw_only=True, tag="recorded"):
    """One journal record with the inputs it covers, in the order they were stepped. `ordered`: that order is known, not assumed."""

    offset: int  # of the journal
    core_version: int
    inputs: tuple[RecordedInput, ...]
    changes: tuple[PackedChange, ...]
    outputs: tuple[JournalOutput, ...]
    ordered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where today's core does not do what was done."""

    offset: int  # of the journal
    place: str  # of the input, or the inputs that the record covers
    lines: tuple[str, ...]

    def text(self) -> str:
        return "\n".join((f"journal offset {self.offset}, input {self.place}:", *(f"  {line}" for line in self.lines)))


@dataclass(slots=True)
class Outcome:
    """How far a replay came."""

    records: int = 0
    inputs: int = 0
    outputs: int = 0
    hash: str = ""
    difference: Difference | None = None


@dataclass(slots=True)
class Replay:
    """One log, entry by entry: `feed` until it returns a difference, then `end`."""

    partitions: int
    outcome: Outcome = field(default_factory=Outcome)
    _state: State = field(default_factory=State)
    _recorded: dict[Key, Entity] = field(default_factory=dict)  # as the journal says
    _started: bool = False
    _exact: bool = True

    def feed(self, entry: Recovered | Recorded) -> Difference | None:
        assert self.outcome.difference is None
        found = self._recover(entry) if isinstance(entry, Recovered) else self._record(entry)
        if found is not None and not self._exact:
            found = replace(found, lines=(*found.lines, _INEXACT))
        self.outcome.difference = found
        return found

    def end(self) -> Outcome:
        """Compare the whole state a last time."""
        if self.outcome.difference is None:
            self.outcome.difference = self._compare_states(-1)
        self.outcome.hash = self._state.hash()
        return self.outcome

    def _recover(self, entry: Recovered) -> Difference | None:
        state = State()
        for packed in entry.loads:
            state.load(*decode_change(packed))
        before = self._recorded
        self._state, self._recorded = state, {key: _present(state, key) for key in state.entity_keys()}
        if self._started and before != self._recorded:
            lines = _entity_lines(before, self._recorded, sorted(before.keys() | self._recorded.keys()))
            return Difference(offset=entry.offset, place="none: a worker took over and recovered another state", lines=lines)
        self._started, self._exact = True, entry.exact
        return None

    def _record(self, entry: Recorded) -> Difference | None:
        assert self._started, "a log begins with a recovered state"
        stepped: dict[Key, Entity | None] = {}
        last: dict[Key, InputRecord] = {}  # which input changed an entity last
        outputs: list[tuple[InputRecord, JournalOutput]] = []
        for recorded_input in entry.inputs:
            record = recorded_input.record()
            understood = interpret(record, self.partitions)
            result = step(self._state, understood.item)
            for change in result.changes:
                stepped[change.kind, change.id] = change.value
                last[change.kind, change.id] = record
            outputs += [
                (record, output) for output in (*understood.letters, *encode_outputs(understood.item, result.outputs, recorded_input.generation))
            ]
        recorded = {(kind, id): decode_change((kind, id, value))[2] for kind, id, value in entry.changes}
        self._take(recorded)
        self.outcome.records += 1
        self.outcome.inputs += len(entry.inputs)
        self.outcome.outputs += len(outputs)
        found = _compare_changes(entry, recorded, stepped, last) or _compare_outputs(entry, outputs)
        if found is None and self.outcome.records % _HASH_EVERY == 0:
            found = self._compare_states(entry.offset)
        return found

    def _take(self, recorded: Mapping[Key, Entity | None]) -> None:
        for key, value in recorded.items():
            if value is None:
                self._recorded.pop(key, None)
            else:
                self._recorded[key] = value

    def _compare_states(self, offset: int) -> Difference | None:
        if hash_of(self._recorded) == self._state.hash():
            return None
        stepped = {key: _present(self._state, key) for key in self._state.entity_keys()}
        lines = _entity_lines(self._recorded, stepped, sorted(self._recorded.keys() | stepped.keys()))
        return Difference(offset=offset, place="one of those before", lines=lines)


def _present(state: State, key: Key) -> Entity:
    found = state.get(*key)
    assert found is not None
    return found


def _compare_changes(
    entry: Recorded, recorded: Mapping[Key, Entity | None], stepped: Mapping[Key, Entity | None], last: Mapping[Key, InputRecord]
) -> Difference | None:
    for key in [*recorded, *(key for key in stepped if key not in recorded)]:
        if key in recorded and key in stepped and recorded[key] == stepped[key]:
            continue
        place = _place(last[key]) if key in last else _places(entry.inputs)
        return Difference(offset=entry.offset, place=place, lines=_entity_lines(recorded, stepped, [key]) + _order_lines(entry))
    return None


def _compare_outputs(entry: Recorded, outputs: Sequence[tuple[InputRecord, JournalOutput]]) -> Difference | None:
    for number in range(max(len(entry.outputs), len(outputs))):
        recorded = entry.outputs[number] if number < len(entry.outputs) else None
        record, stepped = outputs[number] if number < len(outputs) else (None, None)
        if recorded == stepped:
            continue
        place = _place(record) if record else _places(entry.inputs)
        lines = [f"output {number + 1} of {len(entry.outputs)} recorded, {len(outputs)} now"]
        lines += [f"recorded: {_named(recorded)}", f"now:      {_named(stepped)}"]
        if recorded is not None and stepped is not None:
            lines += differences(_plain(recorded), _plain(stepped))
        return Difference(offset=entry.offset, place=place, lines=_bounded(lines) + _order_lines(entry))
    return None


def _order_lines(entry: Recorded) -> tuple[str, ...]:
    if entry.ordered:
        return ()
    return ("this record covers inputs of several topics and does not say in which order they were stepped: the difference may come from that",)


def _entity_lines(before: Mapping[Key, Entity | None], after: Mapping[Key, Entity | None], keys: Iterable[Key]) -> tuple[str, ...]:
    lines: list[str] = []
    for key in keys:
        recorded, stepped = before.get(key), after.get(key)
        if recorded == stepped and (key in before) == (key in after):
            continue
        lines.append(f"{key[0]} {key[1]}")
        if recorded is not None and stepped is not None:
            lines += [f"  {line}" for line in differences(msgspec.to_builtins(recorded), msgspec.to_builtins(stepped))]
        else:
            lines += [f"  recorded: {_standing(key, before)}", f"  now:      {_standing(key, after)}"]
        if len(lines) > _LINES_MAX:
            break
    return _bounded(lines)


def _standing(key: Key, entities: Mapping[Key, Entity | None]) -> str:
    if key not in entities:
        return "unchanged"
    value = entities[key]
    return "removed" if value is None else _short(msgspec.to_builtins(value))


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(lines) if len(lines) <= _LINES_MAX else (*lines[:_LINES_MAX], f"… and {len(lines) - _LINES_MAX} more lines")


def differences(recorded: Any, stepped: Any, path: str = "") -> Iterator[str]:
    """Field by field, what differs between two plain values."""
    if isinstance(recorded, dict) and isinstance(stepped, dict):
        for name in sorted(recorded.keys() | stepped.keys(), key=str):
            below = f"{path}.{name}".lstrip(".")
            if name not in recorded:
                yield f"{below}: not there → {_short(stepped[name])}"
            elif name not in stepped:
                yield f"{below}: {_short(recorded[name])} → not there"
            else:
                yield from differences(recorded[name], stepped[name], below)
    elif isinstance(recorded, list | tuple) and isinstance(stepped, list | tuple) and len(recorded) == len(stepped):
        for number, (one, other) in enumerate(zip(recorded, stepped, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif recorded != stepped:
        yield f"{path}: {_short(recorded)} → {_short(stepped)}"


def _plain(output: JournalOutput) -> dict[str, Any]:
    try:
        value: Any = orjson.loads(output.value)
    except orjson.JSONDecodeError:
        value = output.value
    headers = {name: content.decode(errors="replace") for name, content in output.headers}
    return {"topic": output.topic, "key": output.key, "headers": headers, "value": value, "latency_since_ms": output.latency_since_ms}


def _named(output: JournalOutput | None) -> str:
    if output is None:
        return "none"
    said = dict(output.headers)
    kind = said.get("ce_type", b"").decode(errors="replace").removeprefix("io.opentinker.")
    return f"{kind or 'record'} to {output.topic}, key {output.key}, id {said.get('ce_id', b'').decode(errors='replace')}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[: _VALUE_CHARACTERS_MAX - 1] + "…"


def _place(record: InputRecord | RecordedInput) -> str:
    return f"{record.topic}:{record.partition}:{record.offset}"


def _places(records: Sequence[RecordedInput]) -> str:
    return "none" if not records else _place(records[0]) if len(records) == 1 else f"{_place(records[0])} … {_place(records[-1])}"
