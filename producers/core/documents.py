"""Bytes as documents: JSON and a harmless subset of YAML, with every refusal in our wording.

A key that stands twice is refused by name (the last one would silently win); NaN and infinities are no JSON; YAML aliases are refused, since a few lines
of them can expand to gigabytes. Raises InvalidManifest.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, NoReturn

import yaml
from opentinker.schemas.errors import FieldError, InvalidManifest
from opentinker.schemas.manifest import MANIFEST_BYTES_MAX

__all__ = ["read_json", "read_yaml"]

_COMPLETE = "send one complete UTF-8 JSON object"


def read_json(value: bytes) -> object:
    """A JSON document of at most MANIFEST_BYTES_MAX bytes."""
    text = _text(value, _COMPLETE)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except InvalidManifest:
        raise
    except RecursionError:
        _refuse("is nested too deeply", "flatten it")
    except json.JSONDecodeError as error:
        _refuse(f"is not valid JSON ({error.msg} at line {error.lineno} column {error.colno})", _COMPLETE)
    except ValueError as error:  # a number of thousands of digits
        _refuse(f"is not valid JSON ({str(error)[:80]})", _COMPLETE)


def read_yaml(value: bytes) -> object:
    """One YAML document of at most MANIFEST_BYTES_MAX bytes."""
    remedy = "send one YAML document without anchors and aliases"
    text = _text(value, remedy)
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (_Loader is a SafeLoader)
    except InvalidManifest:
        raise
    except RecursionError:
        _refuse("is nested too deeply", "flatten it")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        _refuse(f"is not valid YAML ({error.problem}{place})", remedy)
    except (yaml.YAMLError, ValueError, LookupError) as error:  # LookupError: `!!bool` before a word that is none
        _refuse(f"is not valid YAML ({str(error).splitlines()[0][:120]})", remedy)


def _text(value: bytes, remedy: str) -> str:
    if len(value) > MANIFEST_BYTES_MAX:
        _refuse(f"is {len(value):,} bytes, more than {MANIFEST_BYTES_MAX:,}", "send a smaller document")
    if not value:
        _refuse("is empty", remedy)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"is not valid UTF-8 (byte {error.start})", remedy)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in pairs:
        if key in found:
            raise InvalidManifest([FieldError(field=key[:80], message="stands twice in one object", remedy="keep one of them")])
        found[key] = item
    return found


def _no_constant(name: str) -> NoReturn:
    _refuse(f"is not valid JSON ({name} is no JSON number)", "give a finite number")


def _refuse(message: str, remedy: str) -> NoReturn:
    raise InvalidManifest([FieldError(field="", message=message, remedy=remedy)]) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases, duplicate keys and timestamps (a name such as 2024-01-01 stays text)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key is not text", key_node.start_mark)
            if key in seen:
                raise InvalidManifest([FieldError(field=key[:80], message="stands twice in one object", remedy="keep one of them")])
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
