"""One wording for everything a user can get wrong: where, what, what is allowed, what to do.

REST, CLI, reply topic and job conditions all print `FieldError.text()`. Rules: a field is a dotted path as the user wrote it; a remedy is an
imperative; the nearest valid name is offered where there is one. Never a traceback.

InvalidMessage           somebody else's bytes cannot be read, or break their schema; carries FieldErrors
└── InvalidManifest      the same for a TrainingJob manifest
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

__all__ = ["FieldError", "InvalidManifest", "InvalidMessage", "field_errors", "nearest", "printable", "refuse_booleans", "shorten"]

_ERRORS_MAX = 20  # a hostile document can break thousands of rules; nobody reads more than a screen of them
_VALUE_CHARACTERS_MAX = 60


def printable(text: str) -> str:
    """Text that a terminal and UTF-8 can take, whatever a hostile document put into it: what is neither printable nor a line break is written as its escape."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text)


PrintableText = Annotated[str, BeforeValidator(lambda value: printable(value) if isinstance(value, str) else value)]


class FieldError(BaseModel):
    """One mistake. `field` is a path such as `spec.resources.cpu`; an empty path means the whole document."""

    model_config = ConfigDict(frozen=True)

    field: PrintableText
    message: PrintableText
    remedy: PrintableText

    def text(self) -> str:
        """The one sentence every surface prints."""
        return f"{self.field or 'document'}: {self.message}; {self.remedy}"


class InvalidMessage(ValueError):
    """Bytes or values that break their schema. `errors` is never empty."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        assert errors
        self.errors = tuple(errors)
        super().__init__("\n".join(error.text() for error in self.errors))


class InvalidManifest(InvalidMessage):
    """A TrainingJob manifest that breaks a rule."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name a user most likely meant, compared without case, or None."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(valid, reverse=True)}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def shorten(value: object) -> str:
    """A value as it may be shown in an error: on one line, bounded."""
    text = repr(value)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[: _VALUE_CHARACTERS_MAX - 1] + "…"


def refuse_booleans(model: type[BaseModel], name: str | None, value: object) -> object:
    """`true` is not 1: for a `mode="before"` validator of every field. Raises ValueError("message; remedy") where a number belongs."""
    if isinstance(value, bool) and name is not None:
        kinds = set(_types_in(model.model_fields[name].annotation))
        if kinds & {int, float} and bool not in kinds:
            word = "a whole number" if float not in kinds else "a number"
            raise ValueError(f"must be {word}, got {str(value).lower()}; give {word}")
    return value


def _types_in(annotation: Any) -> Iterable[Any]:
    """Every type that an annotation names, through unions and Annotated."""
    yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _types_in(argument)


def field_errors(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[FieldError]:
    """Turn pydantic's findings into our wording; `model` is where unknown keys look for the nearest valid one."""
    found: list[FieldError] = []
    for problem in error.errors(include_url=False)[:_ERRORS_MAX]:
        parts = problem["loc"]
        own = len(parts) - 1 if problem["type"] == "extra_forbidden" else None  # an unknown key is the user's own, however it is spelt
        location = [part for number, part in enumerate(parts) if number == own or not _is_union_tag(part)]
        field = prefix + _path(location)
        found.append(FieldError(field=field, **_wording(problem, model, location)))
    return list(dict.fromkeys(found))


def _is_union_tag(part: int | str) -> bool:
    # pydantic names the branch of a union inside the path (`str`, `EnvironmentSpec`, `function-before[...]`); users never wrote it.
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part or part[:1].isupper())


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
    return path


def _wording(problem: Any, model: type[BaseModel], location: Sequence[int | str]) -> dict[str, str]:
    kind, context, value = problem["type"], problem.get("ctx") or {}, problem.get("input")
    if kind == "extra_forbidden":
        valid = _keys_at(model, location[:-1])
        guess = nearest(str(location[-1]), valid)
        return {
            "message": "unknown key",
            "remedy": f"did you mean {guess}?" if guess else (f"remove it; known keys: {', '.join(sorted(valid))}" if valid else "remove it"),
        }
    if kind == "missing":
        return {"message": "missing", "remedy": "add it"}
    if kind == "value_error":
        # Our own validators raise ValueError("message; remedy").
        message, _, remedy = str(context.get("error", problem["msg"])).partition("; ")
        return {"message": message, "remedy": remedy or "correct it"}
    if kind in {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}:
        limit = context.get("ge", context.get("gt", context.get("le", context.get("lt"))))
        words = {"greater_than_equal": "at least", "greater_than": "more than", "less_than_equal": "at most", "less_than": "less than"}
        return {"message": f"must be {words[kind]} {limit}, got {shorten(value)}", "remedy": "correct the number"}
    if kind in {"literal_error", "enum"}:
        expected = str(context.get("expected", ""))
        guess = nearest(str(value), [part.strip(" '") for part in expected.replace(" or ", ",").split(",")])
        return {"message": f"must be {expected}, got {shorten(value)}", "remedy": f"did you mean {guess}?" if guess else f"use {expected}"}
    if kind.endswith(("_type", "_parsing", "_from_float")):
        wanted = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
        names = {
            "int": "a whole number",
            "float": "a number",
            "string": "text",
            "bool": "true or false",
            "model": "an object",
            "dict": "an object",
        }
        names |= {"model_attributes": "an object", "list": "a list", "tuple": "a list", "finite_number": "a finite number"}
        word = names.get(wanted, wanted)
        return {"message": f"must be {word}, got {shorten(value)}", "remedy": f"give {word}"}
    if kind == "finite_number":
        return {"message": f"must be a finite number, got {shorten(value)}", "remedy": "give a finite number"}
    if kind in {"string_too_long", "too_long", "string_too_short", "too_short", "string_pattern_mismatch"}:
        return {"message": f"{problem['msg'][0].lower()}{problem['msg'][1:]}", "remedy": "correct it"}
    return {"message": f"{problem['msg'][0].lower()}{problem['msg'][1:]}, got {shorten(value)}", "remedy": "correct it"}


def _keys_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that are allowed at a path, by walking the models."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        fields = {(field.alias or name): field for name, field in current.model_fields.items()}
        if part not in fields:
            return []
        current = _model_in(fields[part].annotation)
        if current is None:
            return []
    return [field.alias or name for name, field in current.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _model_in(argument)) is not None:
            return found
    return None
