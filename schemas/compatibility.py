"""Whether today's messages still fit those that were published: what was written then can be read now, and what is written now can be read by who knows then.

Two rules over JSON Schemas, `schemas/published/` holding the last ones that were given out:
- Reading. Whatever a published schema accepts, today's accepts, with every field it had. It holds for every message: records stay on topics for a month, and
  others upgrade later than we do.
- Writing. Of messages that others read (events, status, placements, alerts, replies, metrics), whatever today's schema accepts, the published one accepts,
  apart from fields it does not know: readers ignore those. So a new value of an enum, a field that may now be missing or a wider limit breaks there, too:
  older readers, our own among them, would dead-letter the record.

`python -m opentinker.schemas.compatibility schemas/published` exits 1 with message, field and remedy. A break that everybody concerned has agreed to is written,
with its reason, into `accepted.json` there. Source of the terms: https://json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .generate import documents
from .topics import TOPICS

__all__ = ["ACCEPTED", "Break", "breaks", "main", "read_published", "written_for_others"]

ACCEPTED: Final = "accepted.json"
_ASYNCAPI: Final = "asyncapi.json"
_OTHERS: Final = ("anyone", "agents", "whoever asked")
_DEPTH_MAX: Final = 32  # a schema that contains itself is compared that deep
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One change that somebody's messages or readers do not survive. `message`: a document, such as `JobStatus.v1`, or a topic."""

    message: str
    field: str
    what: str
    remedy: str

    def key(self) -> str:
        """By which accepted.json names it."""
        return " ".join(part for part in (self.message, self.field, self.what) if part)

    def text(self) -> str:
        return f"{self.message}: {self.field or 'the message'} {self.what}; {self.remedy}"


def breaks(published: Mapping[str, Schema], current: Mapping[str, Schema], written: frozenset[str] | None = None) -> list[Break]:
    """Every breaking change between two sets of generated documents. `written`: names of messages that others read; None: as topics.py says."""
    others = written_for_others() if written is None else written
    found: list[Break] = []
    for name, before in sorted(published.items()):
        message = name.removesuffix(".json")
        if name == _ASYNCAPI:
            found += _topic_breaks(before, current.get(name, {}))
        elif name not in current:
            remedy = "keep it: its records are read for ever; a later version stands beside it"
            found.append(Break(message=message, field="", what="is gone", remedy=remedy))
        else:
            found += _message_breaks(message, before, current[name], written=message.partition(".")[0] in others)
    return found


def written_for_others() -> frozenset[str]:
    """Names of the messages whose readers are not all upgraded before their writers."""
    return frozenset(message.__name__ for topic in TOPICS.values() if any(who in topic.read_by for who in _OTHERS) for message in topic.messages)


def _message_breaks(message: str, before: Schema, now: Schema, *, written: bool) -> Iterator[Break]:
    later = f"{message.partition('.')[0]}.v{int(message.rpartition('.v')[2]) + 1}"
    for field, what in _narrowed(_Side(before, before), _Side(now, now), ""):
        yield Break(message=message, field=field, what=what, remedy=f"make it optional, as wide as it was and with its default, or publish {later}")
    for field, what in _narrowed(_Side(now, now), _Side(before, before), "") if written else ():
        wider = _AS_WIDENED.get(what.partition(":")[0], what)
        detail = what.partition(":")[2]
        text = f"{wider}{':' if detail else ''}{detail}"
        if text:
            yield Break(
                message=message, field=field, what=text, remedy=f"who reads it knows the published one: use a new optional field, or publish {later}"
            )


# How a narrowing reads when the two sides change places; empty: it is none, since readers ignore what they do not know.
_AS_WIDENED: Final = {
    "is gone": "",
    "is required now": "may be missing now",
    "has another default": "",
    "no longer takes": "also takes",
    "has another pattern": "",  # told by the first rule already
    "must match a pattern now": "need no longer match its pattern",
    "has an upper limit now or a lower one": "has a higher upper limit or none",
    "has a lower limit now or a higher one": "has a lower limit that is lower, or none",
    "takes only some values now": "takes any value now",
    "refuses unknown keys now": "",
}


@dataclass(frozen=True, slots=True)
class _Side:
    """A part of a document, and the document that its references mean."""

    schema: Schema
    document: Schema

    def at(self, schema: Schema) -> _Side:
        return _Side(schema, self.document)

    def resolved(self) -> _Side:
        side = self
        for _ in range(_DEPTH_MAX):
            reference = side.schema.get("$ref")
            if reference is None:
                break
            target: Any = side.document
            for part in str(reference).removeprefix("#/").split("/"):
                target = target[part]
            side = side.at({**target, **{key: value for key, value in side.schema.items() if key != "$ref"}})
        return side

    def alternatives(self) -> list[_Side]:
        side = self.resolved()
        options = side.schema.get("anyOf") or side.schema.get("oneOf")
        if options is None:
            types = side.schema.get("type")
            return [side.at({**side.schema, "type": each}) for each in types] if isinstance(types, list) else [side]
        return [found for option in options for found in side.at(option).alternatives()]


def _narrowed(before: _Side, now: _Side, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(field, what) for everything that `before` accepts and `now` does not."""
    if depth > _DEPTH_MAX:
        return
    had, has = before.resolved().schema, now.resolved().schema
    if "default" in had and ("default" not in has or not _same_default(had["default"], has)):
        yield path, "has another default"
    options = now.alternatives()
    for one in before.alternatives():
        candidates = [list(_one_narrowed(one, other, path, depth)) for other in options]
        if any(not candidate for candidate in candidates):
            continue
        same = [candidate for candidate, other in zip(candidates, options, strict=True) if _takes_type(one.schema, other.schema)]
        yield from min(same, key=len) if same else [(path, f"no longer takes: {_kind(one.schema)}")]


def _same_default(before: object, now: Schema) -> bool:
    """Whether a default is what it was. One that is an object may hold new fields at their own defaults: leaving them out means the same."""
    after = now["default"]
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return bool(before == after)
    fields = now.get("properties", {})
    added = after.keys() - before.keys()
    kept = {key: value for key, value in after.items() if key not in added}
    return kept == before and all("default" in fields.get(key, {}) and fields[key]["default"] == after[key] for key in added)


def _one_narrowed(before: _Side, now: _Side, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if not _takes_type(before.schema, now.schema):
        yield path, f"no longer takes: {_kind(before.schema)}"
        return
    yield from ((path, what) for what in _narrower_values(before.schema, now.schema))
    yield from _narrower_object(before, now, path, depth)
    for key in ("items", "additionalProperties", "propertyNames"):
        if isinstance(before.schema.get(key), Mapping) and isinstance(now.schema.get(key), Mapping):
            below = f"{path}[]" if key == "items" else f"{path}.*"
            yield from _narrowed(before.at(before.schema[key]), now.at(now.schema[key]), below.lstrip("."), depth + 1)
    pairs = zip(before.schema.get("prefixItems", ()), now.schema.get("prefixItems", ()), strict=False)
    for number, (one, other) in enumerate(pairs):
        yield from _narrowed(before.at(one), now.at(other), f"{path}[{number}]", depth + 1)


def _takes_type(before: Schema, now: Schema) -> bool:
    wanted, accepted = before.get("type"), now.get("type")
    return accepted is None or wanted == accepted or (wanted, accepted) == ("integer", "number")


def _kind(schema: Schema) -> str:
    return str(schema.get("type", "anything"))


def _narrower_values(before: Schema, now: Schema) -> Iterator[str]:
    known, taken = _values(before), _values(now)
    if taken is not None and known is None:
        yield f"takes only some values now: {', '.join(map(str, taken))}"
    elif taken is not None and known is not None:
        yield from (f"no longer takes: {value}" for value in known if value not in taken)
    if "pattern" in now and now["pattern"] != before.get("pattern"):
        yield f"has another pattern: {now['pattern']}" if "pattern" in before else f"must match a pattern now: {now['pattern']}"
    for upper in (("maximum", "exclusiveMaximum"), ("maxLength",), ("maxItems",), ("maxProperties",)):
        if _limit(now, upper, 1) < _limit(before, upper, 1):
            yield f"has an upper limit now or a lower one: {_said(now, upper)}"
    for lower in (("minimum", "exclusiveMinimum"), ("minLength",), ("minItems",), ("minProperties",)):
        if _limit(now, lower, -1) < _limit(before, lower, -1):
            yield f"has a lower limit now or a higher one: {_said(now, lower)}"


def _values(schema: Schema) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _limit(schema: Schema, names: Sequence[str], sign: int) -> tuple[float, int]:
    """A limit as something to compare: the smaller, the narrower."""
    found = [(sign * float(schema[name]), -1 if name.startswith("exclusive") else 0) for name in names if name in schema]
    return min(found, default=(float("inf"), 0))


def _said(schema: Schema, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {schema[name]}" for name in names if name in schema)


def _narrower_object(before: _Side, now: _Side, path: str, depth: int) -> Iterator[tuple[str, str]]:
    had, has = before.schema.get("properties", {}), now.schema.get("properties", {})
    for name in sorted(had.keys() | has.keys()):
        below = f"{path}.{name}".lstrip(".")
        if name not in has:
            yield below, "is gone"
        elif name in had:
            yield from _narrowed(before.at(had[name]), now.at(has[name]), below, depth + 1)
        if name in has and name in now.schema.get("required", ()) and name not in before.schema.get("required", ()):
            yield below, "is required now"
    if now.schema.get("additionalProperties") is False and before.schema.get("additionalProperties") is not False:
        yield path, "refuses unknown keys now"


def _topic_breaks(before: Schema, now: Schema) -> Iterator[Break]:
    remedy = "keep it beside the new one until nobody uses it, or accept the break with its reason"
    was, is_ = _topics(before), _topics(now)
    for topic, types in sorted(was.items()):
        if topic not in is_:
            yield Break(message=topic, field="", what="is gone", remedy=remedy)
            continue
        for ce_type in sorted(types - is_[topic]):
            yield Break(message=topic, field="", what=f"no longer carries {ce_type}", remedy=remedy)


def _topics(asyncapi: Schema) -> dict[str, set[str]]:
    messages = asyncapi.get("components", {}).get("messages", {})
    return {
        channel["address"]: {messages[name]["headers"]["properties"]["ce_type"]["const"] for name in channel["messages"]}
        for channel in asyncapi.get("channels", {}).values()
    }


def read_published(directory: Path) -> tuple[dict[str, Schema], dict[str, str]]:
    """The published documents, and the breaks that were accepted since, each with its reason."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    return found, found.pop(ACCEPTED, {})


def main(directory: Path) -> int:
    """Compare today's messages with the published ones; returns the exit code."""
    published, accepted = read_published(directory)
    if not published:
        print(f"{directory} holds no published schemas", file=sys.stderr)  # noqa: T201 a command
        return 1
    found = breaks(published, documents())
    open_ = [each for each in found if each.key() not in accepted]
    unused = sorted(accepted.keys() - {each.key() for each in found})
    for each in open_:
        print(each.text(), file=sys.stderr)  # noqa: T201
    for key in unused:
        print(f"{directory / ACCEPTED}: {key!r} is no break any more; remove it", file=sys.stderr)  # noqa: T201
    if open_:
        print(  # noqa: T201
            f"{len(open_)} breaking changes to published messages. One that everybody concerned has agreed to goes into {directory / ACCEPTED} as "
            f'"{open_[0].key()}": "the reason"',
            file=sys.stderr,
        )
    return 1 if open_ or unused else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
