"""The main job, end to end on every real part: the example through the gateway, and what a killed agent costs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import ROOT, job, ok, opentinker, until
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import UpOptions
from opentinker.compose.local.progress import SilentProgress
from opentinker.compose.local.stack import down, up
from opentinker.producers.client import Client

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def client(stack: Any) -> Client:
    return Client(stack.settings.gateway.url, stack.settings.api_key_file.read_text().strip())


def manifest(**spec: Any) -> str:
    base = {"algorithm": "PPO", "environment": "CartPole-v1", "resources": {"gpu": 1, "cpu": 1, "memory": "1Gi"}, "checkpoint": {"every": "2s"}}
    return json.dumps({"apiVersion": "opentinker.io/v1", "kind": "TrainingJob", "metadata": {"generateName": "e2e-"}, "spec": base | spec})


def submit(stack: Any, **spec: Any) -> str:
    return ok(opentinker(stack, "submit", "-f", "-", "-o", "name", stdin=manifest(**spec))).strip()


def test_the_example_is_solved_by_four_processes_that_stay_equal(full_stack: Any) -> None:
    """Learning rate and batch size to the letter, four pids, equal weights on all ranks, updates × 64 = steps × epochs, a registered model."""
    done = opentinker(full_stack, "submit", "-f", "examples/cartpole-v1.json", "--wait", "-o", "json", timeout_s=300)
    view = json.loads(ok(done))
    status = view["status"]
    assert status["phase"] == "Completed"
    assert status["progress"]["meanReturn"] >= 475
    with client(full_stack) as gateway:
        version = gateway.model_version("cartpole-v1", status["model"]["version"])
        logs = gateway.logs(view["metadata"]["uid"], tail=10_000)
    effective = version["lineage"]["effective"]
    assert (effective["hyperparameters"]["learning_rate"], effective["hyperparameters"]["batch_size"], effective["world_size"]) == (0.0003, 64, 4)
    assert version["metrics"]["updates"] * 64 == status["progress"]["globalStep"] * effective["hyperparameters"]["n_epochs"]
    lines = [line["text"] for line in logs["items"]]
    began = [re.search(r"rank (\d) of 4 .*pid (\d+)", line) for line in lines]
    assert {(match[1]) for match in began if match} == {"0", "1", "2", "3"}
    assert len({match[2] for match in began if match}) == 4
    ended = [match for line in lines if (match := re.search(r"rank (\d) ended .*weights (sha256:[0-9a-f]{64})", line))]
    assert {match[1] for match in ended} == {"0", "1", "2", "3"}
    assert {match[2] for match in ended} == {f"sha256:{version['lineage']['weights_sha256']}"}


def first_checkpoint(stack: Any, uid: str) -> int:
    """Wait until one is committed; its global step."""
    with client(stack) as gateway:
        found = until(lambda: gateway.checkpoints(uid), f"a checkpoint of {uid}")
    return max(item["globalStep"] for item in found)


def kill_agent(pid: int) -> None:
    """The agent and its trainers at once, as when a node loses power."""
    processes = psutil.Process(pid).children(recursive=True)
    assert any("opentinker.trainer_agent.trainer" in " ".join(each.cmdline()) for each in processes), (
        "the agent runs no trainer: nothing would be tested"
    )
    for each in [psutil.Process(pid), *processes]:
        each.send_signal(signal.SIGKILL)


def check_resumed(stack: Any, uid: str, total_steps: int) -> None:
    """Completed in a later attempt that began at a committed checkpoint; steps counted once; history exact."""
    done = opentinker(stack, "watch", uid, timeout_s=240)
    ok(done)
    view = job(stack, uid)
    assert view["status"]["attempt"] >= 2
    assert view["status"]["progress"]["globalStep"] == total_steps
    with client(stack) as gateway:
        checkpoints, samples = gateway.checkpoints(uid), gateway.metrics(uid)
    last = view["status"]["attempt"]
    saved = {item["globalStep"] for item in checkpoints if item["attempt"] < last}
    lines = ok(opentinker(stack, "logs", uid, "--tail", "10000", "--replica", "0"))
    resumed = [int(match.replace(",", "")) for match in re.findall(r"resumed at step ([\d,]+)", lines)]
    assert resumed, lines[-2000:]
    assert resumed[-1] > 0
    assert resumed[-1] in saved
    assert samples
    events = json.loads(ok(opentinker(stack, "describe", uid, "-o", "json")))["events"]
    kinds = [event["type"] for event in events]
    assert kinds.count("JobCompleted") == kinds.count("JobSubmitted") == 1
    assert kinds.count("AttemptPlaced") == last


def test_a_killed_agent_that_is_restarted_costs_no_more_than_a_checkpoint_interval(full_stack: Any) -> None:
    uid = submit(full_stack, replicas=4, stop={"totalSteps": 327_680})
    first_checkpoint(full_stack, uid)
    programs = json.loads(opentinker(full_stack, "status", "-o", "json").stdout)["programs"]  # parts may answer late beside four trainers
    kill_agent(next(program["pid"] for program in programs if program["name"] == "agent-3"))
    check_resumed(full_stack, uid, 327_680)


def test_a_killed_agent_that_stays_away_is_replaced_by_a_spare_one(full_stack: Any, tmp_path: Path) -> None:
    """Three agents of a pool of their own, which nobody restarts; a gang of two; one of its nodes dies for good."""
    agents = {}
    for number in range(3):
        log = (tmp_path / f"spare-{number}.log").open("w")
        environment = full_stack.environment(
            OPENTINKER_AGENT__NODE=f"spare-{number}", OPENTINKER_AGENT__POOL="spare", OPENTINKER_AGENT__SIMULATED_GPUS="1", OPENTINKER_AGENT__CPU="1",
            OPENTINKER_AGENT__MEMORY="1Gi", OPENTINKER_AGENT__PORTS=f"{39000 + number * 20}-{39019 + number * 20}",
        )  # fmt: skip
        agents[f"spare-{number}"] = subprocess.Popen([sys.executable, "-m", "opentinker.trainer_agent"], env=environment, stdout=log, stderr=log)
    try:
        uid = submit(full_stack, replicas=2, pool="spare", stop={"totalSteps": 327_680})
        first_checkpoint(full_stack, uid)
        victim = job(full_stack, uid)["status"]["nodes"][0]
        kill_agent(agents[victim].pid)
        check_resumed(full_stack, uid, 327_680)
        assert victim not in json.dumps(json.loads(ok(opentinker(full_stack, "describe", uid, "-o", "json")))["events"][-6:])
        nodes = json.loads(ok(opentinker(full_stack, "get", "nodes", "-o", "json")))
        assert next(node for node in nodes if node["node"] == victim)["state"] == "Lost"
    finally:
        for process in agents.values():
            process.terminate()
        for process in agents.values():
            process.wait(45)


def test_cancel_ends_the_processes_and_frees_the_devices(full_stack: Any) -> None:
    uid = submit(full_stack, replicas=4, stop={"totalSteps": 10**9})
    until(lambda: job(full_stack, uid)["status"]["phase"] == "Running", "the job runs")
    ok(opentinker(full_stack, "cancel", uid, "--reason", "enough"))
    until(lambda: job(full_stack, uid)["status"]["phase"] == "Cancelled", "the job is cancelled")
    nodes = json.loads(ok(opentinker(full_stack, "get", "nodes", "-o", "json")))
    assert all(device["jobUid"] is None for node in nodes for device in node["devices"] if node["pool"] == "default")
    running = [each for each in psutil.process_iter(["cmdline", "environ"]) if uid in " ".join(each.info["cmdline"] or [])]
    assert running == []


def test_a_job_that_cannot_be_placed_says_why_and_moves_when_it_can(full_stack: Any) -> None:
    first = submit(full_stack, replicas=4, stop={"totalSteps": 10**9})
    until(lambda: job(full_stack, first)["status"]["phase"] in ("Starting", "Running"), "the first is placed")
    second = submit(full_stack, replicas=4, stop={"totalSteps": 8192})
    explained = until(
        lambda: ok(opentinker(full_stack, "explain", second)) if job(full_stack, second)["status"]["reason"] == "InsufficientCapacity" else "",
        "a reason",
    )
    assert "needs 4 × (1 GPU, 1 CPU, 1 GiB); pool default has 0 free GPUs" in explained
    ok(opentinker(full_stack, "cancel", first))
    ok(opentinker(full_stack, "watch", second))
    large = submit(full_stack, replicas=32)
    assert "TooLarge" in until(
        lambda: job(full_stack, large)["status"]["reason"] != "Submitted" and ok(opentinker(full_stack, "explain", large)), "a reason"
    )
    ok(opentinker(full_stack, "cancel", large))


def test_the_scheduler_and_the_gateway_killed_in_mid_job_change_nothing(full_stack: Any) -> None:
    uid = submit(full_stack, replicas=4, stop={"totalSteps": 245_760})
    until(lambda: job(full_stack, uid)["status"]["phase"] == "Running", "the job runs")
    programs = json.loads(opentinker(full_stack, "status", "-o", "json").stdout)["programs"]  # parts may answer late beside four trainers
    for name in ("scheduler", "gateway", "registry"):
        os.kill(next(program["pid"] for program in programs if program["name"] == name), signal.SIGKILL)
    until(lambda: opentinker(full_stack, "get", "jobs").returncode == 0, "the gateway is back")
    ok(opentinker(full_stack, "watch", uid, timeout_s=240))
    view = job(full_stack, uid)
    assert view["status"]["phase"] == "Completed"
    assert view["status"]["progress"]["globalStep"] == 245_760
    assert view["status"]["model"]["version"] == 1


def test_nothing_of_the_demo_manifest_was_changed() -> None:
    """The example is the manifest of the design, word for word."""
    assert json.loads((ROOT / "examples" / "cartpole-v1.json").read_text()) == {
        "apiVersion": "opentinker.io/v1",
        "kind": "TrainingJob",
        "metadata": {"name": "cartpole-v1"},
        "spec": {
            "algorithm": "PPO",
            "environment": "CartPole-v1",
            "replicas": 4,
            "resources": {"gpu": 1, "cpu": 2, "memory": "4Gi"},
            "hyperparameters": {"learning_rate": 0.0003, "batch_size": 64},
        },
    }


def test_a_stack_that_is_stopped_and_started_again_costs_a_job_neither_steps_nor_retries(full_stack: Any) -> None:
    """Twice in a row, with no retry to use up and no checkpoint but the last one that each stop leaves time for."""
    uid = submit(full_stack, replicas=4, stop={"totalSteps": 655_360}, checkpoint={"every": "1h"}, retry={"infrastructure": 0})
    home, options = Home(full_stack.home), UpOptions(usual_ports=False, ends_with_caller=True)
    reached = 0
    for _ in range(2):
        until(lambda enough=reached + 20_000: job(full_stack, uid)["status"]["progress"]["globalStep"] > enough, "it trains")
        down(home, SilentProgress())
        up(home, options, SilentProgress())
        with client(full_stack) as gateway:
            saved = max(item["globalStep"] for item in gateway.checkpoints(uid))
        assert saved > reached + 20_000
        reached = saved
    ok(opentinker(full_stack, "watch", uid, timeout_s=240))
    events = json.loads(ok(opentinker(full_stack, "describe", uid, "-o", "json")))["events"]
    kinds = [event["type"] for event in events]
    assert (kinds.count("AttemptPlaced"), kinds.count("JobRequeued"), kinds.count("JobCompleted")) == (3, 2, 1), events
    lines = ok(opentinker(full_stack, "logs", uid, "--tail", "10000", "--replica", "0"))
    resumed = [int(match.replace(",", "")) for match in re.findall(r"resumed at step ([\d,]+)", lines)]
    with client(full_stack) as gateway:
        assert resumed == sorted({item["globalStep"] for item in gateway.checkpoints(uid)})[:2], "each goes on where the stop left it"
    assert job(full_stack, uid)["status"]["progress"]["globalStep"] == 655_360
