"""Metrics in every service, and one trace from the HTTP request to the placement."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from command import ok, opentinker, until
from opentinker.schemas.topics import COMMANDS, EVENTS, PLACEMENTS
from scheduler_process import TopicReader

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TRACE = "0af7651916cd43dd8448eb211c80319c"


def ports(stack: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for program in json.loads(ok(opentinker(stack, "status", "-o", "json")))["programs"]:
        found |= {name if name != "metrics" else f"{program['name']}-metrics": port for name, port in program["ports"].items()}
    return found


async def test_one_trace_joins_request_command_event_and_placement(full_stack: Any) -> None:
    readers = [TopicReader(full_stack.settings.kafka, topic) for topic in (COMMANDS, EVENTS, PLACEMENTS)]
    for reader in readers:
        await reader.start()
    manifest = {
        "apiVersion": "opentinker.io/v1",
        "kind": "TrainingJob",
        "metadata": {"generateName": "traced-"},
        "spec": {"algorithm": "PPO", "environment": "CartPole-v1", "stop": {"totalSteps": 4096}},
    }
    headers = {
        "Authorization": f"Bearer {full_stack.settings.api_key_file.read_text().strip()}",
        "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
    }
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{full_stack.settings.gateway.url}/v1/jobs", json=manifest, headers=headers)
    assert answer.status_code == 202
    uid = answer.json()["metadata"]["uid"]
    for reader in readers:
        found = await reader.until(lambda seen: [each for each in seen if each.message.job_uid == uid])
        assert found[0].traceparent.split("-")[1] == TRACE
        await reader.stop()


def test_every_service_exports_its_metrics(full_stack: Any) -> None:
    found = ports(full_stack)
    wanted = {
        "scheduler-metrics": "opentinker_scheduling_latency_seconds_count",
        "ingress-metrics": "opentinker_",
        "agent-1-metrics": "opentinker_agent_heartbeat_seconds_count",
        "gateway": "opentinker_gateway_streams",
        "registry": "opentinker_registry_",
        "replica": "opentinker_replica_journal_lag_records",
    }
    assert wanted.keys() <= found.keys(), found
    key = {"Authorization": f"Bearer {full_stack.settings.api_key_file.read_text().strip()}"}  # the gateway's door asks for it, here too
    for name, metric in wanted.items():
        with httpx.Client(trust_env=False, headers=key if name == "gateway" else None) as http:
            page = http.get(f"http://127.0.0.1:{found[name]}/metrics").text
        assert metric in page, name
        assert "job_uid" not in page, f"{name}: a job's id is a label"


def test_scheduling_latency_is_observed_and_no_safety_property_is_violated(full_stack: Any) -> None:
    port = ports(full_stack)["scheduler-metrics"]

    def latency_count() -> float:
        with httpx.Client(trust_env=False) as http:
            lines = http.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        assert float(values["opentinker_scheduler_invariant_violations_total"]) == 0
        return float(values["opentinker_scheduling_latency_seconds_count"])

    before = latency_count()
    uid = ok(opentinker(full_stack, "submit", "-f", "-", "-o", "name", stdin=_SMALL)).strip()
    ok(opentinker(full_stack, "watch", uid))
    until(lambda: latency_count() > before, "a placement was measured")


_SMALL = json.dumps(
    {
        "apiVersion": "opentinker.io/v1",
        "kind": "TrainingJob",
        "metadata": {"generateName": "small-"},
        "spec": {"algorithm": "PPO", "environment": "CartPole-v1", "stop": {"totalSteps": 4096}},
    }
)
