"""The command line against the whole stack: what it prints, and the exit code of everything that can go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import ROOT, job, ok, opentinker, until
from opentinker.compose.local.home import Home
from opentinker.compose.local.stack import supervisor_of

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def manifest(name: str, **spec: Any) -> str:
    base = {"algorithm": "PPO", "environment": "CartPole-v1", "stop": {"totalSteps": 4096}}
    return json.dumps({"apiVersion": "opentinker.io/v1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": base | spec})


def fails(done: subprocess.CompletedProcess[str], code: int, text: str) -> None:
    assert done.returncode == code, (done.returncode, done.stdout[-800:], done.stderr[-800:])
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_exit_codes_of_what_can_go_wrong(full_stack: Any, tmp_path: Path) -> None:
    fails(opentinker(full_stack, "get", "job", "nobody"), 3, "there is no job 'nobody'")
    fails(opentinker(full_stack, "get", "jobs", OPENTINKER_API_KEY="otk_wrong-wrong-wrong-wrong"), 4, "key")
    fails(opentinker(full_stack, "submit", "-f", "-", stdin=manifest("bad", replicas=0)), 2, "spec.replicas: must be at least 1, got 0")
    fails(opentinker(full_stack, "submit", "-f", "-", stdin="{"), 2, "JSON")
    fails(opentinker(full_stack, "submit", "-f", "-", stdin=""), 2, "standard input is empty")
    fails(opentinker(full_stack, "submit", "-f", "-", stdin=b"\xff\xfe\x00"), 2, "UTF-8")
    fails(opentinker(full_stack, "submit", "-f", "-", stdin=manifest("big", hyperparameters={"x": "y" * 2_000_000})), 2, "bytes")
    fails(opentinker(full_stack, "submit", "-f", str(tmp_path / "none.json")), 2, "cannot read")
    fails(opentinker(full_stack, "submit"), 2, "name one manifest")
    fails(opentinker(full_stack, "get", "jobs", "--phase", "Runing"), 2, "did you mean Running?")
    fails(opentinker(full_stack, "get", "jobs", OPENTINKER_GATEWAY__URL="http://127.0.0.1:1"), 1, "is the gateway running?")


def test_conflict_timeout_and_failure_have_codes_of_their_own(full_stack: Any) -> None:
    uid = ok(opentinker(full_stack, "submit", "-f", "-", "-o", "name", stdin=manifest("taken", stop={"totalSteps": 10**9}))).strip()
    fails(opentinker(full_stack, "submit", "-f", "-", stdin=manifest("taken")), 5, uid)
    done = opentinker(full_stack, "watch", uid, "--timeout", "1")
    assert done.returncode == 6
    ok(opentinker(full_stack, "cancel", uid))
    done = opentinker(full_stack, "watch", uid)
    assert done.returncode == 10
    assert "Cancelled" in done.stderr


def test_a_users_error_is_readable_where_people_look(full_stack: Any) -> None:
    broken = manifest("broken", environment={"id": "CartPole-v1", "kwargs": {"no_such_argument": 1}})
    done = opentinker(full_stack, "submit", "-f", "-", "--wait", stdin=broken)
    assert done.returncode == 10
    view = job(full_stack, "broken")
    assert (view["status"]["phase"], view["status"]["reason"]) == ("Failed", "UserError")
    assert "no_such_argument" in ok(opentinker(full_stack, "describe", "broken"))
    assert "no_such_argument" in ok(opentinker(full_stack, "explain", "broken"))
    assert "no_such_argument" in until(lambda: opentinker(full_stack, "logs", "broken").stdout, "the trainer's traceback in the log")


def test_forms_of_output_hold_the_same_data(full_stack: Any) -> None:
    ok(opentinker(full_stack, "submit", "-f", "-", "--wait", stdin=manifest("forms")))
    as_json = json.loads(ok(opentinker(full_stack, "get", "job", "forms", "-o", "json")))
    as_yaml = yaml.safe_load(ok(opentinker(full_stack, "get", "job", "forms", "-o", "yaml")))
    assert as_json == as_yaml
    assert as_json["metadata"]["uid"] in ok(opentinker(full_stack, "get", "jobs"))
    assert ok(opentinker(full_stack, "get", "job", "forms", "-o", "name")).strip() == as_json["metadata"]["uid"]
    described = json.loads(ok(opentinker(full_stack, "describe", "forms", "-o", "json")))
    assert described["events"][0]["type"] == "JobSubmitted"
    sources = {row["field"]: row["source"] for row in next(value for value in described["effective"].values() if isinstance(value, list))}
    assert sources["spec.stop.totalSteps"] == "manifest"
    assert sources["spec.replicas"] == "default"
    nodes = ok(opentinker(full_stack, "get", "nodes"))
    assert "node-1" in nodes
    assert "(simulated)" in nodes


def test_topics_and_metrics_speak_to_kafka(full_stack: Any) -> None:
    assert "0 topics made" in ok(opentinker(full_stack, "topics", "ensure"))
    assert "opentinker.jobs.requests.v1" in ok(opentinker(full_stack, "topics", "list", "-o", "name")).splitlines()
    ok(opentinker(full_stack, "submit", "-f", "-", "--wait", stdin=manifest("measured", stop={"totalSteps": 40_960})))
    uid = job(full_stack, "measured")["metadata"]["uid"]
    sample = json.loads(ok(opentinker(full_stack, "metrics", "tail", "--from-beginning", "--job", uid, "--count", "1", "-o", "json")))
    assert sample["job_uid"] == uid


def test_a_dead_letter_is_listed_mended_and_replayed(full_stack: Any, tmp_path: Path) -> None:
    broken, mended = tmp_path / "broken.json", tmp_path / "mended.json"
    broken.write_text(manifest("replayed", replicas=0))
    mended.write_text(manifest("replayed"))
    script = [sys.executable, "examples/other_systems/publish_confluent.py", "--bootstrap", full_stack.settings.kafka.bootstrap_servers]
    published = subprocess.run([*script, "--id", "replay-me", str(broken)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert published.returncode == 1, published.stderr
    assert "spec.replicas" in published.stdout
    letters = json.loads(ok(opentinker(full_stack, "dlq", "list", "--topic", "opentinker.jobs.requests.v1", "-o", "json")))
    letter = next(each for each in letters if each["headers"].get("ce_id") == "replay-me")
    assert letter["errors"][0]["field"] == "spec.replicas"
    assert "sent to opentinker.jobs.requests.v1" in ok(
        opentinker(full_stack, "dlq", "replay", "opentinker.jobs.requests.v1", str(letter["offset"]), "--value-file", str(mended))
    )
    until(lambda: opentinker(full_stack, "get", "job", "replayed").returncode == 0, "the mended request is a job")
    fails(opentinker(full_stack, "dlq", "list", "--topic", "opentinker.jobs.request.v1"), 2, "did you mean opentinker.jobs.requests.v1?")
    fails(opentinker(full_stack, "dlq", "replay", "opentinker.jobs.requests.v1", "999999"), 2, "holds offsets")


def test_a_cordoned_node_takes_nothing_until_it_is_uncordoned(full_stack: Any) -> None:
    def state() -> str:
        nodes = json.loads(ok(opentinker(full_stack, "get", "nodes", "-o", "json")))
        return str(next(node["state"] for node in nodes if node["node"] == "node-1"))

    ok(opentinker(full_stack, "cordon", "node-1"))
    until(lambda: state() == "Cordoned", "node-1 is cordoned")
    uid = ok(opentinker(full_stack, "submit", "-f", "-", "-o", "name", stdin=manifest("four", replicas=4, resources={"gpu": 1}))).strip()
    until(lambda: job(full_stack, uid)["status"]["reason"] == "Cordoned", "the gang waits for the cordoned node")
    assert "1 of its" in ok(opentinker(full_stack, "explain", uid))
    ok(opentinker(full_stack, "uncordon", "node-1"))
    ok(opentinker(full_stack, "watch", uid))
    fails(opentinker(full_stack, "cordon", "Not A Node"), 2, "is not a name")
    fails(opentinker(full_stack, "cordon", "node1"), 3, "did you mean node-1?")
    assert "lets go" in ok(opentinker(full_stack, "brake", "acknowledge"))


def test_what_is_no_name_is_said_by_every_command_that_takes_one(full_stack: Any) -> None:
    for words in (["get", "job", "a/b"], ["describe", ""], ["explain", "A"], ["logs", "a b"], ["cancel", "../x"], ["watch", ""], ["audit", "a/b"]):
        fails(opentinker(full_stack, *words), 2, "is neither a name")
    fails(opentinker(full_stack, "get", "jobs", "-n", "Not/One"), 2, "namespace: ")


def test_a_jobs_history_is_told_from_the_topics(full_stack: Any) -> None:
    ok(opentinker(full_stack, "submit", "-f", "-", "--wait", stdin=manifest("audited")))
    wanted = {"AttemptPlaced", "AttemptRunning", "CheckpointCommitted", "ModelVersionRegistered", "AttemptEnded", "JobCompleted"}

    def complete() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(ok(opentinker(full_stack, "audit", "audited", "-o", "json")))
        return found if wanted <= {entry["type"] for entry in found["entries"]} else None  # the outbox takes a moment

    history = until(complete, f"the history holds {wanted}")
    types = [entry["type"] for entry in history["entries"]]
    assert types[0] == "SubmitJob"
    assert "JobSubmitted" in types[1:4], "by the broker's stamps: what one decision put on several topics may change places"
    assert history["warnings"] == []


def test_what_was_decided_is_decided_again(full_stack: Any, tmp_path: Path) -> None:
    log = str(next((ROOT / "tests" / "contract" / "recorded").glob("*.log.gz")))
    assert ": identical, state " in ok(opentinker(full_stack, "replay", "--log", log))
    (tmp_path / "x").write_text("no log")
    fails(opentinker(full_stack, "replay", "--log", str(tmp_path / "x")), 1, "is not a recorded log")
    fails(opentinker(full_stack, "replay", "--from", "3"), 2, "give --partition")


def test_why_a_job_waits_is_told_while_the_scheduler_stands_still(full_stack: Any) -> None:
    supervisor = supervisor_of(Home(full_stack.home))
    assert supervisor is not None
    pid = int(supervisor.states()["scheduler"]["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        uid = ok(opentinker(full_stack, "submit", "-f", "-", "-o", "name", stdin=manifest("unseen"))).strip()
        assert "accepted; the scheduler has not looked at it yet" in ok(opentinker(full_stack, "explain", uid))
        until(lambda: "the scheduler has decided nothing for" in ok(opentinker(full_stack, "explain", uid)), "the scheduler's silence", pause_s=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: job(full_stack, uid)["status"]["phase"] == "Completed", "the job's end")
    assert "decided nothing" not in ok(opentinker(full_stack, "explain", uid))


def test_a_model_is_read_by_its_name_and_version(full_stack: Any) -> None:
    done = opentinker(full_stack, "submit", "-f", "-", "--wait", "-o", "json", stdin=manifest("weights"))
    uid = json.loads(ok(done))["metadata"]["uid"]
    assert uid in ok(opentinker(full_stack, "get", "model", "weights"))
    assert ok(opentinker(full_stack, "get", "model", "weights", "-o", "name")).splitlines()[0] == "weights:1"
    shown = ok(opentinker(full_stack, "get", "model", "weights:1"))
    assert f"Job:       {uid} attempt 1" in shown
    files = json.loads(ok(opentinker(full_stack, "get", "models", "weights:1", "-o", "json")))["files"]
    for file in files:
        with urllib.request.urlopen(file["url"], timeout=30) as answer:
            assert hashlib.sha256(answer.read()).hexdigest() == file["sha256"]
        assert file["name"] in shown
    fails(opentinker(full_stack, "get", "model", "weights:7"), 3, "there is no version 7 of model 'weights'")
    fails(opentinker(full_stack, "get", "model", "weights:x"), 2, "write NAME:VERSION")
    fails(opentinker(full_stack, "get", "model", "nobody"), 3, "there is no model 'nobody'")
