"""The short version of the services' part of `make bench-faults`, while CartPole trains: every service killed once, the database and the broker too; then
wrong clocks, a full disk, and what others may do to the topics."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from opentinker.compose.local.home import Home
from service_drill import CHECKPOINT_EVERY_S, ServiceDrill, ServiceReport

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

KILLED = ["kill scheduler", "kill agent and its trainers", "kill Kafka", "kill registry", "kill PostgreSQL", "kill S3", "kill agent", "kill gateway"]
TROUBLED = [
    "agent's clock 2 h ahead", "agent's clock 2 h behind", "agent's disk full", "broker's clock jumps", "inputs sent again and late",
    "others' transactions", "reports topic made anew",
]  # fmt: skip


async def test_a_bad_night_costs_no_job_and_no_more_than_a_checkpoint_interval(full_stack: Any) -> None:
    report = await drilled(full_stack, KILLED)
    assert report.losses_s, "an agent that died with its trainers leaves attempts that others follow"
    assert max(report.losses_s) <= CHECKPOINT_EVERY_S + 3  # a sample on each side, and the checkpoint itself


async def test_wrong_clocks_a_full_disk_and_mischief_on_the_topics_cost_no_job(own_full_stack: Any) -> None:
    mounts = os.getuid() == 0  # a disk that can be filled takes a small file system
    await drilled(own_full_stack, [name for name in TROUBLED if mounts or name != "agent's disk full"])


async def drilled(stack: Any, faults: list[str]) -> ServiceReport:
    drill = ServiceDrill(Home(stack.home), steps=150_000)
    report = await drill.run(faults, time.monotonic() + 600)
    assert [each.name for each in report.inflicted if not each.bit] == []
    assert len(report.inflicted) == len(faults)
    assert report.checked.problems == [], "\n".join(report.checked.problems)
    assert report.overlaps == []
    assert report.disagreements == []
    assert set(report.checked.ended) == {"JobCompleted"}
    assert report.checked.ended["JobCompleted"] == report.checked.accepted == report.jobs
    return report
