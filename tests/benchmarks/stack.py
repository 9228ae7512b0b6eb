"""`make bench-stack`: how soon a warm stack is ready, and what it holds while idle. Its own home, its own ports, stopped at the end."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import UpOptions
from opentinker.compose.local.progress import SilentProgress
from opentinker.compose.local.stack import down, up
from opentinker.compose.local.status import read_status
from own_stack import own_stack
from report import Figure, report

_RUNS = 3
_SETTLE_S = 20  # what was allocated for starting is given back by then


def measure(only: tuple[str, ...] = ()) -> list[Figure]:
    """Warm starts (median) and the idle sum of PSS with its parts."""
    options, quiet, seconds = UpOptions(only=only, usual_ports=False, ends_with_caller=True), SilentProgress(), []
    with own_stack(*only) as stack:  # makes the databases: the cold start
        home = Home(stack.home)
        for _ in range(_RUNS):
            down(home, quiet)
            started = time.monotonic()
            up(home, options, quiet)
            seconds.append(time.monotonic() - started)
        time.sleep(_SETTLE_S)
        programs = read_status(home).programs
    figures = [
        Figure(name="warm up to ready", value=statistics.median(seconds), unit="s", goal=10),
        Figure(name="idle stack, sum of PSS", value=sum(program.pss_bytes for program in programs) / 1e9, unit="GB", goal=1.5),
    ]
    return figures + [Figure(name=f"PSS of {program.name}", value=program.pss_bytes / 1e6, unit="MB") for program in programs]


if __name__ == "__main__":
    report("stack", measure(tuple(sys.argv[1].split(",")) if len(sys.argv) > 1 else ()))
