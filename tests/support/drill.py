"""A whole fault drill on one broker: load on every partition, faults, then the checker's verdict. Used by the short test and the long benchmark."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from campaign import Fault, Outcome, SchedulerCampaign
from checker import Checked, check, marks
from fleet import Fleet, Submitter, pools_of
from opentinker.compose.runtime.settings import KafkaSettings

__all__ = ["Drill", "drained", "drill"]

_DRAIN_TIMEOUT_S = 180.0


@dataclass(slots=True, kw_only=True)
class Drill:
    """What a drill did and what it came to."""

    outcomes: list[Outcome]
    checked: Checked
    standby_exit: int
    holes: int  # transactions of outsiders on the inputs
    sent_again: int  # inputs that came twice


async def drill(
    settings: KafkaSettings,
    environment: dict[str, str],
    directory: Path,
    faults: list[Fault],
    *,
    jobs_per_s: float,
    time_s: float,
    stopped_s: float,
    say: Callable[[str], None] = print,
) -> Drill:
    """Faults in turn under load, at most for `time_s`; then everything is let run out, and checked. No worker may run on the broker before."""
    pools, since, began = pools_of(settings.partitions, f"drill-{uuid.uuid4().hex[:4]}"), await marks(settings), time.monotonic()
    campaign = SchedulerCampaign(settings, environment, directory, stopped_s=stopped_s, say=say)
    async with Fleet(settings, pools, nodes=3, repeats=0.05) as fleet, Submitter(settings, pools, repeats=0.02) as submitter:
        try:
            async with campaign:
                load = asyncio.create_task(submitter.at_rate(jobs_per_s, 10**9))
                try:
                    await campaign.run(faults, began + time_s)
                finally:
                    load.cancel()
            await drained(fleet, submitter)
        finally:
            standby_exit = await campaign.stop()
        checked = await check(settings, since, pools, fleet.runs)
        sent_again = submitter.sent_again + fleet.sent_again
    return Drill(
        outcomes=campaign.outcomes, checked=checked, standby_exit=standby_exit, holes=campaign.holes, sent_again=sent_again,
    )  # fmt: skip


async def drained(fleet: Fleet, submitter: Submitter) -> None:
    """Until every job was run and nothing moves any more; what is left then is for the checker to find."""
    deadline = time.monotonic() + _DRAIN_TIMEOUT_S
    while time.monotonic() < deadline:
        if set(submitter.submitted) <= set(fleet.placed_ms) and not any(node.live for node in fleet.nodes.values()):
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(8)  # the last reports come twice up to 5 s later, statuses a little after
