"""The short version of the services' part of `make bench-faults`: every service killed once while CartPole trains, the database and the broker too."""

from __future__ import annotations

import time
from typing import Any

import pytest
from opentinker.compose.local.home import Home
from service_drill import CHECKPOINT_EVERY_S, ServiceDrill

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

FAULTS = ["kill scheduler", "kill agent and its trainers", "kill Kafka", "kill registry", "kill PostgreSQL", "kill S3", "kill agent", "kill gateway"]


async def test_a_bad_night_costs_no_job_and_no_more_than_a_checkpoint_interval(full_stack: Any) -> None:
    drill = ServiceDrill(Home(full_stack.home), steps=150_000)
    report = await drill.run(FAULTS, time.monotonic() + 600)
    assert [each.name for each in report.inflicted if not each.bit] == []
    assert len(report.inflicted) == len(FAULTS)
    assert report.checked.problems == []
    assert report.overlaps == []
    assert report.disagreements == []
    assert set(report.checked.ended) == {"JobCompleted"}
    assert report.checked.ended["JobCompleted"] == report.checked.accepted == report.jobs
    assert report.losses_s, "an agent that died with its trainers leaves attempts that others follow"
    assert max(report.losses_s) <= CHECKPOINT_EVERY_S + 3  # a sample on each side, and the checkpoint itself
