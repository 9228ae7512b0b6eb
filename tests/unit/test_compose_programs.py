"""The order in which a stack ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentinker.compose.local import stack, supervisor
from opentinker.compose.local.home import Home
from opentinker.compose.local.programs import AgentShape, service_programs, stop_stages
from opentinker.compose.local.progress import SilentProgress
from opentinker.compose.local.supervisor import Supervisor, render_configuration

NAMES = ["kafka", "postgres", "s3", "registry", "scheduler", "replica", "ingress", "gateway", "agent-1", "agent-2"]


def test_agents_end_first_and_what_they_need_last() -> None:
    assert stop_stages(NAMES) == [["agent-1", "agent-2"], ["ingress", "gateway"], ["registry", "scheduler", "replica"], ["kafka", "postgres", "s3"]]
    assert stop_stages(["kafka"]) == [["kafka"]]


def test_supervisord_ends_them_in_the_same_order_when_it_is_told_to_end(tmp_path: Path) -> None:
    ports = dict.fromkeys(["registry", "scheduler-metrics", "replica", "ingress-metrics", "gateway", "agent-1-metrics", "agent-1-rendezvous"], 20_000)
    programs = service_programs(ports, AgentShape(count=1), {}, tmp_path, ())
    lines = render_configuration(Home(tmp_path), programs, 20_001, "secret").splitlines()
    sections = [line[9:-1] for line in lines if line.startswith("[program:")]
    priorities = dict(zip(sections, [int(line[9:]) for line in lines if line.startswith("priority=")], strict=True))
    # Supervisord stops the highest priority first, and waits for it.
    assert priorities["agent-1"] > priorities["gateway"] == priorities["ingress"] > priorities["registry"] == priorities["scheduler"]


def test_a_stage_begins_when_the_one_before_has_ended_and_a_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    looks_left: dict[str, int] = {}

    def call(_: Supervisor, method: str, *arguments: Any) -> Any:
        if method == "stopProcess":
            steps.append(arguments[0])
            looks_left[arguments[0]] = 2
            return None
        looks_left.update({name: left - 1 for name, left in looks_left.items()})
        steps.extend(f"{name} ended" for name, left in looks_left.items() if left == 0)
        return [{"name": name, "statename": "STOPPING" if left > 0 else "STOPPED"} for name, left in looks_left.items()]

    monkeypatch.setattr(Supervisor, "call", call)
    monkeypatch.setattr(supervisor, "_WAIT_TOLD_S", -1.0)
    progress = SilentProgress()
    monkeypatch.setattr(progress, "say", steps.append)
    stack._stop_in_order(Supervisor(home=Home(tmp_path), port=1, password=""), ["kafka", "scheduler", "agent-1"], progress)
    assert steps == [
        *("agent-1", "waiting for agent-1: their trainers write a last checkpoint", "agent-1 ended"),
        *("scheduler", "waiting for scheduler", "scheduler ended"),
        *("kafka", "waiting for kafka", "kafka ended"),
    ]
