"""A namespace's queue has a bound: what comes above it ends at once and says why, and what waits already goes on waiting."""

from __future__ import annotations

import pytest
from opentinker.scheduler_stream.codec import decode_change, encode_change
from opentinker.scheduler_stream.core import queueing
from opentinker.scheduler_stream.core.explain import list_limits
from opentinker.scheduler_stream.core.state import Change, State
from opentinker.schemas.messages import JobFailed, JobPhase, JobSubmitted, ResourceLimits, SetNamespaceLimits
from scheduler_world import World


def outcome(world: World, uid: str) -> tuple[JobPhase, str]:
    return world.job(uid).phase, world.job(uid).reason


def recovered(state: State) -> State:
    """The state as a sweep of the journal gives it back."""
    fresh = State()
    for kind, id in state.entity_keys():
        fresh.load(*decode_change(encode_change(Change(kind, id, state.get(kind, id)))))
    return fresh


def test_above_its_limit_a_submit_ends_at_once_with_count_limit_and_remedy() -> None:
    world = World()
    world.limit(2)
    waiting = [world.submit(f"job-{number}") for number in range(2)]
    refused = world.submit("job-2")
    assert outcome(world, refused) == (JobPhase.FAILED, "QueueFull")
    message = world.job(refused).message
    assert "default has 2 jobs waiting in pool default and may have 2" in message
    assert "opentinker limits set default --queued-max N --pool default" in message
    assert [world.job(uid).phase for uid in waiting] == [JobPhase.PENDING] * 2
    events = [event for event in (*world.sent(JobSubmitted), *world.sent(JobFailed)) if event.job_uid == refused]
    assert [type(event) for event in events] == [JobSubmitted, JobFailed]
    assert world.status(refused).reason == "QueueFull"


def test_a_job_that_starts_ends_or_is_cancelled_makes_room() -> None:
    world = World()
    world.limit(1)
    first = world.submit("one")
    assert outcome(world, world.submit("two"))[1] == "QueueFull"
    world.agent("node-1")  # the first is placed
    assert world.job(first).phase is JobPhase.STARTING
    second = world.submit("three")
    assert world.job(second).phase is JobPhase.PENDING
    assert outcome(world, world.submit("four"))[1] == "QueueFull"
    world.cancel(second)
    assert world.job(world.submit("five")).phase is JobPhase.PENDING


def test_the_same_submission_again_is_the_same_job_however_full_the_queue_is() -> None:
    world = World()
    world.limit(1)
    uid = world.submit("one")
    command = next(event for event in world.sent(JobSubmitted) if event.job_uid == uid)
    before = world.state.hash()
    job = world.job(uid)
    assert command.name == job.name
    world.limit(1)
    assert world.state.hash() == before
    assert world.job(uid).phase is JobPhase.PENDING


def test_limits_are_of_one_namespace_in_one_pool() -> None:
    world = World()
    world.limit(0, namespace="team-a")
    world.limit(0, pool="spot")
    assert outcome(world, world.submit("a", namespace="team-a"))[1] == "QueueFull"
    assert world.job(world.submit("b")).phase is JobPhase.PENDING
    assert world.job(world.submit("c", namespace="team-b")).phase is JobPhase.PENDING


def test_a_lower_limit_ends_nothing_that_waits_and_a_cleared_one_is_the_usual_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queueing, "QUEUED_MAX", 3)
    world = World()
    waiting = [world.submit(f"job-{number}") for number in range(3)]
    assert outcome(world, world.submit("usual"))[1] == "QueueFull"
    world.limit(1)
    assert all(world.job(uid).phase is JobPhase.PENDING for uid in waiting)
    world.cancel(waiting[0])
    assert outcome(world, world.submit("lower"))[1] == "QueueFull"
    world.limit(None)
    assert world.state.limits == {}
    assert world.job(world.submit("usual-again")).phase is JobPhase.PENDING


def test_limits_and_counts_come_back_from_a_sweep() -> None:
    world = World()
    world.limit(2, namespace="team-a")
    world.submit("a", namespace="team-a")
    world.submit("b")
    fresh = recovered(world.state)
    assert fresh.hash() == world.state.hash()
    assert fresh.queued == world.state.queued == {("default", "team-a"): 1, ("default", "default"): 1}
    world.state = fresh
    world.submit("c", namespace="team-a")
    assert outcome(world, world.submit("d", namespace="team-a"))[1] == "QueueFull"


def test_a_step_that_fails_takes_its_count_back() -> None:
    world = World()
    world.submit("a")
    before = dict(world.state.queued)

    def fail() -> None:
        with world.state.recording():
            world.state.remove("job", next(iter(world.state.jobs)))
            assert world.state.queued == {}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert world.state.queued == before


def test_everyone_is_told_what_waits_and_what_may() -> None:
    world = World()
    world.limit(5, namespace="team-a")
    world.submit("a")
    shown = [{key: row[key] for key in ("pool", "namespace", "queued", "queuedMax", "usual")} for row in list_limits(world.state)]
    assert shown == [
        {"pool": "default", "namespace": "default", "queued": 1, "queuedMax": 200_000, "usual": True},
        {"pool": "default", "namespace": "team-a", "queued": 0, "queuedMax": 5, "usual": False},
    ]


def test_what_a_namespace_holds_and_may_have_is_told() -> None:
    world = World()
    world.agent("node-1", gpus=2)
    own = ResourceLimits(gpus=4, memory_bytes=2**33)
    world.put(
        SetNamespaceLimits(
            pool="default", namespace="a", requested_by="t", running_max=3, weight_milli=2500, nominal=own, lending=ResourceLimits(gpus=1)
        )
    )
    world.submit("job", namespace="a")
    [row] = list_limits(world.state)
    assert (row["placed"], row["runningMax"], row["weightMilli"], row["queued"]) == (1, 3, 2500, 0)
    assert row["holds"] == {"gpus": 1, "cpuMillis": 1000, "memoryBytes": 2**30}
    assert row["nominal"] == {"gpus": 4, "cpuMillis": None, "memoryBytes": 2**33}
    assert (row["borrowing"]["gpus"], row["lending"]["gpus"]) == (None, 1)
