"""Trainer processes as they are: gangs over shared memory, interruption and resume, failures, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentinker.trainer_agent.protocol import ExitCode, Stopped
from trainer_processes import TrainerGang, newest_checkpoint

pytestmark = pytest.mark.slow
SMALL = {"num_envs": 6, "n_steps": 32, "batch_size": 32, "n_epochs": 2}
Start = Callable[..., TrainerGang]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    gangs: list[TrainerGang] = []

    def make(spec: dict[str, Any], world_size: int = 1, **options: Any) -> TrainerGang:
        gangs.append(TrainerGang(tmp_path / f"gang-{len(gangs)}", {"hyperparameters": SMALL} | spec, world_size, **options))
        return gangs[-1]

    yield make
    for gang in gangs:
        gang.close()


def test_the_seed_manifest_is_solved_by_four_processes_to_the_letter(start: Start) -> None:
    """Learning rate 0.0003 and batch 64, global: four pids, equal weights, updates x 64 = steps x epochs, mean return >= 475."""
    gang = start({"hyperparameters": {"learning_rate": 0.0003, "batch_size": 64}}, 4)
    words = gang.wait(200)
    assert gang.codes() == [0, 0, 0, 0]
    assert len({process.pid for process in gang.processes}) == 4
    ready = [gang.events(rank, "ready")[0] for rank in range(4)]
    assert {entry["transport"] for entry in ready} == {"shared-memory"}
    effective = ready[0]["effective"]["hyperparameters"]
    assert (effective["learning_rate"], effective["batch_size"]) == (0.0003, 64)
    assert len({entry["weights_sha256"] for entry in ready}) == 1
    assert len({word["weights_sha256"] for word in words}) == 1
    assert words[0]["weights_sha256"] != ready[0]["weights_sha256"]
    assert words[0]["updates"] * 64 == words[0]["global_step"] * effective["n_epochs"]
    assert words[0]["mean_return"] >= 475
    assert {word["stop_reason"] for word in words} == {"RewardThreshold"}


def test_interrupted_or_not_a_gang_ends_with_the_same_weights(start: Start, tmp_path: Path) -> None:
    budget = {"stop": {"totalSteps": 192 * 40}}
    (expected, _) = start(budget, 2).wait()
    resume, steps = None, [0]
    for _ in range(3):
        gang = start(budget | {"checkpoint": {"every": "1s"}}, 2, resume=resume)
        ready = gang.until("ready")
        assert ready["global_step"] == steps[-1], "the first step is the checkpoint's"
        assert ready["resume"] == ("exact" if resume else "fresh")
        time.sleep(0.05)
        gang.terminate()
        words = gang.wait()
        if words[0]["outcome"] == "Succeeded":
            break
        assert gang.codes() == [ExitCode.STOPPED] * 2
        assert words[0]["checkpoint_step"] == words[0]["global_step"] > steps[-1]
        resume, state = newest_checkpoint(gang.directory)
        steps.append(state["global_step"])
    else:
        gang = start(budget, 2, resume=resume)
        words = gang.wait()
    assert len(steps) > 2
    assert (words[0]["weights_sha256"], words[0]["global_step"]) == (expected["weights_sha256"], 192 * 40)
    assert (words[0]["episodes"], words[0]["mean_return"]) == (expected["episodes"], expected["mean_return"])


def test_a_dead_rank_does_not_hang_the_others(start: Start) -> None:
    gang = start({"stop": {"totalSteps": 10**9}}, 3)
    gang.until("progress")
    gang.processes[1].kill()
    killed = time.monotonic()
    words = gang.wait(20)
    assert time.monotonic() - killed < 10
    assert gang.codes() == [ExitCode.INFRASTRUCTURE, -signal.SIGKILL, ExitCode.INFRASTRUCTURE]
    assert "replica 1 died" in words[0]["message"]


def test_a_frozen_rank_is_waited_for_and_a_stop_reaches_all(start: Start) -> None:
    gang = start({"stop": {"totalSteps": 10**9}}, 2)
    gang.until("progress")
    gang.processes[1].send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    assert gang.processes[0].poll() is None, "slow is not dead"
    gang.processes[1].send_signal(signal.SIGCONT)
    gang.processes[1].terminate()  # only one is told; a gang stops whole
    words = gang.wait(20)
    assert gang.codes() == [ExitCode.STOPPED] * 2
    assert words[0]["checkpoint_step"] == words[0]["global_step"] > 0


def test_one_that_waits_for_a_peer_that_never_comes_ends_at_once_when_told(start: Start) -> None:
    gang = start({"stop": {"totalSteps": 10**9}}, 2)
    gang.processes[1].kill()
    until = time.monotonic() + 30
    while "torch" not in Path(f"/proc/{gang.processes[0].pid}/maps").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(2.5)  # by now it waits for its peer, in C++
    gang.processes[0].terminate()
    assert gang.processes[0].wait(5) == ExitCode.STOPPED
    word = Stopped.model_validate_json((gang.directory / "0" / "result.json").read_bytes())
    assert word.message == "told to stop before training began"


BREAKING = """
import gymnasium as gym, numpy as np, os
class Breaking(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,)); action_space = gym.spaces.Discrete(2)
    made = 0
    def __init__(self, breaks=True, nan=False): self.breaks, self.nan, self.count = breaks, nan, 0
    def reset(self, *, seed=None, options=None): return np.zeros(3, np.float32), {}
    def step(self, action):
        self.count += 1
        if self.breaks and self.count > 40 and int(os.environ["RANK_THAT_BREAKS"]) == 1: raise ZeroDivisionError("by design")
        return np.zeros(3, np.float32), float("nan") if self.nan else 1.0, False, False, {}
gym.register("Breaking-v0", entry_point=Breaking)
"""


@pytest.fixture
def breaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize_env.py").write_text(BREAKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK_THAT_BREAKS", "0")


def test_an_error_in_one_replicas_environment_is_the_whole_gangs_reason(start: Start, breaking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_THAT_BREAKS", "1")
    gang = start({"environment": "sitecustomize_env:Breaking-v0", "stop": {"totalSteps": 10**9}}, 2)
    words = gang.wait(60)
    assert set(gang.codes()) == {ExitCode.USER_ERROR}
    assert any("ZeroDivisionError: by design" in word["message"] for word in words)
    logs = "".join((gang.directory / str(rank) / "stderr").read_text() for rank in range(2))
    assert 'raise ZeroDivisionError("by design")' in logs, "the author's own line is in the log"


def test_not_a_number_ends_in_its_own_class_and_keeps_finite_weights(start: Start, breaking: None) -> None:
    spec = {"environment": {"id": "sitecustomize_env:Breaking-v0", "kwargs": {"breaks": False, "nan": True}}, "stop": {"totalSteps": 10**6}}
    gang = start(spec, 2)
    words = gang.wait(60)
    assert gang.codes() == [ExitCode.NON_FINITE] * 2
    assert "not finite" in words[0]["message"]
    assert not (gang.directory / "0" / "checkpoints").exists() or not list((gang.directory / "0" / "checkpoints").iterdir())


def test_the_last_word_is_left_in_a_file(start: Start) -> None:
    gang = start({"stop": {"totalSteps": 192}})
    (word,) = gang.wait()
    assert Stopped.model_validate_json((gang.directory / "0" / "result.json").read_bytes()) == Stopped.model_validate(word)


def test_a_step_budget_is_met_exactly(start: Start) -> None:
    (word,) = start({"stop": {"totalSteps": 1002}}).wait()
    assert (word["global_step"], word["stop_reason"]) == (1002, "TotalSteps")


def test_a_description_that_cannot_be_read_is_one_line_and_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "opentinker.trainer_agent.trainer"], input=b"{}", capture_output=True, timeout=60, check=False)
    assert done.returncode == ExitCode.INFRASTRUCTURE
    assert b"Traceback" not in done.stderr
    assert b"attempt description" in done.stderr


def test_a_bad_hyperparameter_is_the_users_error_with_its_path(start: Start) -> None:
    gang = start({"hyperparameters": {"learning_rat": 1}})
    (word,) = gang.wait()
    assert gang.codes() == [ExitCode.USER_ERROR]
    assert "spec.hyperparameters.learning_rat" in word["message"]
    assert "learning_rate" in word["message"]


GANG_SCRIPT = """
import json, os, sys, numpy as np, torch
from opentinker.trainer_agent.rl.gang import GlooGang
from opentinker.trainer_agent.rl import shared_memory
rank, world, port, shared = map(int, sys.argv[1:])
gang = GlooGang(rank, world, "127.0.0.1", port, join_timeout_s=60, wait_timeout_s=60)
if shared == 2: shared_memory._DIRECTORY = shared_memory.Path("/dev/shm") if rank == 0 else shared_memory.Path("/nowhere/at/all")
if shared:
    joined = shared_memory.join_shared_memory(gang, wait_timeout_s=60)
    assert (joined is None) == (shared == 2)
    gang = joined or gang
rng = np.random.default_rng(rank)
out = []
for size in (1, 9157, 600_001):  # the last is more than a slot holds
    vector = torch.from_numpy(rng.normal(size=size).astype(np.float32))
    for _ in range(3):
        gang.all_reduce_(vector)
        vector /= 10
    out.append(vector.numpy().tobytes().hex()[:4000])
record = gang.all_gather(np.full((2, 70_001), float(rank)))
assert record.shape == (world, 2, 70_001) and [row.mean() for row in record] == list(range(world))
blobs = gang.gather_bytes(bytes([rank]) * (rank * 1_500_000 + rank))
assert [len(blob) for blob in blobs] == [r * 1_500_000 + r for r in range(world)] and set(blobs[-1]) == {world - 1}
gang.close()
print(json.dumps(out))
"""


@pytest.mark.parametrize("transport", ["gloo", "shared-memory", "different hosts"])
def test_every_transport_gives_every_rank_the_same_bits(transport: str) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = ["gloo", "shared-memory", "different hosts"].index(transport)
    commands = [[sys.executable, "-c", GANG_SCRIPT, str(rank), "3", str(port), str(shared)] for rank in range(3)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(json.loads(outputs[0])) == 3
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("opentinker-")], "nothing is left in memory"
