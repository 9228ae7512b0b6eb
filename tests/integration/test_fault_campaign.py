"""The short version of `make bench-faults`: every step of the scheduler's cycle and of its takeover, killed once, and the telling ones stopped and woken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from campaign import Fault
from drill import drill
from failpoints import NAMES

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

# Where a stopped owner does the most harm if anything is wrong: before its append, after it, with unsent outputs, in an open transaction, half an owner.
STOPPED = ("cycle.stepped", "cycle.appended", "publish.sent", "status.begun", "ownership.started")


async def test_no_fault_at_any_step_loses_a_job_or_runs_one_twice(own_kafka: Any, tmp_path: Path) -> None:
    faults = [Fault(place, "stop") for place in STOPPED] + [Fault(place, "kill") for place in NAMES]
    done = await drill(own_kafka.settings.kafka, own_kafka.environment(), tmp_path, faults, jobs_per_s=30, time_s=400, stopped_s=14)
    assert [outcome for outcome in done.outcomes if not outcome.bit_at] == [], "a fault counts only if it bit"
    assert len(done.outcomes) == len(faults)
    assert done.checked.problems == []
    assert set(done.checked.ended) == {"JobCompleted"}
    assert done.checked.ended["JobCompleted"] == done.checked.accepted > 500
    assert done.standby_exit == 0
    # The harm that was averted is seen: stale owners found out, their records void, outputs published again under the ids they had.
    woken = [outcome for outcome in done.outcomes if outcome.fault.action == "stop"]
    assert all("exit 1" in outcome.ended or "member again" in outcome.ended for outcome in woken), woken
    assert any(outcome.said["ProducerFenced"] or outcome.said["SupersededError"] for outcome in woken), woken
    assert done.checked.voids > 0
    assert done.checked.repeated > 0
    assert min(done.holes, done.sent_again) > 0
