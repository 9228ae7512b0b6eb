"""What the scheduler decides, told with values: gangs, leases, epochs, retries, reasons."""

from __future__ import annotations

import pytest
from opentinker.scheduler_stream.core.effects import Effects
from opentinker.scheduler_stream.core.explain import explain_job, list_nodes
from opentinker.scheduler_stream.core.lifecycle import JOB_MOVES, PART_MOVES, PART_OVER, IllegalMoveError, JobMove, move_job
from opentinker.scheduler_stream.core.policy import START_TIMEOUT_MS, TERMINAL_KEPT_MS
from opentinker.schemas.messages import (
    AttemptFinished,
    AttemptOutcome,
    AttemptPhase,
    AttemptPlaced,
    CordonNode,
    FailureClass,
    JobCompleted,
    JobFailed,
    JobPhase,
    JobRequeued,
    JobSubmitted,
    ModelReference,
    NodeLost,
    NodeRecovered,
    ResumeAttempt,
    Taint,
    Tick,
    UncordonNode,
    UnschedulableReason,
)
from scheduler_world import World


@pytest.fixture
def world() -> World:
    return World()


def four_nodes(world: World) -> World:
    for number in range(1, 5):
        world.agent(f"node-{number}")
    return world


class TestGangs:
    def test_a_gang_is_placed_whole_the_moment_it_fits(self, world: World) -> None:
        for number in range(1, 4):
            world.agent(f"node-{number}")
        uid = world.submit(replicas=4)
        assert world.job(uid).phase is JobPhase.PENDING
        assert world.starts(uid) == []
        world.agent("node-4")
        assert world.job(uid).phase is JobPhase.STARTING
        assert sorted(rank for start in world.starts(uid) for rank in (r.rank for r in start.replicas)) == [0, 1, 2, 3]
        assert {start.rendezvous.port for start in world.starts(uid)} == {29500}

    def test_it_runs_once_every_replica_runs(self, world: World) -> None:
        uid = four_nodes(world).submit(replicas=4)
        for node in world.nodes_of(uid)[:3]:
            world.beat(node, world.progress(uid))
        assert world.job(uid).phase is JobPhase.STARTING
        world.beat(world.nodes_of(uid)[3], world.progress(uid))
        assert world.job(uid).phase is JobPhase.RUNNING
        assert world.status(uid).replicas_running == 4

    def test_fewest_nodes_and_the_tightest_that_fits(self, world: World) -> None:
        world.agent("big", gpus=4, cpu=8)
        world.agent("middle", gpus=2, cpu=4)
        world.agent("small", gpus=1, cpu=2)
        assert world.nodes_of(world.submit("one")) == ["small"]
        assert world.nodes_of(world.submit("two", replicas=2)) == ["middle"]
        assert world.nodes_of(world.submit("four", replicas=4)) == ["big"]

    def test_a_job_too_large_keeps_nobody_waiting(self, world: World) -> None:
        world.agent("node-1")
        large = world.submit("large", replicas=32)
        small = world.submit("small")
        assert world.job(large).unschedulable is UnschedulableReason.TOO_LARGE
        assert world.job(small).phase is JobPhase.STARTING

    def test_oldest_first_when_capacity_is_freed(self, world: World) -> None:
        world.agent("node-1")
        first, second, third = (world.submit(name) for name in ("a", "b", "c"))
        world.run_all(first)
        world.ended("node-1", first)
        assert world.job(second).phase is JobPhase.STARTING
        assert world.job(third).phase is JobPhase.PENDING

    def test_devices_are_never_given_twice(self, world: World) -> None:
        world.agent("node-1", gpus=2, cpu=8)
        first, second = world.submit("a"), world.submit("b")
        assert [start.replicas[0].devices for start in (*world.starts(first), *world.starts(second))] == [(0,), (1,)]
        assert world.starts(first)[0].rendezvous.port != world.starts(second)[0].rendezvous.port


class TestWhere:
    """Labels, taints, types of GPU, and how the nodes of a gang lie to each other."""

    def test_labels_and_taints_say_where_a_job_may_go(self, world: World) -> None:
        world.agent("node-1", labels={"disk": "hdd"})
        world.agent("node-2", labels={"disk": "ssd"}, taints=(Taint(key="team", value="a"),))
        uid = world.submit("ssd", nodeSelector={"disk": ["nvme", "ssd"]})
        job = world.job(uid)
        assert job.unschedulable is UnschedulableReason.NO_MATCHING_NODES
        answer = explain_job(world.state, uid)
        assert answer is not None
        assert answer["text"].endswith("of 2 nodes of pool default 1 lack disk=nvme|ssd, 1 have taint team=a")
        assert world.nodes_of(world.submit("tolerant", nodeSelector={"disk": "ssd"}, tolerations=[{"key": "team"}])) == ["node-2"]
        assert world.nodes_of(world.submit("anywhere")) == ["node-1"]

    def test_a_type_of_gpu_is_one_of_those_asked_for(self, world: World) -> None:
        world.agent("node-1", gpus=2, gpu_type="a100")
        world.agent("node-2", gpus=2, gpu_type="h100")
        uid = world.submit("fast", replicas=2, resources={"gpu": 1, "gpuType": ["h100", "b200"]})
        assert world.nodes_of(uid) == ["node-2"]
        other = world.submit("none", resources={"gpu": 1, "gpuType": "v100"})
        assert world.job(other).unschedulable is UnschedulableReason.TOO_LARGE
        assert "needs 1 × (1 GPU v100, 1 CPU, 2 GiB)" in world.job(other).message

    def test_a_gang_that_may_start_smaller_takes_what_there_is(self, world: World) -> None:
        world.agent("node-1", gpus=2)
        world.agent("node-2", gpus=1)
        assert world.job(world.submit("five", replicas=8, minReplicas=5)).unschedulable is UnschedulableReason.TOO_LARGE
        uid = world.submit("elastic", replicas=8, minReplicas=2)
        starts = world.starts(uid)
        assert [len(start.replicas) for start in starts] == [2, 1]
        assert {start.world_size for start in starts} == {3}
        world.run_all(uid)
        assert world.job(uid).phase is JobPhase.RUNNING

    def test_nodes_of_one_rack_are_preferred_and_may_be_asked_for(self, world: World) -> None:
        for number, rack in enumerate(("r", "s", "s", "t")):
            world.agent(f"node-{number}", labels={"rack": rack}, gpus=1)
        assert world.nodes_of(world.submit("two", replicas=2)) == ["node-1", "node-2"]
        uid = world.submit("same", replicas=2, topology={"same": "rack"})
        assert world.job(uid).unschedulable is UnschedulableReason.INSUFFICIENT_CAPACITY
        assert sorted(world.nodes_of(world.submit("any", replicas=2))) == ["node-0", "node-3"]

    def test_a_gang_is_spread_on_request(self, world: World) -> None:
        for number in range(3):
            world.agent(f"node-{number}", gpus=4, cpu=8)
        uid = world.submit("apart", replicas=4, topology={"spread": True})
        assert sorted(len(start.replicas) for start in world.starts(uid)) == [1, 1, 2]


class TestSubmission:
    def test_the_same_uid_twice_is_one_job(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        command = next(output for output in world.outputs if isinstance(output.message, JobSubmitted))
        world.offset -= 1  # the very same submission again
        before = world.state.hash()
        world.submit()
        assert world.job(uid).attempt_number == 1
        assert len(world.sent(JobSubmitted)) == 1
        assert command.key == uid
        assert before == world.state.hash()

    def test_a_live_name_is_taken_and_a_finished_one_is_free(self, world: World) -> None:
        world.agent("node-1")
        first, second = world.submit("same"), world.submit("same")
        assert world.job(second).phase is JobPhase.FAILED
        assert world.job(second).reason == "NameTaken"
        assert first in world.job(second).message
        world.cancel(first)
        world.ended("node-1", first, AttemptOutcome.STOPPED)
        assert world.job(world.submit("same")).phase is JobPhase.STARTING

    def test_a_seed_is_drawn_from_the_uid_and_a_given_one_is_kept(self, world: World) -> None:
        world.agent("node-1", gpus=2, cpu=8)
        drawn, given = world.submit("a"), world.submit("b", seed=7)
        assert world.starts(given)[0].seed == 7
        assert world.starts(drawn)[0].seed == world.job(drawn).seed
        assert 0 <= world.job(drawn).seed < 2**31

    def test_a_finished_job_is_forgotten_only_after_copies_of_it_are_stale(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.ended("node-1", uid)
        job = world.job(uid)
        assert job.purge_at == world.state.clock.now_ms + TERMINAL_KEPT_MS
        world.tick(10)
        assert uid in world.state.jobs


class TestEndings:
    def test_success_of_rank_zero_completes_the_job_with_its_model(self, world: World) -> None:
        uid = four_nodes(world).submit(replicas=4)
        world.run_all(uid)
        nodes = world.nodes_of(uid)
        world.ended(nodes[1], uid)
        assert world.job(uid).phase is JobPhase.RUNNING
        world.ended(
            nodes[0], uid, global_step=100_000, episodes=700, mean_return=481.5, stop_reason="TargetReturn", checkpoint_id="c",
            checkpoint_step=100_000, model=ModelReference(name="job", version=3),
        )  # fmt: skip
        assert world.job(uid).phase is JobPhase.STOPPING
        for node in nodes[2:]:
            world.ended(node, uid, AttemptOutcome.STOPPED)
        status = world.status(uid)
        assert status.phase is JobPhase.COMPLETED
        assert status.model == ModelReference(name="job", version=3)
        assert (status.progress.mean_return, status.progress.global_step, status.stop_reason) == (481.5, 100_000, "TargetReturn")
        assert len(world.sent(JobCompleted)) == 1
        assert all(not node.allocations for node in world.state.nodes.values())

    def test_one_failed_rank_stops_the_gang_and_it_restarts_whole(self, world: World) -> None:
        uid = four_nodes(world).submit(replicas=4)
        world.run_all(uid)
        nodes = world.nodes_of(uid)
        world.ended(nodes[2], uid, AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE, message="killed by signal 9")
        assert {stop.node for stop in world.stops(uid)} == {nodes[0], nodes[1], nodes[3]}
        for node in (nodes[0], nodes[1], nodes[3]):
            assert len(world.starts(uid)) == 4
            world.ended(node, uid, AttemptOutcome.STOPPED)
        assert world.job(uid).unschedulable is UnschedulableReason.BACKOFF
        world.tick(3)
        assert world.job(uid).attempt_number == 2
        assert {start.lease_epoch for start in world.starts(uid)} == {1, 2}
        assert len(world.starts(uid)) == 8

    def test_a_user_error_is_not_tried_again(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.ended("node-1", uid, AttemptOutcome.FAILED, FailureClass.USER_ERROR, message="ModuleNotFoundError: no module named x")
        assert world.job(uid).phase is JobPhase.FAILED
        assert world.job(uid).reason == "UserError"
        assert "ModuleNotFoundError" in world.sent(JobFailed)[0].message

    def test_a_loss_that_is_not_finite_fails_without_retries(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit(retry={"infrastructure": 9, "userError": 9})
        world.ended("node-1", uid, AttemptOutcome.FAILED, FailureClass.NON_FINITE)
        assert (world.job(uid).phase, world.job(uid).reason) == (JobPhase.FAILED, "NonFinite")

    def test_infrastructure_failures_use_up_their_budget_with_growing_delays(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit(retry={"infrastructure": 2})
        for _ in range(3):
            world.run_all(uid)
            world.ended("node-1", uid, AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE)
            world.beat("node-1")
            world.tick(6)
        assert world.job(uid).phase is JobPhase.FAILED
        assert world.job(uid).attempt_number == 3
        delays = [event.delay_ms for event in world.sent(JobRequeued)]
        assert len(delays) == 2
        assert delays[1] > delays[0] >= 1000

    def test_cancel_of_a_pending_job_is_immediate(self, world: World) -> None:
        uid = world.submit()
        world.cancel(uid)
        assert world.job(uid).phase is JobPhase.CANCELLED

    def test_cancel_of_a_running_job_waits_for_its_processes(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.cancel(uid)
        assert world.job(uid).phase is JobPhase.STOPPING
        assert world.state.nodes["node-1"].allocations
        world.ended("node-1", uid, AttemptOutcome.STOPPED)
        assert (world.job(uid).phase, world.job(uid).cancelled_by) == (JobPhase.CANCELLED, "t")
        assert not world.state.nodes["node-1"].allocations

    def test_cancel_while_a_failed_gang_stops_prevents_another_attempt(self, world: World) -> None:
        uid = four_nodes(world).submit(replicas=4)
        world.run_all(uid)
        nodes = world.nodes_of(uid)
        world.beat(nodes[0], applied=99)  # lost without a word
        world.cancel(uid)
        for node in nodes[1:]:
            world.ended(node, uid, AttemptOutcome.STOPPED)
        assert world.job(uid).phase is JobPhase.CANCELLED

    def test_a_report_after_the_end_changes_nothing(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.cancel(uid)
        world.ended("node-1", uid, AttemptOutcome.STOPPED)
        before = world.job(uid)
        world.ended("node-1", uid, AttemptOutcome.SUCCEEDED, model=ModelReference(name="job", version=1))
        world.cancel(uid)
        assert world.job(uid) == before

    def test_running_longer_than_max_runtime_fails_with_deadline(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit(maxRuntime="10s")
        world.run_all(uid)
        for _ in range(6):
            world.beat("node-1", world.progress(uid), after_ms=2000)
        assert world.stops(uid)[0].reason == "DeadlineExceeded"
        world.ended("node-1", uid, AttemptOutcome.STOPPED)
        assert (world.job(uid).phase, world.job(uid).reason) == (JobPhase.FAILED, "DeadlineExceeded")

    def test_a_gang_that_never_runs_is_stopped_and_tried_again(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        for _ in range(START_TIMEOUT_MS // 2000 + 1):
            world.beat("node-1", world.progress(uid, AttemptPhase.PREPARING, 0), after_ms=2000)
        assert world.stops(uid)[0].reason == "StartTimeout"
        world.ended("node-1", uid, AttemptOutcome.STOPPED)
        assert world.sent(AttemptFinished)[0].failure_class == "StartFailed"
        assert world.job(uid).unschedulable is UnschedulableReason.BACKOFF


class TestLeases:
    def test_a_silent_node_is_lost_and_its_gang_moves(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.agent("node-2")
        for _ in range(6):
            world.alive("node-2")
        assert [alert.node for alert in world.sent(NodeLost)] == ["node-1"]
        world.alive("node-2")
        assert world.nodes_of(uid) == ["node-2"]
        assert world.job(uid).lease_epoch == 2

    def test_a_ghost_that_comes_back_is_stopped_and_its_devices_wait_for_it(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        old = world.progress(uid, AttemptPhase.PAUSED, 0)
        world.agent("node-2")
        for _ in range(8):
            world.alive("node-2")
        other = world.submit("other")
        assert world.job(other).phase is JobPhase.PENDING
        world.beat("node-1", old)
        assert world.sent(NodeRecovered)
        assert world.stops(uid)[-1].reason == "UnknownAttempt"
        assert world.job(other).phase is JobPhase.PENDING  # the ghost still holds the device
        world.beat("node-1")
        assert world.nodes_of(other) == ["node-1"]
        assert world.nodes_of(uid) == ["node-2"]

    def test_a_broker_outage_expires_nothing(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.put(tick_of(world), after_ms=3_600_000)  # an hour passes on the broker's clock, in one record
        assert world.state.nodes["node-1"].alive
        assert world.job(uid).phase is JobPhase.RUNNING

    def test_a_backlog_of_commands_read_before_the_heartbeats_expires_nothing(self, world: World) -> None:
        """After a takeover an hour of submissions may be read before the first heartbeat of that hour."""
        world.agent("node-1")
        uid = world.submit("held")
        world.run_all(uid)
        for number in range(30):
            world.now += 2_000
            world.submit(f"late-{number}", gpu=64)
        assert world.job(uid).phase is JobPhase.RUNNING
        assert not world.sent(NodeLost)
        world.tick(9)
        assert world.job(uid).phase is JobPhase.RUNNING
        world.tick(3)
        assert world.sent(NodeLost), "silence on the reports' own topic is silence"

    def test_a_clock_that_jumps_back_moves_nothing_back(self, world: World) -> None:
        world.agent("node-1")
        before = world.state.clock.now_ms
        world.put(tick_of(world), after_ms=-3_600_000)
        assert world.state.clock.now_ms == before

    def test_time_goes_on_after_a_clock_that_jumped_ahead_was_set_back(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.put(tick_of(world), after_ms=3_600_000)
        world.put(tick_of(world), after_ms=-3_600_000)
        world.tick(6)
        assert world.state.nodes["node-1"].alive
        world.tick(6)
        assert world.sent(NodeLost), "its silence is noticed in time, not an hour later"

    def test_a_paused_part_is_told_to_resume_for_the_heartbeat_that_said_so(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        sequence = world.offset
        world.beat("node-1", world.progress(uid, AttemptPhase.PAUSED, 0))
        assert world.sent(ResumeAttempt)[0].heartbeat_sequence == sequence
        world.beat("node-1", world.progress(uid, AttemptPhase.PAUSED, 0))
        assert len(world.sent(ResumeAttempt)) == 1
        world.beat("node-1", world.progress(uid))
        assert world.status(uid).replicas_running == 1

    def test_a_restarted_agent_without_the_attempt_loses_it_at_once(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.agent("node-1", incarnation="2")
        assert world.job(uid).unschedulable is UnschedulableReason.BACKOFF
        world.tick(2)
        assert world.starts(uid)[-1].incarnation == "2"
        assert world.starts(uid)[-1].command_seq == 1

    def test_a_restarted_agent_that_adopts_goes_on(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.agent("node-1", incarnation="2", adopted=(world.progress(uid),))
        world.beat("node-1", world.progress(uid), incarnation="2", applied=0)
        assert world.job(uid).phase is JobPhase.RUNNING
        assert world.job(uid).attempt_number == 1

    def test_a_scheduler_that_knew_nothing_of_a_node_numbers_commands_above_what_its_agent_applied(self, world: World) -> None:
        world.agent("node-1", applied_seq=37)
        uid = world.submit()
        assert world.starts(uid)[-1].command_seq == 38
        world.beat("node-1", applied=37, after_ms=1000)  # not applied yet, so not missing
        assert world.job(uid).phase is JobPhase.STARTING
        world.agent("node-2", applied_seq=2**53 - 1)  # whatever an agent says, numbers stay numbers
        assert world.starts(world.submit("other"))[-1].command_seq == 2**52 + 1

    def test_heartbeats_of_a_former_incarnation_are_void(self, world: World) -> None:
        world.agent("node-1", incarnation="2")
        uid = world.submit()
        world.beat("node-1", incarnation="1")
        assert world.job(uid).phase is JobPhase.STARTING

    def test_an_unapplied_command_is_sent_again_with_its_number(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        for _ in range(3):
            world.beat("node-1", applied=0, after_ms=2000)
        starts = world.starts(uid)
        assert len(starts) == 2
        assert {start.command_seq for start in starts} == {1}
        assert starts[1].valid_until_ms > starts[0].valid_until_ms

    def test_heartbeats_that_queued_up_repeat_a_command_ever_less_often(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        for _ in range(60):
            world.beat("node-1", applied=0, after_ms=2000)
        assert len(world.starts(uid)) == 5, "at once, and after 4, 12, 28 and 60 s"

    def test_an_applied_command_whose_attempt_is_missing_is_lost(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.beat("node-1", applied=1)
        assert world.job(uid).unschedulable is UnschedulableReason.BACKOFF
        assert world.job(uid).failures_infrastructure == 1

    def test_what_its_agent_never_took_up_is_placed_again_and_counts_against_nobody(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.beat("node-1", applied=1)  # read, and found void or without a lease
        assert world.job(uid).unschedulable is UnschedulableReason.BACKOFF
        assert world.job(uid).failures_infrastructure == 0
        assert "before it had begun" in world.job(uid).message

    def test_a_heartbeat_sent_before_the_end_was_acknowledged_is_no_ghost(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        listed = world.progress(uid)
        world.ended("node-1", uid)
        world.beat("node-1", listed)  # on its way when the end was reported
        assert world.stops(uid) == []
        assert world.job(world.submit("next")).phase is JobPhase.STARTING
        assert world.state.nodes["node-1"].ended == ((uid, 1, 1),)
        world.alive("node-1")
        assert world.state.nodes["node-1"].ended == ()

    def test_an_end_reported_under_another_lease_frees_and_decides_nothing(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        before, held = world.state.attempts[uid], world.state.nodes["node-1"].allocations
        world.ended("node-1", uid, lease_epoch=7)
        assert world.state.attempts[uid] == before
        assert world.state.nodes["node-1"].allocations == held
        world.beat("node-1", world.progress(uid, global_step=5))  # the report has not made its heartbeats look late either
        assert world.state.attempts[uid].training.global_step == 5

    def test_an_attempt_listed_under_another_lease_is_stopped_and_the_live_one_is_missing(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.run_all(uid)
        world.beat("node-1", world.progress(uid, lease_epoch=7))
        told = world.stops(uid)[-1]
        assert (told.reason, told.lease_epoch) == ("UnknownAttempt", 7)
        assert world.job(uid).unschedulable is UnschedulableReason.BACKOFF  # lost, to be tried again
        assert [held.lease_epoch for held in world.state.nodes["node-1"].allocations] == [7]  # its place is held until it is gone
        world.beat("node-1")
        assert world.state.nodes["node-1"].allocations == ()

    def test_a_heartbeat_from_an_unknown_node_is_ignored(self, world: World) -> None:
        world.beat("nobody")
        assert world.state.nodes == {}


class TestReasons:
    def test_every_reason_in_its_order(self, world: World) -> None:
        uid = world.submit(replicas=2)
        assert world.job(uid).unschedulable is UnschedulableReason.NO_NODES
        world.agent("node-1")
        assert world.job(uid).unschedulable is UnschedulableReason.TOO_LARGE
        world.put(CordonNode(pool="default", node="node-1", requested_by="t"))
        world.agent("node-2")
        assert world.job(uid).unschedulable is UnschedulableReason.CORDONED
        other = world.submit("other")
        assert world.nodes_of(other) == ["node-2"]
        world.put(UncordonNode(pool="default", node="node-1", requested_by="t"))
        assert world.job(uid).unschedulable is UnschedulableReason.INSUFFICIENT_CAPACITY
        world.run_all(other)
        world.ended("node-2", other)
        assert world.job(uid).phase is JobPhase.STARTING

    def test_a_job_submitted_behind_a_blocked_one_gets_its_reason_at_once(self, world: World) -> None:
        world.agent("node-1")
        uids = [world.submit(f"job-{i}") for i in range(200)]
        world.tick()
        reasons = {world.job(uid).unschedulable for uid in uids[1:]}
        assert reasons == {UnschedulableReason.INSUFFICIENT_CAPACITY}

    def test_explain_says_what_is_needed_what_is_free_and_the_position(self, world: World) -> None:
        world.agent("node-1")
        world.agent("node-2")
        world.submit("running")
        world.submit("ahead", replicas=2)
        uid = world.submit("wanted", replicas=2)
        before = world.state.hash()
        answer = explain_job(world.state, uid)
        assert answer is not None
        assert answer["text"].startswith("needs 2 × (1 GPU, 1 CPU, 1 GiB); pool default has 1 free GPUs, 3 CPU")
        assert answer["position"] == 2
        assert [node["node"] for node in list_nodes(world.state)] == ["node-1", "node-2"]
        assert world.state.hash() == before

    def test_explain_where_there_was_never_a_node(self, world: World) -> None:
        answer = explain_job(world.state, world.submit("early"))
        assert answer is not None
        assert (answer["reason"], answer["position"]) == ("NoNodes", 1)
        assert "pool default has no live node; start an agent with OPENTINKER_AGENT__POOL=default" in answer["text"]

    def test_explain_names_the_nodes_that_lack_one_thing(self, world: World) -> None:
        world.agent("node-1", gpus=1, cpu=2)
        world.submit("no-gpu", gpu=0, cpu=2)
        answer = explain_job(world.state, world.submit("wanted", gpu=1, cpu=1))
        assert answer is not None
        assert answer["text"].endswith("room for 0 of its 1 replicas; node-1 has 1 free GPU but 0 CPU left")

    def test_nodes_that_are_away_are_no_reason_to_ask_for_less(self, world: World) -> None:
        for number in (1, 2, 3):
            world.agent(f"node-{number}")
        world.beat("node-1", stopping=True)
        uid = world.submit(replicas=3)
        assert world.job(uid).unschedulable is UnschedulableReason.NODES_AWAY
        answer = explain_job(world.state, uid)
        assert answer is not None
        assert answer["text"] == "needs 3 × (1 GPU, 1 CPU, 1 GiB); it would fit pool default if these were there: node-1 (Stopped)"
        world.agent("node-1", incarnation="2")
        assert world.job(uid).phase is JobPhase.STARTING

    def test_latency_counts_from_the_input_that_freed_capacity(self, world: World) -> None:
        world.agent("node-1")
        first = world.submit("a")
        second = world.submit("b")
        world.run_all(first)
        world.tick(8)
        world.ended("node-1", first)
        placed = [event for event in world.sent(AttemptPlaced) if event.job_uid == second]
        assert placed[0].scheduling_latency_ms == 0


class TestTables:
    def test_terminal_phases_have_no_exits(self) -> None:
        assert not [phase for phase, _ in JOB_MOVES if phase.terminal]
        assert not [phase for phase, _ in PART_MOVES if phase in PART_OVER]

    def test_an_illegal_move_raises_and_changes_nothing(self, world: World) -> None:
        with pytest.raises(IllegalMoveError, match="a job that is Completed cannot place"):
            move_job(JobPhase.COMPLETED, JobMove.PLACE)

    def test_a_defect_inside_a_step_takes_everything_back(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        world.agent("node-1")
        before = world.state.hash()

        def broken(*_: object, **__: object) -> None:
            raise IllegalMoveError("on purpose")

        monkeypatch.setattr(Effects, "start_command", broken)
        with pytest.raises(IllegalMoveError):
            world.submit()
        assert world.state.hash() == before
        assert world.state.free["node-1"].devices == (0,)


def tick_of(world: World) -> Tick:
    return Tick(partition=0, worker="w", sequence=world.offset, sent_ms=0)


class TestProgress:
    def test_a_new_attempt_begins_at_the_checkpoint_and_counts_steps_once(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.beat("node-1", world.progress(uid, global_step=900, checkpoint_step=600, checkpoint_id="c", episodes=9, mean_return=20.0))
        world.ended("node-1", uid, AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE, global_step=950)
        assert world.status(uid).progress.global_step == 950
        world.tick(3)
        assert world.job(uid).attempt_number == 2
        assert world.status(uid).progress.global_step == 600
        world.beat("node-1", world.progress(uid, global_step=700))
        assert world.status(uid).progress.global_step == 700

    def test_an_older_report_of_the_same_attempt_does_not_turn_progress_back(self, world: World) -> None:
        world.agent("node-1")
        uid = world.submit()
        world.beat("node-1", world.progress(uid, global_step=900))
        world.beat("node-1", world.progress(uid, global_step=800))
        assert world.status(uid).progress.global_step == 900


class TestBounds:
    def test_one_step_places_a_bounded_number_of_commands_and_the_next_goes_on(self, world: World) -> None:
        world.agent("node-1", gpus=1, cpu=1000)
        blocker = world.submit("blocker")
        waiting = [world.submit(f"job-{number}", gpu=0, cpu=1) for number in range(3)]
        assert all(world.job(uid).phase is JobPhase.STARTING for uid in waiting)
        queued = [world.submit(f"gpu-{number}") for number in range(200)]
        world.cancel(blocker)
        world.agent("big", gpus=300, cpu=300)

        def placed() -> int:
            return sum(world.job(uid).attempt_number for uid in queued)

        first = placed()
        assert 0 < first < 200
        for _ in range(20):
            world.tick()
        assert placed() == 200
