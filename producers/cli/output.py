"""Data on standard output: a table on a terminal, JSON or YAML when asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

__all__ = ["age", "cell", "console", "format_option", "print_data", "print_rows", "print_table", "safe"]

F = TypeVar("F", bound=Callable[..., Any])


def format_option(function: F) -> F:
    return click.option("-o", "--output", type=click.Choice(["table", "json", "yaml", "name"]), default="table", show_default=True, help="Form.")(
        function
    )


def print_data(data: Any, form: str) -> None:
    """JSON or YAML of anything."""
    if form == "yaml":
        import yaml

        click.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)
    else:
        import json

        click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    """Columns as wide as their content. An empty table says on standard error what to do next."""
    if not rows:
        click.echo(empty, err=True)
        return
    cells = [[safe(str(value)) for value in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    for row in [list(columns), *cells]:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], form: str, empty: str) -> None:
    """Objects as data, or as a table. `columns`: heading → key."""
    if form in ("json", "yaml"):
        print_data(rows, form)
    else:
        print_table(list(columns), [[cell(row.get(key)) for key in columns.values()] for row in rows], empty)


def cell(value: object) -> str:
    """A value as people read it."""
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def safe(text: str) -> str:
    """Text of others as it may go to a terminal: no control characters, so no escape sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


def console(stderr: bool = False) -> Any:
    """A rich console that obeys NO_COLOR."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, file=sys.stderr if stderr else sys.stdout)


def age(iso: str | None) -> str:
    """Since when, as `3 min`."""
    if not iso:
        return ""
    from datetime import UTC, datetime

    from opentinker.schemas.quantities import format_duration

    return format_duration((datetime.now(UTC) - datetime.fromisoformat(iso)).total_seconds())
