"""The agent's decisions by value: commands, the lease, pauses, endings."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from opentinker.schemas.messages.placements import Rendezvous, ReplicaAssignment, ResumeAttempt, StartAttempt, StopAttempt, StopReason
from opentinker.schemas.messages.reports import AttemptOutcome, AttemptPhase, FailureClass
from opentinker.trainer_agent.core.actions import Action, BeatNow, DumpStacks, Kill, OpenAttempt, RenewLease, Report, StartReplicas, Terminate
from opentinker.trainer_agent.core.agent import AgentCore, AgentRules
from opentinker.trainer_agent.core.lifecycle import MOVES, IllegalMoveError, Move, Phase, move
from opentinker.trainer_agent.core.parts import Key, Part, Replica, key_of
from opentinker.trainer_agent.core.verdict import judge, judge_replica
from opentinker.trainer_agent.protocol import CheckpointCommitted, Hello, ProgressReport, Ready, Stopped, TrainerOutcome

S = 1_000_000_000
JOB = "11111111-1111-1111-1111-111111111111"
RULES = AgentRules(node="node-1", incarnation="0001-a", pool="default", lease_ns=10 * S, margin_ns=3 * S, hold_ns=600 * S, progress_ns=1800 * S)
READY = Ready(transport="solo", global_step=0, resume="fresh", weights_sha256="", effective={})
DONE = Stopped(outcome=TrainerOutcome.SUCCEEDED, stop_reason="RewardThreshold", global_step=640, episodes=9, mean_return=480.0)


class World:
    """A core with a clock and a scheduler's numbering."""

    def __init__(self) -> None:
        self.core, self.now, self.seq = AgentCore(RULES), 100 * S, count(1)
        self.beat()

    def beat(self) -> list[Action]:
        self.core.heartbeat()
        return self.core.heartbeat_acknowledged(self.now, self.now)

    def tell(self, command: StartAttempt | StopAttempt | ResumeAttempt, broker_ms: int = 0) -> list[Action]:
        return self.core.command(command, now_ns=self.now, broker_ms=broker_ms)

    def common(self, **changes: Any) -> dict[str, Any]:
        known = {"node": "node-1", "incarnation": "0001-a", "command_seq": next(self.seq), "job_uid": JOB, "namespace": "default", "name": "job"}
        return known | {"attempt_number": 1, "lease_epoch": 1, "valid_until_ms": 1000} | changes

    def start(self, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> StartAttempt:
        return StartAttempt(
            **self.common(**changes),
            replicas=tuple(ReplicaAssignment(rank=rank, devices=(rank,)) for rank in ranks),
            world_size=2, cpu_millis=1000, memory_bytes=2**30, rendezvous=Rendezvous(address="127.0.0.1", port=29500), seed=1, spec={},
            spec_digest="sha256:" + "0" * 64, model="job",
        )  # fmt: skip

    def stop(self, **changes: Any) -> StopAttempt:
        return StopAttempt(**self.common(**changes), reason=StopReason.CANCELLED, grace_s=30)

    def resume(self, heartbeat: int, **changes: Any) -> ResumeAttempt:
        return ResumeAttempt(**self.common(**changes), heartbeat_sequence=heartbeat)

    def running(self, ranks: tuple[int, ...] = (0, 1)) -> Key:
        command = self.start(ranks)
        key = key_of(command)
        self.tell(command)
        self.core.opened(key)
        for rank in ranks:
            self.core.replica_started(key, rank)
            self.core.event(key, rank, READY, self.now)
        assert self.part.phase is Phase.RUNNING
        return key

    @property
    def part(self) -> Part:
        (part,) = self.core.parts
        return part

    def gone(self, key: Key, rank: int, code: int, word: Stopped | None = None) -> list[Action]:
        return self.core.replica_gone(key, rank, code, self.now, word)


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions]


def report_of(actions: list[Action]) -> Any:
    (found,) = [action.report for action in actions if isinstance(action, Report)]
    return found


def test_an_attempt_is_opened_then_started_then_runs_when_every_replica_is_ready() -> None:
    world = World()
    command = world.start()
    assert kinds(world.tell(command)) == [OpenAttempt, BeatNow]
    assert kinds(world.core.opened(key_of(command))) == [StartReplicas]
    for rank in (0, 1):
        assert world.core.replica_started(key_of(command), rank) == []
    assert world.core.event(key_of(command), 0, READY, world.now) == []
    assert world.part.phase is Phase.PREPARING
    assert kinds(world.core.event(key_of(command), 1, READY, world.now)) == [BeatNow]
    (listed,) = world.core.heartbeat().attempts
    assert (listed.phase, listed.replicas_running) == (AttemptPhase.RUNNING, 2)


def test_commands_for_others_change_nothing_and_are_not_counted() -> None:
    world = World()
    for changes in ({"node": "node-2"}, {"incarnation": "0000-z"}):
        assert world.tell(world.start(**changes)) == []
    assert (world.core.parts, world.core.applied_seq) == ((), 0)


def test_a_command_seen_before_changes_nothing() -> None:
    world = World()
    command = world.start()
    world.tell(command)
    assert world.tell(command) == []
    assert len(world.core.parts) == 1


def test_a_void_command_counts_as_applied_and_its_absence_is_told() -> None:
    world = World()
    assert kinds(world.tell(world.start(), broker_ms=1001)) == [BeatNow]
    assert (world.core.parts, world.core.applied_seq) == ((), 1)


def test_applied_seq_counts_only_what_has_no_hole_before_it() -> None:
    world = World()
    first, second, third = world.start(), world.start(job_uid=JOB.replace("1", "2")), world.start(job_uid=JOB.replace("1", "3"))
    world.tell(third)
    world.tell(second)
    assert world.core.applied_seq == 0
    world.tell(first)
    assert world.core.applied_seq == 3


def test_one_attempt_of_a_job_at_a_time_and_the_older_one_gives_way() -> None:
    world = World()
    world.running()
    actions = world.tell(world.start(attempt_number=2, lease_epoch=2))
    assert Terminate in kinds(actions)
    assert OpenAttempt not in kinds(actions)
    assert world.part.command.attempt_number == 1
    world = World()
    world.running()
    assert kinds(world.tell(world.start(attempt_number=1, lease_epoch=1))) == [BeatNow]
    assert world.part.phase is Phase.RUNNING


def test_the_lease_runs_from_the_sending_of_the_acknowledged_heartbeat() -> None:
    world = World()
    key = world.running()
    sent = world.now
    world.now += 2 * S
    assert world.core.heartbeat_acknowledged(sent, world.now) == [RenewLease(key, sent + 7 * S)]
    assert world.core.lease_holds(sent + 7 * S - 1)
    assert not world.core.lease_holds(sent + 7 * S)


def test_an_older_acknowledgement_does_not_shorten_the_lease_and_a_late_one_renews_nothing() -> None:
    world = World()
    world.running()
    until = world.core.lease_until_ns
    world.core.heartbeat_acknowledged(world.now - 5 * S, world.now)
    assert world.core.lease_until_ns == until
    world.now += 30 * S
    assert world.core.heartbeat_acknowledged(world.now - 8 * S, world.now) == []


def test_past_the_lease_everything_pauses_and_a_renewed_lease_alone_does_not_go_on() -> None:
    world = World()
    world.running()
    world.now += 7 * S
    assert kinds(world.core.tick(world.now)) == [BeatNow]
    assert world.part.phase is Phase.PAUSED
    assert world.beat() == [], "a paused part is not told that it may go on"
    assert world.core.heartbeat().attempts[0].phase is AttemptPhase.PAUSED


def test_resume_counts_only_in_answer_to_a_heartbeat_sent_after_the_pause_began() -> None:
    world = World()
    key = world.running()
    before = world.core.sequence
    world.now += 7 * S
    world.core.tick(world.now)
    world.beat()
    assert kinds(world.tell(world.resume(before))) == [BeatNow]
    assert world.part.phase is Phase.PAUSED
    assert RenewLease(key, world.core.lease_until_ns) in world.tell(world.resume(world.core.sequence))
    assert world.part.phase is Phase.RUNNING


def test_resume_is_not_obeyed_when_the_lease_is_over_again() -> None:
    world = World()
    world.running()
    world.now += 7 * S
    world.core.tick(world.now)
    world.beat()
    world.now += 8 * S
    world.tell(world.resume(world.core.sequence))
    assert world.part.phase is Phase.PAUSED


def test_a_start_that_was_paused_while_opening_starts_its_processes_once() -> None:
    world = World()
    command = world.start()
    world.tell(command)
    world.now += 7 * S
    world.core.tick(world.now)
    assert world.core.opened(key_of(command)) == [], "nothing starts without a lease"
    world.beat()
    assert kinds(world.tell(world.resume(world.core.sequence))).count(StartReplicas) == 1
    world.now += 7 * S
    world.core.tick(world.now)
    world.beat()
    assert StartReplicas not in kinds(world.tell(world.resume(world.core.sequence)))
    assert world.part.phase is Phase.PREPARING


def test_a_pause_that_nobody_ends_ends_the_part() -> None:
    world = World()
    key = world.running()
    world.now += 7 * S
    world.core.tick(world.now)
    world.now += 601 * S
    assert Terminate in kinds(world.core.tick(world.now))
    world.gone(key, 0, 10, Stopped(outcome=TrainerOutcome.STOPPED))
    report = report_of(world.gone(key, 1, 10))
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE)


def test_what_was_stopped_in_a_pause_gets_no_lease() -> None:
    world = World()
    world.running()
    world.now += 7 * S
    world.core.tick(world.now)
    world.tell(world.stop())
    assert world.part.phase is Phase.STOPPING
    assert world.beat() == []


def test_stop_is_term_then_kill_after_the_grace_and_ends_when_all_are_gone() -> None:
    world = World()
    key = world.running()
    assert kinds(world.tell(world.stop())) == [Terminate, BeatNow]
    world.beat()
    world.now += 29 * S
    assert Kill not in kinds(world.core.tick(world.now))
    world.now += 1 * S
    assert Kill in kinds(world.core.tick(world.now))
    assert Kill not in kinds(world.core.tick(world.now + 1)), "once is enough"
    assert world.gone(key, 0, -9) == []
    assert world.core.heartbeat().attempts[0].phase is AttemptPhase.STOPPING, "its devices are not free yet"
    report = report_of(world.gone(key, 1, -9))
    assert (report.outcome, report.exit_codes) == (AttemptOutcome.STOPPED, {0: -9, 1: -9})


def test_an_attempt_is_listed_until_its_report_is_acknowledged() -> None:
    world = World()
    key = world.running((0,))
    world.gone(key, 0, 0, DONE)
    assert len(world.core.heartbeat().attempts) == 1
    assert kinds(world.core.report_acknowledged(key)) == [BeatNow]
    assert world.core.heartbeat().attempts == ()


def test_success_carries_what_rank_0_said() -> None:
    world = World()
    key = world.running()
    world.gone(key, 1, 0, DONE)
    report = report_of(world.gone(key, 0, 0, DONE))
    assert (report.outcome, report.stop_reason, report.global_step, report.mean_return) == (AttemptOutcome.SUCCEEDED, "RewardThreshold", 640, 480.0)
    assert report.ranks == (0, 1)


def test_a_replica_that_fails_takes_its_peers_with_it_and_the_telling_reason_is_reported() -> None:
    world = World()
    key = world.running()
    actions = world.gone(key, 1, 30, Stopped(outcome=TrainerOutcome.INFRASTRUCTURE, message="replica 0 died"))
    assert kinds(actions) == [Terminate, BeatNow]
    report = report_of(world.gone(key, 0, 20, Stopped(outcome=TrainerOutcome.USER_ERROR, message="the environment raised ZeroDivisionError")))
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.USER_ERROR)
    assert "ZeroDivisionError" in report.message


def test_a_stop_while_the_fence_is_raised_starts_nothing() -> None:
    world = World()
    command = world.start()
    world.tell(command)
    world.tell(world.stop())
    assert world.part.phase is Phase.STOPPING
    actions = world.core.opened(key_of(command))
    assert StartReplicas not in kinds(actions)
    assert report_of(actions).outcome is AttemptOutcome.STOPPED


def test_a_stop_while_processes_are_made_reaches_them_too() -> None:
    world = World()
    command = world.start()
    key = key_of(command)
    world.tell(command)
    world.core.opened(key)
    actions = world.tell(world.stop())
    assert not any(isinstance(action, Report) for action in actions), "processes are on their way"
    assert world.core.replica_started(key, 0) == [Terminate(key)]
    world.core.replica_started(key, 1)
    world.gone(key, 0, -15)
    assert report_of(world.gone(key, 1, -15)).outcome is AttemptOutcome.STOPPED


def test_no_fence_no_start() -> None:
    world = World()
    command = world.start()
    world.tell(command)
    report = report_of(world.core.failed(key_of(command), FailureClass.START_FAILED, "fenced", world.now))
    assert (report.outcome, report.failure_class, report.message) == (AttemptOutcome.FAILED, FailureClass.START_FAILED, "fenced")


def test_a_process_that_cannot_be_made_ends_the_part_with_its_peers() -> None:
    world = World()
    command = world.start()
    key = key_of(command)
    world.tell(command)
    world.core.opened(key)
    world.core.replica_started(key, 0)
    assert Terminate in kinds(world.core.replica_not_started(key, 1, "no memory", world.now))
    report = report_of(world.gone(key, 0, -15))
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.UNAVAILABLE)


def test_an_adopted_part_waits_for_resume() -> None:
    first = World()
    key = first.running()
    world = World()
    world.core.adopt(Part(command=first.part.command, replicas=tuple(Replica(rank=rank, devices=(), started=True) for rank in (0, 1))), world.now)
    for rank in (0, 1):
        world.core.event(key, rank, READY, world.now)
    assert world.part.phase is Phase.PAUSED
    assert world.beat() == []
    world.tell(world.resume(world.core.sequence))
    assert world.part.phase is Phase.RUNNING


def test_progress_and_checkpoints_reach_the_heartbeat() -> None:
    world = World()
    key = world.running()
    world.core.event(key, 0, ProgressReport(global_step=64, mean_return=21.5, episodes=3), world.now)
    world.core.event(key, 1, ProgressReport(global_step=1, mean_return=1.0), world.now)
    world.core.event(key, 0, CheckpointCommitted(checkpoint_id="c", global_step=64), world.now)
    (listed,) = world.core.heartbeat().attempts
    assert (listed.global_step, listed.mean_return, listed.episodes, listed.checkpoint_id, listed.checkpoint_step) == (64, 21.5, 3, "c", 64)


def test_a_trainer_that_says_hello_is_told_the_lease_only_while_it_holds() -> None:
    world = World()
    key = world.running()
    hello = Hello(job_uid=JOB, attempt_number=1, rank=0, pid=1, start_ticks=1, boot_id="", token_sha256="")
    assert kinds(world.core.event(key, 0, hello, world.now)) == [RenewLease]
    world.now += 7 * S
    assert world.core.event(key, 0, hello, world.now) == []


def test_a_part_that_lives_without_progress_is_asked_where_it_is_and_ended() -> None:
    """A heartbeat is no progress; a later step is, and a pause does not count."""
    world = World()
    key = world.running()

    def later(seconds: int) -> list[Action]:
        world.now += seconds * S
        world.beat()
        return world.core.tick(world.now)

    world.core.event(key, 0, ProgressReport(global_step=100), world.now)
    assert later(1700) == []
    world.core.event(key, 0, ProgressReport(global_step=101), world.now)
    assert later(1700) == []
    world.core.event(key, 0, ProgressReport(global_step=101), world.now)
    ended = later(101)
    assert kinds(ended) == [DumpStacks, Terminate, BeatNow]
    world.gone(key, 0, -9)
    report = report_of(world.gone(key, 1, -9))
    assert (report.outcome, report.failure_class, report.global_step) == (AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE, 101)
    assert "no progress for 1800 s, at step 101" in report.message


def test_an_agent_that_ends_stops_everything() -> None:
    world = World()
    world.running()
    assert Terminate in kinds(world.core.stop_all(world.now, 12))
    assert world.part.told_to_stop


def _replica(word: TrainerOutcome | None, code: int, *, ready: bool = True, killed: bool = False) -> Replica:
    last = None if word is None else Stopped(outcome=word, message=word.value)
    return Replica(rank=0, devices=(), started=True, ready=ready, killed=killed, exit_code=code, last_word=last)


@pytest.mark.parametrize(
    ("replica", "outcome", "failure"),
    [
        (_replica(TrainerOutcome.SUCCEEDED, 0), AttemptOutcome.SUCCEEDED, None),
        (_replica(None, 0), AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE),  # exit 0 alone is no success
        (_replica(None, -9), AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE),
        (_replica(None, -9, ready=False), AttemptOutcome.FAILED, FailureClass.START_FAILED),
        (_replica(None, -9, killed=True), AttemptOutcome.STOPPED, None),
        (_replica(None, 20), AttemptOutcome.FAILED, FailureClass.USER_ERROR),
        (_replica(TrainerOutcome.USER_ERROR, 20, ready=False), AttemptOutcome.FAILED, FailureClass.USER_ERROR),
        (_replica(TrainerOutcome.OUT_OF_MEMORY, 21), AttemptOutcome.FAILED, FailureClass.OUT_OF_MEMORY),
        (_replica(TrainerOutcome.NON_FINITE, 22), AttemptOutcome.FAILED, FailureClass.NON_FINITE),
        (_replica(None, 1), AttemptOutcome.FAILED, FailureClass.USER_ERROR),  # os._exit() in an environment
        (_replica(None, 1, ready=False), AttemptOutcome.FAILED, FailureClass.START_FAILED),
        (_replica(TrainerOutcome.STOPPED, 10), AttemptOutcome.STOPPED, None),
    ],
)
def test_how_a_process_ended_decides_the_class(replica: Replica, outcome: AttemptOutcome, failure: FailureClass | None) -> None:
    verdict = judge_replica(replica)
    assert (verdict.outcome, verdict.failure_class) == (outcome, failure)


def test_a_success_that_was_told_to_stop_meanwhile_is_a_success() -> None:
    part = Part(command=World().start((0,)), replicas=(_replica(TrainerOutcome.SUCCEEDED, 0),), told_to_stop=True)
    assert judge(part).outcome is AttemptOutcome.SUCCEEDED
    assert judge(replace(part, replicas=(_replica(TrainerOutcome.INFRASTRUCTURE, 30),))).outcome is AttemptOutcome.STOPPED


def test_the_table_has_one_way_out_of_life_and_none_back() -> None:
    assert not [moved for (phase, _), moved in MOVES.items() if phase is Phase.ENDED]
    assert {phase for (phase, by) in MOVES if by is Move.ALL_GONE} == set(Phase) - {Phase.ENDED}
    with pytest.raises(IllegalMoveError, match="Ended cannot move by 'stop'"):
        move(Phase.ENDED, Move.STOP)
