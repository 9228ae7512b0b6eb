"""Which agent is a node, and what an agent's end, told or not, costs its jobs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from opentinker.schemas.messages import (
    AttemptOutcome,
    AttemptPhase,
    FailureClass,
    JobPhase,
    JobRequeued,
    NodeLost,
    NodeNameTaken,
    NodeRecovered,
    RefuseAgent,
    StopReason,
    UnschedulableReason,
)
from scheduler_world import World


@pytest.fixture
def world() -> World:
    return World()


class TestPlannedStop:
    def test_it_costs_no_retry_and_the_job_goes_on_elsewhere(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit(retry={"infrastructure": 0})
        world.run_all(uid)
        world.beat("node-1", world.progress(uid), stopping=True)
        assert world.stops(uid)[-1].reason is StopReason.GANG_FAILED, "which agents of every version can read"
        assert world.job(uid).reason == "NodeStopping"
        world.ended("node-1", uid, AttemptOutcome.STOPPED, checkpoint_id="c-1", checkpoint_step=512, global_step=512)
        world.beat("node-1", stopping=True)
        job = world.job(uid)
        assert (job.phase, job.unschedulable, job.failures_infrastructure) == (JobPhase.PENDING, UnschedulableReason.BACKOFF, 0)
        assert "node-1 is being stopped" in job.message
        assert job.training.checkpoint_step == 512
        world.agent("node-2")
        world.tick(3)
        assert world.nodes_of(uid) == ["node-2"]

    def test_a_node_that_said_goodbye_gets_no_work_and_its_silence_is_no_loss(self, world: World) -> None:
        for number in range(6):
            world.agent(f"node-{number}")
            world.beat(f"node-{number}", stopping=True)
        uid = world.submit()
        assert world.job(uid).unschedulable is UnschedulableReason.NO_NODES
        world.tick(30)
        assert not world.sent(NodeLost)
        assert not world.state.brakes, "six nodes that were stopped engage no brake"
        world.agent("node-3", incarnation="2")
        assert world.nodes_of(uid) == ["node-3"]
        assert not world.sent(NodeRecovered)

    def test_a_late_heartbeat_from_before_the_goodbye_brings_nothing_back(self, world: World) -> None:
        world.agent("node-1")
        world.beat("node-1", stopping=True)
        world.beat("node-1")
        assert world.job(world.submit()).unschedulable is UnschedulableReason.NO_NODES

    def test_one_that_is_killed_while_it_stops_costs_no_retry_either(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit(retry={"infrastructure": 0})
        world.run_all(uid)
        world.beat("node-1", world.progress(uid), stopping=True)
        world.tick(12)
        assert world.job(uid).unschedulable in (UnschedulableReason.BACKOFF, UnschedulableReason.NO_NODES)
        assert not world.sent(NodeLost)

    def test_the_whole_gang_moves_and_a_part_that_fails_on_the_way_counts_only_if_it_is_the_jobs_own_fault(self, world: World) -> None:
        for failure, phase in ((FailureClass.INFRASTRUCTURE, JobPhase.PENDING), (FailureClass.USER_ERROR, JobPhase.FAILED)):
            world = World()
            world.agent("node-1")
            world.agent("node-2")
            uid = world.submit(replicas=2, retry={"infrastructure": 0})
            world.run_all(uid)
            world.beat("node-1", world.progress(uid), stopping=True)
            assert {command.node for command in world.stops(uid)} == {"node-1", "node-2"}
            world.ended("node-2", uid, AttemptOutcome.FAILED, failure)
            world.ended("node-1", uid, AttemptOutcome.STOPPED)
            assert world.job(uid).phase is phase

    def test_one_that_finishes_meanwhile_is_complete(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.beat("node-1", world.progress(uid), stopping=True)
        world.ended("node-1", uid, AttemptOutcome.SUCCEEDED)
        assert world.job(uid).phase is JobPhase.COMPLETED

    def test_a_cancellation_meanwhile_is_obeyed(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.beat("node-1", world.progress(uid), stopping=True)
        world.cancel(uid)
        world.ended("node-1", uid, AttemptOutcome.STOPPED)
        assert world.job(uid).phase is JobPhase.CANCELLED


class TestCopiesThatComeLate:
    """An outage, a mirror of the topic or a person may append a report once more, when it has long been overtaken."""

    def test_an_older_heartbeat_does_not_end_what_began_since(self, world: World) -> None:
        world.agent("node-1")
        world.beat("node-1", applied=0, sequence=20)
        uid = world.submit()
        world.beat("node-1", world.progress(uid), sequence=21)
        for sequence in (20, 21):
            result = world.beat("node-1", applied=0, sequence=sequence)
            assert not result.outputs
        assert (world.job(uid).phase, world.state.attempts[uid].attempt_number) == (JobPhase.RUNNING, 1)

    def test_it_keeps_no_silent_node_and_brings_no_lost_one_back(self, world: World) -> None:
        world.agent("node-1")
        world.beat("node-1", sequence=5)
        for _ in range(8):
            world.tick(2)
            world.beat("node-1", sequence=4)
        assert [alert.node for alert in world.sent(NodeLost)] == ["node-1"]
        assert not world.sent(NodeRecovered)
        world.beat("node-1", sequence=6)
        assert world.sent(NodeRecovered)

    def test_an_older_announcement_changes_nothing(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.beat("node-1", world.progress(uid), sequence=7)
        before = world.state.nodes["node-1"], world.state.leases["node-1"]
        world.agent("node-1", sequence=6, gpus=1)
        assert (world.state.nodes["node-1"], world.state.leases["node-1"]) == before
        world.agent("node-1", sequence=7, gpus=1, adopted=(world.progress(uid),))
        assert len(world.state.nodes["node-1"].devices) == 1
        assert world.job(uid).phase is JobPhase.RUNNING


class TestNoFaultOfTheJobs:
    def test_a_restarted_agent_that_never_took_it_up_costs_no_retry(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit(retry={"infrastructure": 0})
        world.agent("node-1", incarnation="2")
        world.tick(2)
        assert world.starts(uid)[-1].incarnation == "2"
        assert world.job(uid).failures_infrastructure == 0

    def test_what_every_start_needs_being_away_makes_it_wait_longer_each_time_and_fail_never(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit(retry={"infrastructure": 0})
        for _ in range(5):
            world.beat("node-1", world.progress(uid, AttemptPhase.PREPARING, 0))
            world.ended("node-1", uid, AttemptOutcome.FAILED, FailureClass.UNAVAILABLE)
            while uid not in world.state.attempts:
                world.beat("node-1", after_ms=2000)
        delays = [event.delay_ms for event in world.sent(JobRequeued)]
        assert len(delays) == 5
        assert all(later > 1.5 * earlier for earlier, later in pairwise(delays))
        world.run_all(uid)
        assert world.job(uid).uncounted == 0, "once it has run, it begins anew"


class TestOneAgentANode:
    def test_a_second_one_waits_and_is_told_so_while_the_first_lives(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        for _ in range(4):
            world.agent("node-1", incarnation="7", previous_incarnation=None, boot_id="another machine")
            world.beat("node-1", incarnation="7")
            world.alive("node-1", after_ms=2000)
        assert world.job(uid).phase is JobPhase.RUNNING
        assert world.state.nodes["node-1"].incarnation == "1"
        assert {(told.incarnation, told.held_by) for told in world.sent(RefuseAgent)} == {("7", "1")}
        assert len(world.sent(RefuseAgent)) == 2, "every four seconds, not at every word of it"
        assert [alert.refused for alert in world.sent(NodeNameTaken)] == ["7"], "people are told once"

    def test_it_takes_over_once_the_first_ones_lease_has_run_out_and_the_first_is_told(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.tick(8)
        world.agent("node-1", incarnation="7", previous_incarnation=None)
        assert world.nodes_of(uid) == ["node-1"]
        assert world.state.attempts[uid].parts[0].incarnation == "1"
        world.tick(4)
        world.agent("node-1", incarnation="7", previous_incarnation=None)
        world.tick(2)
        assert world.state.attempts[uid].parts[0].incarnation == "7"
        world.beat("node-1", incarnation="1")
        assert (world.sent(RefuseAgent)[-1].incarnation, world.sent(RefuseAgent)[-1].held_by) == ("1", "7")

    def test_a_copy_of_the_folder_on_another_machine_is_no_successor(self, world: World) -> None:
        world.agent("node-1")
        world.agent("node-1", incarnation="2", boot_id="another machine")
        assert world.state.nodes["node-1"].incarnation == "1"

    def test_an_old_announcement_that_comes_late_changes_nothing(self, world: World) -> None:
        world.agent("node-1")
        world.agent("node-1", incarnation="2")
        world.agent("node-1", incarnation="1")
        assert world.state.nodes["node-1"].incarnation == "2"

    def test_a_name_that_was_given_back_is_free_at_once(self, world: World) -> None:
        world.agent("node-1")
        world.beat("node-1", stopping=True)
        world.agent("node-1", incarnation="7", previous_incarnation=None)
        assert world.state.nodes["node-1"].incarnation == "7"
        assert world.nodes_of(world.submit()) == ["node-1"]

    def test_two_that_both_want_it_do_not_take_turns(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        for round_ in range(30):
            world.alive("node-1", after_ms=2000)
            world.agent("node-1", incarnation=str(100 + round_), previous_incarnation=None)
        assert world.job(uid).attempt_number == 1
        assert len(world.sent(NodeNameTaken)) == 1
