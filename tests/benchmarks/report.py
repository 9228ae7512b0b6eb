"""How every benchmark reports: a table for people, and `build/bench/NAME.json` for machines.

A figure is `{"name", "value", "unit", "goal", "beside": {"what", "value"}, "holds"}`; `goal` and `beside` only where there is one. `holds` is whether the
goal is met; nothing fails on it, since a benchmark shows and a test asserts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Figure", "quantile", "report"]

_DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number. `goal` is the most it may be, or the least where `at_least` is set."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False
    beside: tuple[str, float] | None = None  # what it is compared with, and that one's value

    @property
    def holds(self) -> bool:
        if self.goal is None:
            return True
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def as_json(self) -> dict[str, Any]:
        figure: dict[str, Any] = {"name": self.name, "value": round(self.value, 3), "unit": self.unit}
        if self.goal is not None:
            figure["goal"] = self.goal
        if self.beside is not None:
            figure["beside"] = {"what": self.beside[0], "value": self.beside[1]}
        return figure | {"holds": self.holds}


def quantile(values: Sequence[float], q: float) -> float:
    """Of measured values, without interpolation; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else float("nan")


def report(name: str, figures: Sequence[Figure]) -> None:
    """Print the table and write the file."""
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", "goal", "beside", "holds", title=f"bench-{name}", box=None, pad_edge=False)
    for figure in figures:
        goal = "" if figure.goal is None else f"{'≥' if figure.at_least else '≤'} {figure.goal:g} {figure.unit}"
        beside = f"{figure.beside[0]}: {figure.beside[1]:g}" if figure.beside else ""
        table.add_row(figure.name, f"{figure.value:.3g} {figure.unit}", goal, beside, "yes" if figure.holds else "NO")
    Console(highlight=False, width=140).print(table)
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    path = _DIRECTORY / f"{name}.json"
    path.write_text(json.dumps([figure.as_json() for figure in figures], indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}")
