"""The order in which a stack ends."""

from __future__ import annotations

from pathlib import Path

from opentinker.compose.local.home import Home
from opentinker.compose.local.programs import AgentShape, service_programs, stop_stages
from opentinker.compose.local.supervisor import render_configuration

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
