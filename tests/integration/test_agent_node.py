"""One agent with real trainers on the real broker: starts, stops, leases, crashes. The test plays the scheduler and the registry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import pytest_asyncio
from agent_world import AgentWorld, agent_world
from opentinker.schemas.messages.reports import AgentStarted, AttemptEnded, AttemptOutcome, AttemptPhase, FailureClass, Heartbeat
from opentinker.schemas.messages.training import LogLines, TrainingMetrics

if TYPE_CHECKING:
    from own_stack import Stack

pytestmark = pytest.mark.slow


def _proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


ENDLESS = {"stop": {"totalSteps": 10**9}, "checkpoint": {"every": "1s"}}


@pytest_asyncio.fixture
async def world(stack: Stack, tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(stack, tmp_path) as world:
        yield world


async def test_an_attempt_runs_to_success_with_metrics_logs_checkpoint_and_report(world: AgentWorld) -> None:
    started = await world.start_agent()
    assert started.pool == world.pool
    assert [(device.index, device.simulated) for device in started.capacity.devices] == [(0, True), (1, True)]
    assert (started.capacity.cpu_millis, started.capacity.memory_bytes, started.adopted) == (4000, 8 * 2**30, ())
    await world.start_attempt((0, 1), stop={"totalSteps": 6400})
    report = await world.until_ended()
    assert report.outcome is AttemptOutcome.SUCCEEDED, report
    assert (report.stop_reason, report.global_step, report.ranks, report.exit_codes) == ("TotalSteps", 6400, (0, 1), {0: 0, 1: 0})
    assert report.model is not None
    assert (report.model.name, report.model.version) == ("cartpole", 1)
    begun, committed = world.registry.committed[str(report.checkpoint_id)]
    assert (begun.global_step, committed.final, committed.outcome, committed.stop_reason) == (6400, True, "Succeeded", "TotalSteps")
    assert committed.lineage["effective"]["hyperparameters"]["num_envs"] == 4
    state = json.loads(world.registry.files_of(str(report.checkpoint_id))["state.json"])
    assert state["updates"] * 32 == 6400 * 2
    await world.until_phase(None)
    await world.until(lambda: {sample.replica_rank for sample in world.mine(TrainingMetrics)} == {0, 1}, 10)
    sample = next(sample for sample in world.mine(TrainingMetrics) if sample.replica_rank == 0)
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "env_steps_per_s", "learning_rate", "memory_bytes"} <= set(sample.values)
    assert not list((world.directory / "parts").glob("*"))


async def test_the_agent_is_small_and_its_trainers_inherit_no_secret(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt(**ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    assert world.process is not None
    assert psutil.Process(world.process.pid).memory_info().rss < 150 * 2**20, "torch must not be in it"
    assert b"torch" not in _proc(world.process.pid, "maps")
    (pid,) = world.trainer_pids()
    environment = _proc(pid, "environ")
    assert b"must-not-leak" not in environment
    assert [name for name in environment.split(b"\0") if name.startswith(b"OPENTINKER_") and not name.startswith(b"OPENTINKER_PART=")] == []
    assert b"CUDA_VISIBLE_DEVICES=\0" in environment, "simulated devices are not there"
    command_line = _proc(pid, "cmdline")
    assert not any(token.encode() in environment + command_line for token in world.registry.tokens)
    assert os.getsid(pid) == pid


async def test_a_stop_checkpoints_and_ends_the_processes(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt((0, 1), **ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    await world.stop_attempt()
    report = await world.until_ended()
    assert (report.outcome, report.exit_codes) == (AttemptOutcome.STOPPED, {0: 10, 1: 10})
    assert report.checkpoint_step == report.global_step > 0
    assert world.registry.committed[str(report.checkpoint_id)][1].outcome is None, "stopped is not succeeded"
    assert world.trainer_pids() == []


async def test_a_new_attempt_goes_on_from_the_committed_checkpoint(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt(**ENDLESS)
    await world.until(lambda: len(world.registry.commit_order) >= 1, 40)
    for pid in world.trainer_pids():
        os.kill(pid, signal.SIGKILL)
    report = await world.until_ended()
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE)
    checkpoint = str(world.registry.newest(world.job_uid))
    step = world.registry.committed[checkpoint][0].global_step
    await world.until_phase(None)
    await world.start_attempt(number=2, **ENDLESS)
    await world.until(lambda: any(sample.attempt_number == 2 for sample in world.mine(TrainingMetrics)), 40)
    first = next(sample for sample in world.mine(TrainingMetrics) if sample.attempt_number == 2)
    ready = [json.loads(line) for line in world.agent_log().splitlines() if '"trainer ready"' in line]
    assert [(entry["resume"], entry["global_step"]) for entry in ready] == [("fresh", 0), ("exact", step)]
    assert first.global_step > step > 0


async def test_an_error_of_the_users_environment_is_told_as_such_and_in_the_log(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt((0, 1), environment="NoSuchGame-v1")
    report = await world.until_ended()
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.USER_ERROR)
    assert "NoSuchGame" in report.message
    await world.until(lambda: any("NoSuchGame" in line for lines in world.mine(LogLines) for line in lines.lines), 10)


HANGING = """
import gymnasium as gym, time
class Hanging(gym.Wrapper):
    began = 0.0
    def step(self, action):
        Hanging.began = Hanging.began or time.monotonic()
        if time.monotonic() - Hanging.began > 2: self.wait_for_a_robot_that_is_switched_off()
        return self.env.step(action)
    def wait_for_a_robot_that_is_switched_off(self): time.sleep(3600)
gym.register("Hanging-v0", entry_point=lambda: Hanging(gym.make("CartPole-v1").unwrapped))
"""


async def test_a_trainer_that_lives_without_progress_is_ended_and_its_log_shows_where_it_hung(world: AgentWorld, tmp_path: Path) -> None:
    (tmp_path / "hanging_env.py").write_text(HANGING)
    await world.start_agent(OPENTINKER_AGENT__PROGRESS_TIMEOUT_S="3", PYTHONPATH=str(tmp_path))
    await world.start_attempt(environment="hanging_env:Hanging-v0", **ENDLESS)
    report = await world.until_ended()
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE)
    assert report.message.startswith("no progress for 3 s, at step ")
    assert report.global_step > 0
    await world.until(lambda: any("wait_for_a_robot" in line for lines in world.mine(LogLines) for line in lines.lines), 10)


async def test_grandchildren_are_gone_before_the_end_is_reported(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt(**ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    (pid,) = world.trainer_pids()
    # A child of the user's environment that left the process group and session, and ignores SIGTERM.
    environment = dict(pair.split("=", 1) for pair in _proc(pid, "environ").decode().split("\0") if "=" in pair)
    stray = await asyncio.create_subprocess_exec("sh", "-c", "trap '' TERM; sleep 300; true", env=environment, start_new_session=True)
    await world.stop_attempt()
    await world.until_ended()
    assert stray.returncode is not None or await asyncio.wait_for(stray.wait(), 5) < 0


async def test_a_killed_agent_that_comes_back_adopts_its_trainers(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt((0, 1), **ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    pids = sorted(world.trainer_pids())
    await world.kill_agent()
    started = await world.start_agent()
    world.new_incarnation()
    assert [(item.job_uid, item.phase) for item in started.adopted] == [(world.job_uid, AttemptPhase.PAUSED)]
    beat = await world.until_phase(AttemptPhase.PAUSED)
    await world.resume_attempt(beat.sequence)
    beat = await world.until_phase(AttemptPhase.RUNNING)
    assert sorted(world.trainer_pids()) == pids
    before = beat.attempts[0].global_step
    await world.until(lambda: world.mine(Heartbeat)[-1].attempts[0].global_step > before > 0, 20)
    assert len(world.registry.opened) == 1, "adoption opens nothing anew: the trainers keep their token"
    await world.stop_attempt()
    assert (await world.until_ended()).outcome is AttemptOutcome.STOPPED


async def test_what_is_left_of_a_broken_gang_is_ended_before_the_node_is_announced(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt((0, 1), **ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    await world.kill_agent()
    os.kill(world.trainer_pids()[0], signal.SIGKILL)
    started = await world.start_agent()
    assert started.adopted == ()
    assert world.trainer_pids() == []


async def test_a_report_that_was_not_acknowledged_is_sent_by_the_next_incarnation(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt(stop={"totalSteps": 10**9})
    await world.until_phase(AttemptPhase.RUNNING)
    await world.kill_agent()
    journal = json.loads((world.directory / "journal.json").read_text())
    report = AttemptEnded(
        node=world.node, incarnation="0000", pool=world.pool, job_uid=world.job_uid, attempt_number=1, lease_epoch=1, ranks=(0,),
        outcome=AttemptOutcome.SUCCEEDED, stop_reason="TotalSteps",
    )  # fmt: skip
    for pid in world.trainer_pids():
        os.kill(pid, signal.SIGKILL)
    (world.directory / "journal.json").write_text(json.dumps(journal | {"entries": [], "reports": [report.model_dump(mode="json")]}))
    await world.start_agent()
    kinds = [type(message) for message in world.seen if isinstance(message, (AgentStarted, AttemptEnded)) and message.node == world.node]
    assert kinds == [AgentStarted, AttemptEnded, AgentStarted], "before the node is announced, or the attempt would be called lost"
    assert json.loads((world.directory / "journal.json").read_text())["reports"] == []


async def test_a_stopped_agent_stops_its_trainers_with_a_checkpoint(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt(**ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    assert await world.stop_agent() == 0
    report = await world.until_ended(5)
    assert (report.outcome, world.trainer_pids()) == (AttemptOutcome.STOPPED, [])
    assert report.checkpoint_step > 0


async def test_a_frozen_agent_pauses_its_trainers_until_told_to_resume(world: AgentWorld) -> None:
    await world.start_agent(OPENTINKER_AGENT__LEASE_TIMEOUT_S="3", OPENTINKER_AGENT__LEASE_MARGIN_S="1")
    await world.start_attempt(**ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    assert world.process is not None
    world.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(3.5)  # the lease is over: no commit, no step
    commits = len(world.registry.commit_order)
    (pid,) = world.trainer_pids()
    cpu = psutil.Process(pid).cpu_times()
    await asyncio.sleep(2)
    later = psutil.Process(pid).cpu_times()
    assert len(world.registry.commit_order) == commits
    assert later.user + later.system - cpu.user - cpu.system < 0.5, "it sleeps"
    world.process.send_signal(signal.SIGCONT)
    beat = await world.until_phase(AttemptPhase.PAUSED)
    await world.resume_attempt(beat.sequence)
    beat = await world.until_phase(AttemptPhase.RUNNING)
    await world.until(lambda: len(world.registry.commit_order) > commits, 20)


async def test_a_fenced_attempt_is_not_started(world: AgentWorld) -> None:
    await world.start_agent()
    world.registry.fence[world.job_uid] = (7, 7)
    await world.start_attempt()
    report = await world.until_ended()
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.START_FAILED)
    assert world.trainer_pids() == []


async def test_a_registry_that_is_away_for_a_moment_delays_a_start_and_a_commit(world: AgentWorld) -> None:
    await world.start_agent()
    failures = iter([503, 500, 503])
    world.registry.fault = lambda method, path: next(failures, None)
    await world.start_attempt(stop={"totalSteps": 1280})
    report = await world.until_ended()
    assert report.outcome is AttemptOutcome.SUCCEEDED
    assert next(failures, "used up") == "used up"


async def test_a_full_disk_starts_nothing_and_ends_nothing_that_runs(world: AgentWorld) -> None:
    """What the agent cannot write down it does not run, and it goes on when there is room again. What runs prints into the void."""
    world.directory.mkdir()
    mount = await asyncio.create_subprocess_exec("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(world.directory))
    if await mount.wait() != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        await world.start_agent()
        assert world.process is not None
        filler = world.directory / "filler"
        fill(filler)
        await world.start_attempt(stop={"totalSteps": 2_000})
        report = await world.until_ended()
        assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.UNAVAILABLE)
        assert "No space left on device" in report.message
        assert world.trainer_pids() == []
        assert world.process.returncode is None
        filler.unlink()
        await world.start_attempt(number=2, stop={"totalSteps": 2_000})
        await world.until(lambda: len(world.mine(AttemptEnded)) > 1, 60)
        assert world.mine(AttemptEnded)[-1].outcome is AttemptOutcome.SUCCEEDED
        await world.start_attempt(number=3, stop={"totalSteps": 60_000})
        await world.until(lambda: any(sample.attempt_number == 3 for sample in world.mine(TrainingMetrics)), 60)
        fill(filler)
        await world.until(lambda: len(world.mine(AttemptEnded)) > 2, 60)
        report = world.mine(AttemptEnded)[-1]
        assert (report.attempt_number, report.outcome, report.global_step) == (3, AttemptOutcome.SUCCEEDED, 60_000), report.message
        await world.stop_agent()
    finally:
        await (await asyncio.create_subprocess_exec("umount", "-l", str(world.directory))).wait()


def fill(filler: Path) -> None:
    """Leave not a byte of the disk."""
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("hours", [2, -2])
async def test_a_node_whose_clock_is_hours_off_works_like_any_other(world: AgentWorld, tmp_path: Path, hours: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import time; off = {hours} * 3600; real, real_ns = time.time, time.time_ns\n"
        "time.time = lambda: real() + off; time.time_ns = lambda: real_ns() + off * 10**9\n"
    )
    started = await world.start_agent(PYTHONPATH=str(tmp_path))
    now_ms = time.time_ns() // 1_000_000
    assert abs(int(started.incarnation.partition("-")[0]) - now_ms) > 7_000_000, "its clock is off"
    await world.start_attempt(valid_until_ms=now_ms + 60_000, stop={"totalSteps": 40_000})
    report = await world.until_ended()
    assert report.outcome is AttemptOutcome.SUCCEEDED, report.message
    await world.until(lambda: bool(world.mine(TrainingMetrics)) and bool(world.mine(LogLines)), 10)
    for sample in (*world.mine(TrainingMetrics), *world.mine(LogLines)):
        assert abs(sample.time_ms - now_ms) < 120_000, "what it tells carries the broker's time"


async def test_a_second_agent_in_the_same_folder_is_refused_in_words(world: AgentWorld) -> None:
    await world.start_agent()
    first = world.process
    environment = {"OPENTINKER_AGENT__DIRECTORY": str(world.directory)}
    with pytest.raises(AssertionError, match="another agent runs in"):
        await asyncio.wait_for(world.start_agent(**environment), 40)
    assert world.process is not None
    assert await world.process.wait() == 2
    world.process = first
