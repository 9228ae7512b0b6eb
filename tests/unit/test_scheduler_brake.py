"""The brake: what many losses at once do, and what a few do not."""

from __future__ import annotations

import pytest
from opentinker.scheduler_stream.core.state import State
from opentinker.schemas.messages import AcknowledgeBrake, AttemptPhase, AttemptProgress, BrakeEngaged, BrakeReleased, JobPhase, NodeLost, Tick
from opentinker.schemas.records import job_uid_of
from scheduler_world import World


@pytest.fixture
def world() -> World:
    """Ten nodes, each with a running job."""
    made = World()
    for number in range(10):
        made.agent(f"node-{number}")
        made.run_all(made.submit(f"job-{number}"))
    return made


def silence(world: World, silent: range, seconds: int = 14) -> None:
    """Time passes; nodes outside `silent` go on reporting."""
    for _ in range(seconds // 2):
        world.tick(2)
        for number in range(10):
            if number not in silent:
                world.alive(f"node-{number}", after_ms=0)


def running(world: World) -> int:
    return sum(job.phase is JobPhase.RUNNING and job.attempt_number == 1 for job in world.state.jobs.values())


def test_few_silent_nodes_are_given_up_one_by_one(world: World) -> None:
    silence(world, range(3))
    assert len(world.sent(NodeLost)) == 3
    assert world.sent(BrakeEngaged) == []
    assert running(world) == 7


def test_nodes_given_up_long_ago_fall_silent_no_second_time_after_a_takeover() -> None:
    """A worker that takes over builds its timers anew, also those of nodes that are gone."""
    world = World()
    for number in range(10):
        world.agent(f"node-{number}")
    for gone in range(1, 10):  # one a minute, which is no mass loss
        for _ in range(30):
            world.tick(2)
            for number in range(gone, 10):
                world.alive(f"node-{number}", after_ms=0)
    assert (len(world.sent(NodeLost)), world.sent(BrakeEngaged)) == (9, [])
    rebuilt = State()
    for kind, id in world.state.entity_keys():
        rebuilt.load(kind, id, world.state.get(kind, id))
    world.state = rebuilt
    before = rebuilt.hash()
    world.put(Tick(partition=0, worker="w", sequence=world.offset, sent_ms=world.now), 0)
    assert rebuilt.hash() == before
    assert world.sent(BrakeEngaged) == []


def test_many_silent_nodes_engage_the_brake_and_keep_their_jobs(world: World) -> None:
    silence(world, range(9))
    [engaged] = world.sent(BrakeEngaged)
    assert "of 10 nodes fell silent within 30 s" in engaged.reason
    assert running(world) == 6  # four were given up before the fifth showed what is going on
    assert len(world.sent(NodeLost)) == 9
    fresh = world.submit("healthy", gpu=0)
    assert world.nodes_of(fresh) == ["node-9"]


def test_when_they_come_back_they_go_on_and_the_brake_lets_go(world: World) -> None:
    silence(world, range(9))
    for number in range(9):
        held = [uid for uid, attempt in world.state.attempts.items() if attempt.parts[0].node == f"node-{number}"]
        world.beat(f"node-{number}", *(world.progress(uid, AttemptPhase.PAUSED, 0) for uid in held))
    assert len(world.sent(BrakeReleased)) == 1
    for number in range(9):
        world.alive(f"node-{number}", after_ms=0)
    assert running(world) == 6


def test_an_administrator_can_say_that_the_losses_are_real(world: World) -> None:
    silence(world, range(9))
    world.put(AcknowledgeBrake(pool="default", requested_by="me"))
    silence(world, range(9), 4)
    assert world.sent(BrakeReleased)[0].reason == "acknowledged by me"
    assert running(world) == 1
    assert len(world.sent(BrakeEngaged)) == 1


def test_many_unknown_attempts_are_not_stopped_until_a_person_says_so(world: World) -> None:
    strangers = [
        AttemptProgress(job_uid=job_uid_of("stranger", str(number)), attempt_number=1, lease_epoch=1, phase=AttemptPhase.RUNNING, replicas_running=1)
        for number in range(8)
    ]
    held = [uid for uid, attempt in world.state.attempts.items() if attempt.parts[0].node == "node-0"]
    listed = [world.progress(uid) for uid in held]
    world.beat("node-0", *listed, *strangers)
    [engaged] = world.sent(BrakeEngaged)
    assert "attempts run that the scheduler does not know" in engaged.reason
    stopped = {stop.job_uid for stranger in strangers for stop in world.stops(stranger.job_uid)}
    assert len(stopped) == 4
    for _ in range(4):
        world.beat("node-0", *listed, *strangers, after_ms=2000)
    assert {stop.job_uid for stranger in strangers for stop in world.stops(stranger.job_uid)} == stopped
    world.put(AcknowledgeBrake(pool="default", requested_by="me"))
    world.beat("node-0", *listed, *strangers, after_ms=2000)
    assert len({stop.job_uid for stranger in strangers for stop in world.stops(stranger.job_uid)}) == 8


def test_without_a_brake_an_acknowledgement_changes_nothing(world: World) -> None:
    before = world.state.hash()
    world.put(AcknowledgeBrake(pool="default", requested_by="me"))
    assert world.sent(BrakeReleased) == []
    assert world.state.hash() == before
