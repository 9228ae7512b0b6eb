"""Values that every part behind us can hold: JSON as RFC 8259 and I-JSON (RFC 7493) mean it, of bounded depth.

`environment.kwargs` and its like take any value, so no model stands in the way of one that a later part cannot write: pydantic stops at 255 levels, its
parser at 200, integers of more than 64 bits and NaN are no I-JSON, PostgreSQL stores no U+0000, and a YAML tag makes bytes, sets and dates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from .errors import FieldError, printable, shorten

__all__ = ["plain_errors"]

_DEPTH_MAX = 32  # a manifest has five levels of its own; settings of environments that people write have a few more
_INTEGER_MAX = 2**63
_ERRORS_MAX = 20


def plain_errors(document: object) -> list[FieldError]:
    """One FieldError for each value that is not plain, by path; an empty list for a plain document."""
    found: list[FieldError] = []
    left: list[tuple[str, object, int]] = [("", document, 0)]
    while left and len(found) < _ERRORS_MAX:
        path, value, depth = left.pop()
        wrong = _wrong(value, depth)
        if wrong is not None:
            found.append(FieldError(field=path, message=wrong[0], remedy=wrong[1]))
        elif isinstance(value, Mapping | list):
            left.extend((inner, item, depth + 1) for inner, item in _items(path, value))
    return found


def _items(path: str, value: Mapping[object, object] | list[object]) -> Iterator[tuple[str, object]]:
    """The parts of an object or a list with their paths; a key that is no text stands for itself, and is refused as a value."""
    if isinstance(value, list):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
        return
    for key, item in value.items():
        inner = printable(f"{path}.{key}" if path else str(key))
        yield inner, item
        if not isinstance(key, str) or _wrong(key, 0) is not None:
            yield inner, key if isinstance(key, str) else object()


def _wrong(value: object, depth: int) -> tuple[str, str] | None:
    """(what is wrong, what to do) with one value, its parts aside."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, Mapping | list):
        return ("is nested too deeply", f"flatten it to at most {_DEPTH_MAX} levels") if depth >= _DEPTH_MAX else None
    if isinstance(value, str):
        if "\x00" in value:
            return "holds the character U+0000", "remove it"
        return (
            ("is not valid Unicode (half of a surrogate pair)", "correct it")
            if any("\ud800" <= character <= "\udfff" for character in value)
            else None
        )
    if isinstance(value, int):
        return None if -_INTEGER_MAX <= value < _INTEGER_MAX else ("is a number of more than 64 bits", "correct the number")
    if isinstance(value, float):
        return None if math.isfinite(value) else (f"must be a finite number, got {shorten(value)}", "give a finite number")
    return f"is a {type(value).__name__}, which JSON does not have", "write it as text, a number, a list or an object"
