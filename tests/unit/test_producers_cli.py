"""What commands print and which code they exit with, in front of a gateway that answers what a test says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from opentinker.producers.cli import cli
from opentinker.producers.cli.dlq import _rows
from opentinker.producers.cli.failures import exit_code_of
from opentinker.producers.client import errors
from opentinker.producers.core.letters import Letter
from opentinker.producers.core.submission import plan_submission
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import REQUESTS

UID = "0b5c7a9e-1111-4222-8333-944445555666"
Answers = Mapping[tuple[str, str], tuple[int, Any]]


def view(name: str = "solved", phase: str = "Completed", **spec: Any) -> dict[str, Any]:
    base = {"algorithm": "PPO", "environment": "CartPole-v1", "replicas": 4}
    return {
        "apiVersion": "opentinker.io/v1",
        "kind": "TrainingJob",
        "metadata": {"uid": UID, "name": name, "namespace": "team-a", "labels": {"team": "a"}},
        "spec": base | spec,
        "status": {"phase": phase, "reason": "", "message": "all done", "replicas": 4, "replicasRunning": 0, "seed": 1711},
    }


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Answers], list[tuple[str, str]]]]:
    """Give it answers by method and path; it gives the list of calls that it fills."""
    calls: list[tuple[str, str]] = []
    answers: dict[tuple[str, str], tuple[int, Any]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            calls.append((self.command, self.path.partition("?")[0]))
            status, document = answers.get(calls[-1], (404, {"detail": f"no {calls[-1]}"}))
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    monkeypatch.setenv("OPENTINKER_GATEWAY__URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("OPENTINKER_API_KEY", "key")

    def prepare(given: Answers) -> list[tuple[str, str]]:
        answers.update(given)
        return calls

    yield prepare
    server.shutdown()
    server.server_close()
    thread.join()


def run(*words: str, **options: Any) -> Result:
    return CliRunner().invoke(cli, list(words), **options)


def test_a_full_queue_is_answered_at_once_with_the_remedy(gateway: Any) -> None:
    problem = {"detail": "metadata.namespace: team-a has 10 jobs waiting; cancel some", "reason": "QueueFull"}
    calls = gateway({("POST", "/v1/jobs"): (429, problem)})
    result = run("submit", "-f", "-", input="{}")
    assert calls == [("POST", "/v1/jobs")]
    assert isinstance(result.exception, errors.QueueFullError)
    assert (exit_code_of(result.exception), str(result.exception)) == (1, problem["detail"])


@pytest.mark.parametrize("kind", ["job", "jobs"])
def test_a_job_that_is_over_is_listed_without_readiness_by_its_name(gateway: Any, kind: str) -> None:
    calls = gateway({("GET", "/v1/jobs/solved"): (200, view())})
    header, row = run("get", kind, "solved").stdout.splitlines()
    assert [row[header.index(column) :].split()[0] for column in ("NAME ", "PHASE", "READY")] == ["solved", "Completed", "-"]
    assert calls == [("GET", "/v1/jobs/solved")]


def test_a_name_picks_one_node_and_an_unknown_one_is_not_found(gateway: Any) -> None:
    nodes = [{"node": f"node-{number}", "pool": "default", "state": "Ready", "devices": [], "jobs": []} for number in (1, 2)]
    gateway({("GET", "/v1/nodes"): (200, {"items": nodes})})
    assert [node["node"] for node in json.loads(run("get", "nodes", "node-2", "-o", "json").stdout)] == ["node-2"]
    unknown = run("get", "nodes", "node2").exception
    assert isinstance(unknown, errors.NotFoundError)
    assert (exit_code_of(unknown), str(unknown)) == (3, "there is no node 'node2'; did you mean node-2?")


def test_the_manifest_of_a_job_is_taken_again_and_means_the_same(gateway: Any) -> None:
    gateway({("GET", "/v1/jobs/solved"): (200, view(hyperparameters={"gamma": 0.9}))})
    import yaml

    manifest = yaml.safe_load(run("get", "job", "solved", "-o", "manifest").stdout)
    command = plan_submission(manifest, ce_source="s", ce_id="i", submitted_by="me", environments={"CartPole-v1"})
    assert (command.namespace, command.name, command.labels) == ("team-a", "solved", {"team": "a"})
    assert (command.spec.replicas, command.spec.hyperparameters) == (4, {"gamma": 0.9})


def test_jobs_as_data_say_what_they_are(gateway: Any) -> None:
    gateway({("GET", "/v1/jobs"): (200, {"items": [view()], "cursor": None})})
    [item] = json.loads(run("get", "jobs", "-o", "json").stdout)
    assert (item["apiVersion"], item["kind"], item["status"]["seed"]) == ("opentinker.io/v1", "TrainingJob", 1711)


def test_describe_shows_the_seed_that_was_drawn_and_the_stop_rule_that_nobody_gave(gateway: Any) -> None:
    rows = [
        {"field": "spec.seed", "value": None, "source": "drawn from the job's uid"},
        {"field": "spec.stop.targetReturn", "value": 475.0, "source": "reward_threshold of CartPole-v1, since no stop rule is given"},
    ]
    gateway(
        {
            ("GET", "/v1/jobs/solved"): (200, view()),
            ("GET", "/v1/jobs/solved/events"): (200, {"items": []}),
            ("POST", "/v1/jobs"): (200, {"dryRun": True, "effective": rows}),
        }
    )
    shown = [" ".join(line.split()) for line in run("describe", "solved").stdout.splitlines()]
    assert "spec.seed 1711 drawn from the job's uid" in shown
    assert "spec.stop.targetReturn 475.0 reward_threshold of CartPole-v1, since no stop rule is given" in shown


def test_explain_says_a_phase_once(gateway: Any) -> None:
    answer = {"name": "solved", "phase": "Completed", "reason": "Completed", "text": "reached its target"}
    gateway({("GET", "/v1/jobs/solved/explain"): (200, answer)})
    assert run("explain", "solved").stdout.splitlines() == ["solved: Completed", "reached its target"]


def test_the_brake_of_an_unknown_pool_is_not_acknowledged(gateway: Any) -> None:
    gateway({("GET", "/v1/nodes"): (200, {"items": [{"node": "node-1", "pool": "default"}]})})
    unknown = run("brake", "acknowledge", "--pool", "defualt").exception
    assert isinstance(unknown, errors.NotFoundError)
    assert "did you mean default?" in str(unknown)


def test_dead_letter_topics_are_listed_when_asked_for() -> None:
    some, everything = (set(run("topics", "list", *more, "-o", "name").stdout.split()) for more in ((), ("--all",)))
    assert some < everything
    assert f"{REQUESTS}.dlq" in everything - some


def test_every_error_of_a_dead_letter_is_a_line() -> None:
    record = InputRecord(topic=REQUESTS, partition=1, offset=5, append_time_ms=1_000, key=b"k", value=b"{}", headers=())
    found = [FieldError(field=field, message="is wrong", remedy="mend it") for field in ("metadata.name", "spec.replicas", "spec.seed")]
    letter, _ = dead_letter(record, found, source="test", time_ms=1)
    stored = InputRecord(topic=letter.topic, partition=0, offset=7, append_time_ms=1_000, key=b"k", value=letter.value, headers=tuple(letter.headers))
    rows = _rows(Letter(stored))
    assert [row[3] for row in rows] == ["metadata.name: is wrong", "spec.replicas: is wrong", "spec.seed: is wrong"]
    assert [row[1] for row in rows] == [7, "", ""]


def test_a_gateway_that_never_answers_is_asked_twice_and_then_named(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("opentinker.producers.cli.connect._TIMEOUT_S", 0.2)
    monkeypatch.setattr("opentinker.producers.client.aio._QUIET_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OPENTINKER_GATEWAY__URL", address)
        result = run("get", "jobs")
        silent.settimeout(0)
        assert [silent.accept()[0].close() for _ in range(2)] == [None, None]
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert isinstance(result.exception, errors.UnreachableError)
    assert exit_code_of(result.exception) == 1
    assert str(result.exception).startswith(f"no answer from {address}: nothing came within 0.2 s; is the gateway running?")
    assert "no answer yet (nothing came within 0.2 s); trying again (2 of 2)" in result.stderr


@pytest.mark.parametrize("words", [["replay"], ["audit", "a-job"], ["dlq", "list"], ["topics", "ensure"]])
def test_a_kafka_that_is_away_is_one_line(words: list[str], tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPENTINKER_")}
    environment = clean | {"OPENTINKER_HOME": str(tmp_path), "OPENTINKER_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    done = subprocess.run([str(Path(sys.executable).parent / "opentinker"), *words], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("opentinker: Kafka does not answer")


@pytest.mark.parametrize("words", [["limits", "list"], ["get", "jobs"], ["cordon", "node-1"], ["replay"]])
def test_a_configuration_that_cannot_be_read_is_invalid_input_for_every_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text("[[")
    raised = run(*words).exception
    assert isinstance(raised, Exception)
    assert exit_code_of(raised) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "say what it may have, for example"),
        (("--own", "gpus=4"), "did you mean gpu=N?"),
        (("--own", "gpu=many"), "gpu: 'many' is no whole number"),
        (("--own", "memory=lots"), "memory:"),
        (("--borrow", "gpu=1"), "give --own, for example --own gpu=4"),
        (("--weight", "0"), "--weight"),
    ],
)
def test_limits_that_are_none_are_refused(words: tuple[str, ...], says: str) -> None:
    result = run("limits", "set", "team-a", *words)
    assert result.exit_code == 2
    assert says in result.output


def test_limits_are_listed_with_what_is_held(gateway: Any) -> None:
    row = {
        "pool": "default", "namespace": "team-a", "queued": 3, "queuedMax": 200_000, "usual": True, "placed": 2, "runningMax": 4, "weightMilli": 2500,
        "holds": {"gpus": 2, "cpuMillis": 4000, "memoryBytes": 2**33}, "nominal": {"gpus": 4, "cpuMillis": None, "memoryBytes": None},
        "borrowing": {"gpus": None, "cpuMillis": None, "memoryBytes": None}, "lending": {"gpus": 1, "cpuMillis": None, "memoryBytes": None},
    }  # fmt: skip
    gateway({("GET", "/v1/limits"): (200, {"limits": [row]})})
    header, line = run("limits", "list").stdout.splitlines()
    assert " ".join(line.split()) == "team-a default 3 200,000 (usual) 2/4 2 GPU 4 CPU 8 GiB 2.5 4 GPU all 1 GPU"
    assert header.split()[:2] == ["NAMESPACE", "POOL"]


def test_what_libraries_say_of_connections_is_not_the_commands_word(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from opentinker.producers import cli; sys.argv = ['opentinker', 'topics', 'list', '-o', 'name']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "for name in ('asyncio', 'aiokafka.conn'): logging.getLogger(name).error('Fatal error on SSL protocol')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"OPENTINKER_HOME": str(tmp_path)}, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
