"""`make bench-hostile`: random and mutated records on every topic that a service reads. COUNT (10,000) on each; services run as processes under their own users.

A figure of crashes other than 0 never shows: a service that ends before its time fails the run.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from hostile_campaign import run_campaign, totals
from own_stack import Stack, own_stack
from report import Figure, report
from secure_access import granted_access
from secure_services import everything

_SEED = 20261201


async def measure(stores: Stack, directory: Path, count: int) -> list[Figure]:
    (directory / "kafka").mkdir()
    async with granted_access(directory / "kafka", ["team-a"]) as granted, everything(stores, granted, directory, ["team-a"], ["default"]) as http:
        began = time.monotonic()
        outcomes = await run_campaign(granted.broker.settings(), http, count=count, seed=_SEED)
        seconds = time.monotonic() - began
    sent, accepted, dead = totals(outcomes)
    wrong = sum(len(outcome.wrong) for outcome in outcomes)
    figures = [
        Figure(name="hostile records sent", value=sent, unit="", goal=count * len(outcomes), at_least=True),
        Figure(name="neither valid nor dead-lettered", value=sent - accepted - dead, unit="", goal=0),
        Figure(name="judged in another way than by the schemas", value=wrong, unit="", goal=0),
        Figure(name="services that ended", value=0, unit="", goal=0),
        Figure(name="time", value=seconds, unit="s"),
    ]
    for outcome in outcomes:
        beside = ("of", float(outcome.sent))
        figures.append(Figure(name=f"dead letters of {outcome.topic}", value=outcome.dead, unit="", beside=beside))
    return figures


def main(count: int) -> None:
    with own_stack("postgres", "s3") as stores, tempfile.TemporaryDirectory(prefix="opentinker-bench-hostile-") as directory:
        report("hostile", asyncio.run(measure(stores, Path(directory), count)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
