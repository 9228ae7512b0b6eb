"""examples/other_systems on the whole stack: programs that know Kafka and nothing of ours publish jobs, read answers, metrics and alerts.

Answers are due two seconds after a request by the broker's own stamps, whatever the request holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, job, ok, opentinker, until
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from opentinker.producers.client import Client, ConflictError
from opentinker.schemas.topics import REPLIES, REQUESTS

pytestmark = [pytest.mark.stack, pytest.mark.slow]

EXAMPLES = ROOT / "examples" / "other_systems"
SUBMIT = "io.opentinker.SubmitTrainingJob.v1"
ANSWER_DUE_MS = 2_000
POOLS = ("default", "gpu-eu", "spot", "a-pool-that-has-no-node")


@pytest.fixture
def kcat() -> str:
    """The program; without it a laptop skips and CI fails."""
    found = shutil.which("kcat")
    if found is None:
        (pytest.fail if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip)("kcat is not installed: apt-get install kcat")
    return str(found)


def manifest(directory: Path, name: str, **spec: Any) -> Path:
    path = directory / f"{name}.json"
    base = {"algorithm": "PPO", "environment": "CartPole-v1", "stop": {"totalSteps": 4096}}
    document = {"apiVersion": "opentinker.io/v1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": base | spec}
    path.write_text(json.dumps(document))
    return path


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def bootstrap(stack: Any) -> str:
    return str(stack.settings.kafka.bootstrap_servers)


def publish_with_kcat(stack: Any, path: Path, ce_id: str, key: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(EXAMPLES / "publish_kcat.sh"), str(path), ce_id, *([key] if key else [])]
    return subprocess.run(command, env=stack.environment(BOOTSTRAP=bootstrap(stack)), capture_output=True, text=True, timeout=60, check=False)


def publish_with_confluent(stack: Any, paths: list[Path], ids: list[str]) -> subprocess.CompletedProcess[str]:
    named = [word for ce_id in ids for word in ("--id", ce_id)]
    command = [sys.executable, str(EXAMPLES / "publish_confluent.py"), "--bootstrap", bootstrap(stack), *named, *map(str, paths)]
    return subprocess.run(command, env=stack.environment(), capture_output=True, text=True, timeout=60, check=False)


# What the topics say of it.


def records(stack: Any, topic: str) -> list[Message]:
    """Everything the topic holds now."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap(stack), "group.id": unique("test"), "enable.auto.commit": False, "enable.partition.eof": True}
    )
    try:
        numbers = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
        found, ended = [], set()
        while len(ended) < len(numbers):
            record = consumer.poll(30)
            assert record is not None, f"{topic} does not answer"
            if record.error():
                ended.add(record.partition())
            else:
                found.append(record)
        return found
    finally:
        consumer.close()


def place(record: Message) -> tuple[str, int, int]:
    return record.topic(), record.partition(), record.offset()


def answers_in_time(stack: Any, wanted: Callable[[Message], bool]) -> list[tuple[Message, dict[str, Any]]]:
    """The requests that match, each with its answer, which came within two seconds."""
    asked = [record for record in records(stack, REQUESTS) if wanted(record)]
    assert asked
    replies: dict[tuple[str, int, int], Message] = {}

    def all_answered() -> bool:
        for reply in records(stack, REPLIES):
            said = json.loads(reply.value())["request"]
            replies.setdefault((said["topic"], said["partition"], said["offset"]), reply)
        return all(place(record) in replies for record in asked)

    until(all_answered, "an answer to every request", timeout_s=20, pause_s=0.5)
    for record in asked:
        took_ms = replies[place(record)].timestamp()[1] - record.timestamp()[1]
        assert took_ms <= ANSWER_DUE_MS, f"the answer to {place(record)} took {took_ms} ms"
    return [(record, json.loads(replies[place(record)].value())) for record in asked]


def header(record: Message, name: str) -> str:
    return next((value.decode() for key, value in record.headers() or [] if key == name), "")


def cancelled(stack: Any, uids: list[str]) -> None:
    """Leave nothing that waits in a pool without nodes."""
    with Client(stack.settings.gateway.url, stack.settings.api_key_file.read_text().strip()) as client:
        for uid in uids:
            with contextlib.suppress(ConflictError):  # over already
                client.cancel(uid)
        for uid in uids:
            until(lambda uid=uid: client.job(uid).status.terminal, f"the end of {uid}")


def test_kcat_with_default_settings_is_answered_in_every_pool_with_and_without_a_key(full_stack: Any, kcat: str, tmp_path: Path) -> None:
    uids = []
    for number, pool in enumerate((*POOLS, "default")):
        name, ce_id = unique("kcat"), unique("kcat-id")
        answer = json.loads(ok(publish_with_kcat(full_stack, manifest(tmp_path, name, pool=pool), ce_id, "any key" if number % 2 else "")))
        assert (answer["name"], answer["pool"], answer["request"]["ce_id"]) == (name, pool, ce_id)
        uids.append(answer["job_uid"])
    mine = answers_in_time(full_stack, lambda record: header(record, "ce_id").startswith("kcat-id-"))
    assert {answer["job_uid"] for _, answer in mine} == set(uids)
    keys = {record.key() for record in records(full_stack, REQUESTS) if header(record, "ce_id").startswith("kcat-id-")}
    assert keys == {None, b"any key"}
    cancelled(full_stack, uids)


def test_confluent_with_default_settings_is_answered_in_every_pool(full_stack: Any, tmp_path: Path) -> None:
    paths = [manifest(tmp_path, unique("confluent"), pool=pool) for pool in POOLS]
    ids = [unique("confluent-id") for _ in paths]
    answers = [json.loads(line) for line in ok(publish_with_confluent(full_stack, paths, ids)).splitlines()]
    assert {(answer["ce_id"], answer["pool"]) for answer in answers} == set(zip(ids, POOLS, strict=True))
    assert len(answers_in_time(full_stack, lambda record: header(record, "ce_id") in ids)) == len(ids)
    cancelled(full_stack, [answer["job_uid"] for answer in answers])


MALFORMED: dict[str, tuple[str, bool, str]] = {  # value, with headers, the field that the answer names
    "not JSON": ('{"apiVersion": "opentinker.io/v1", ', True, ""),
    "missing headers": ('{"apiVersion": "opentinker.io/v1"}', False, "header ce_type"),
    "bad field": (
        '{"apiVersion":"opentinker.io/v1","kind":"TrainingJob","metadata":{"name":"bad"},'
        '"spec":{"algorithm":"PPO","environment":"CartPole-v1","replicas":0}}',
        True,
        "spec.replicas",
    ),
}


def said_headers(ce_id: str) -> dict[str, str]:
    return {"ce_specversion": "1.0", "ce_id": ce_id, "ce_type": SUBMIT, "ce_source": "tests", "content-type": "application/json"}


def send_with_kcat(stack: Any, value: bytes, headers: dict[str, str], directory: Path) -> None:
    path = directory / unique("value")
    path.write_bytes(value)
    said = [word for name, text in headers.items() for word in ("-H", f"{name}={text}")]
    subprocess.run(["kcat", "-b", bootstrap(stack), "-P", "-t", REQUESTS, *said, str(path)], capture_output=True, timeout=60, check=True)


def send_with_confluent(stack: Any, value: bytes, headers: dict[str, str], directory: Path) -> None:
    producer = Producer({"bootstrap.servers": bootstrap(stack)})
    producer.produce(REQUESTS, value, headers={name: text.encode() for name, text in headers.items()})
    assert producer.flush(20) == 0


@pytest.mark.parametrize("send", [send_with_kcat, send_with_confluent])
def test_every_malformed_request_is_answered_and_kept_and_stops_nothing(
    full_stack: Any, send: Callable[..., None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if send is send_with_kcat:
        request.getfixturevalue("kcat")
    before = {place(record) for record in records(full_stack, REQUESTS)}
    for value, with_headers, _ in MALFORMED.values():
        send(full_stack, value.encode(), said_headers(unique("malformed")) if with_headers else {}, tmp_path)
    good = manifest(tmp_path, unique("good"), pool="spot").read_bytes()
    send(full_stack, good, said_headers(unique("good")), tmp_path)

    answers = answers_in_time(full_stack, lambda record: place(record) not in before)
    by_value = {record.value().decode(): answer for record, answer in answers}
    for value, _, field in MALFORMED.values():
        assert by_value[value]["errors"][0]["field"] == field
        assert by_value[value]["errors"][0]["remedy"]
    cancelled(full_stack, [by_value[good.decode()]["job_uid"]])
    letters = json.loads(ok(opentinker(full_stack, "dlq", "list", "--topic", REQUESTS, "-o", "json")))
    assert {letter["value"] for letter in letters} >= {value for value, _, _ in MALFORMED.values()}


def test_the_same_id_twice_is_one_job(full_stack: Any, kcat: str, tmp_path: Path) -> None:
    name, ce_id = unique("twice"), unique("twice-id")
    path = manifest(tmp_path, name)
    first, second = (json.loads(ok(publish_with_kcat(full_stack, path, ce_id, key))) for key in ("", "another key"))
    assert first["job_uid"] == second["job_uid"]
    until(lambda: job(full_stack, first["job_uid"])["status"]["phase"] == "Completed", "the job's end")
    third = json.loads(ok(publish_with_kcat(full_stack, path, ce_id)))  # also when it is over
    assert third["job_uid"] == first["job_uid"]
    assert [
        each["metadata"]["uid"] for each in json.loads(ok(opentinker(full_stack, "get", "jobs", "-o", "json"))) if each["metadata"]["name"] == name
    ] == [first["job_uid"]]


def test_a_refused_manifest_is_an_exit_code_of_both_examples(full_stack: Any, kcat: str, tmp_path: Path) -> None:
    path = manifest(tmp_path, unique("refused"), replicas=0)
    for done in (publish_with_kcat(full_stack, path, unique("refused")), publish_with_confluent(full_stack, [path], [])):
        assert done.returncode == 1
        assert json.loads(done.stdout)["errors"][0]["field"] == "spec.replicas"


# Consumers.


@contextlib.contextmanager
def running(stack: Any, script: str, *arguments: str, output: Path) -> Iterator[Callable[[], list[str]]]:
    """The example as a process that goes on; gives its lines so far. It ends as a person ends it, without a traceback."""
    command = [sys.executable, str(EXAMPLES / script), "--bootstrap", bootstrap(stack), *arguments]
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=stack.environment(), stdout=file, stderr=subprocess.STDOUT)
    try:
        yield lambda: [line for line in output.read_text().splitlines() if not line.startswith("waiting for ")]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, output.read_text()
        assert "Traceback" not in output.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_metrics_consumer_sees_samples_of_a_running_job(full_stack: Any, tmp_path: Path) -> None:
    uid = ok(opentinker(full_stack, "submit", "-f", str(manifest(tmp_path, unique("seen"), stop={"totalSteps": 10**9})), "-o", "name")).strip()
    try:
        with running(full_stack, "consume_metrics.py", "--job", uid, output=tmp_path / "metrics") as lines:
            samples = until(lambda: found if len(found := lines()) >= 5 else [], "five samples")
            until(lambda: job(full_stack, uid)["status"]["phase"] == "Running", "a heartbeat that tells of it")  # samples may be faster
    finally:
        cancelled(full_stack, [uid])
    steps = [re.fullmatch(rf"{uid} step +([\d,]+) mean return +(\d+\.\d\d|-)", line) for line in samples[:5]]
    assert all(steps), samples
    numbers = [int(step[1].replace(",", "")) for step in steps if step]
    assert numbers == sorted(numbers)


def test_the_alert_consumer_sees_a_dead_letter_and_a_lost_node(full_stack: Any, tmp_path: Path) -> None:
    node = unique("doomed")
    with running(full_stack, "consume_alerts.py", "--from-beginning", output=tmp_path / "alerts") as lines:
        send_with_confluent(full_stack, b"no JSON", said_headers(unique("alert")), tmp_path)
        until(lambda: any(line.startswith("DeadLettered: opentinker.jobs.requests.v1 offset") for line in lines()), "the dead letter")

        agent = start_agent(full_stack, node, tmp_path / "agent.log")
        try:
            until(lambda: state_of(full_stack, node) == "Ready", f"{node} is ready")
        finally:
            agent.kill()
            agent.wait()
        until(lambda: any(line.startswith(f"NodeLost: node {node} of pool {node} is lost: ") for line in lines()), "the lost node")
        assert state_of(full_stack, node) == "Lost"

        agent = start_agent(full_stack, node, tmp_path / "agent.log")
        try:
            until(lambda: f"NodeRecovered: node {node} of pool {node} is back" in lines(), "the node is back")
        finally:
            agent.terminate()
            agent.wait(30)


def start_agent(stack: Any, node: str, log: Path) -> subprocess.Popen[bytes]:
    """One more agent, alone in a pool, whose lease is short."""
    settings = {
        "NODE": node,
        "POOL": node,
        "HEARTBEAT_INTERVAL_S": "0.5",
        "LEASE_TIMEOUT_S": "4",
        "LEASE_MARGIN_S": "1",
        "CPU": "1",
        "MEMORY": "1Gi",
        "DIRECTORY": str(log.parent / node),
    }
    environment = stack.environment(**{f"OPENTINKER_AGENT__{name}": value for name, value in settings.items()})
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "opentinker.trainer_agent"], env=environment, cwd=log.parent, stdout=file, stderr=file)


def state_of(stack: Any, node: str) -> str:
    nodes = json.loads(ok(opentinker(stack, "get", "nodes", "-o", "json")))
    return next((str(each["state"]) for each in nodes if each["node"] == node), "unknown")


# What a newcomer gets wrong: one line, exit status 2. Nothing of ours needs to run for it.

QUICK = str(ROOT / "examples" / "quick.json")


def nobody_answers(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The example, given an address where nothing listens."""
    command = [str(EXAMPLES / example), *arguments] if example.endswith(".sh") else [sys.executable, str(EXAMPLES / example), *arguments]
    if not example.endswith(".sh"):
        command += ["--bootstrap", "127.0.0.1:1"]
    environment = {**os.environ, "BOOTSTRAP": "127.0.0.1:1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("example", ["consume_metrics.py", "consume_alerts.py", "publish_confluent.py", "publish_kcat.sh"])
def test_an_example_that_is_given_a_wrong_address_says_so_in_one_line(example: str, request: pytest.FixtureRequest) -> None:
    if example == "publish_kcat.sh":
        request.getfixturevalue("kcat")
    done = nobody_answers(example, *([QUICK] if example.startswith("publish") else []))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no answer from Kafka at 127.0.0.1:1")
    assert done.stderr.count("\n") == 1, done.stderr[:500]


@pytest.mark.parametrize("example", ["publish_confluent.py", "publish_kcat.sh"])
def test_a_manifest_that_is_not_there_is_named(example: str) -> None:
    done = nobody_answers(example, "not-there.json")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "no file not-there.json\n")


def test_more_ids_than_manifests_are_refused() -> None:
    done = nobody_answers("publish_confluent.py", QUICK, "--id", "one", "--id", "two")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("error: more --id than manifests: each names one manifest, in turn\n")


@pytest.mark.parametrize(
    ("example", "topic"), [("consume_metrics.py", "opentinker.training.metrics.v1"), ("consume_alerts.py", "opentinker.alerts.v1")]
)
def test_a_consumer_says_what_it_waits_for(full_stack: Any, example: str, topic: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running(full_stack, example, *(["--job", "none"] if "metrics" in example else []), output=output):
        until(lambda: output.read_text().startswith(f"waiting for {example[8:-3]} on {topic}; Ctrl-C ends this\n"), "the line that says so")
