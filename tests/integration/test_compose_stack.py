"""The embedded parts, for real: they start, answer, keep their data, say why they fail, and leave no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from opentinker.compose.local import status
from opentinker.compose.local.errors import PartFailed, PortTaken, StackError
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import UpOptions, settings_of
from opentinker.compose.local.processes import find_marked, is_alive, read_records
from opentinker.compose.local.programs import AgentShape
from opentinker.compose.local.progress import SilentProgress
from opentinker.compose.local.ready import s3_client
from opentinker.compose.local.stack import down, restart, up
from opentinker.compose.local.status import read_status
from opentinker.compose.runtime.settings import Settings
from own_stack import clean_environment

pytestmark = pytest.mark.stack
_PARTS = UpOptions(only=("kafka", "postgres", "s3"), usual_ports=False, ends_with_caller=True)
_POSTGRES = dataclasses.replace(_PARTS, only=("postgres",))
_QUIET = SilentProgress()
_TOPIC = "opentinker.alerts.v1"


@pytest.fixture
def home() -> Iterator[Home]:
    directory = Path(tempfile.mkdtemp(prefix="opentinker-stack-"))
    yield Home(directory)
    down(Home(directory), _QUIET)
    shutil.rmtree(directory, ignore_errors=True)


def _processes(home: Home) -> list[Any]:
    """Everything that belongs to the home: recorded, or marked by its environment."""
    recorded = [record for record in read_records(home.pids) if is_alive(record)]
    return recorded + find_marked(home.read_stack().get("stack_id", "none"))


def _wait_for(condition: Any, what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def test_every_part_keeps_its_data_over_a_stop_and_fresh_drops_it(home: Home) -> None:
    up(home, _PARTS, _QUIET)
    asyncio.run(_write_everywhere(settings_of(home.root)))
    ports = dict(home.read_stack()["ports"])

    down(home, _QUIET)
    assert _processes(home) == []
    up(home, _PARTS, _QUIET)

    assert home.read_stack()["ports"] == ports
    assert asyncio.run(_read_everywhere(settings_of(home.root))) == (1, ["kept"], b"kept")

    key = home.secret("api-key")
    up(home, dataclasses.replace(_POSTGRES, fresh=True), _QUIET)
    assert asyncio.run(_tables(settings_of(home.root))) == []
    assert home.secret("api-key") == key


async def _write_everywhere(settings: Settings) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers)
    await producer.start()
    await producer.send_and_wait(_TOPIC, b"kept", partition=0)
    await producer.stop()
    connection = await asyncpg.connect(settings.postgres.dsn.get_secret_value())
    await connection.execute("CREATE TABLE kept (word text)")
    await connection.close()
    async with s3_client(settings) as client:
        await client.put_object(Bucket=settings.s3.bucket, Key="kept", Body=b"kept")


async def _read_everywhere(settings: Settings) -> tuple[int, list[str], bytes]:
    consumer = AIOKafkaConsumer(bootstrap_servers=settings.kafka.bootstrap_servers)
    await consumer.start()
    place = TopicPartition(_TOPIC, 0)
    records = (await consumer.end_offsets([place]))[place]
    await consumer.stop()
    async with s3_client(settings) as client:
        body = await (await client.get_object(Bucket=settings.s3.bucket, Key="kept"))["Body"].read()
    return records, await _tables(settings), body


async def _tables(settings: Settings) -> list[str]:
    connection = await asyncpg.connect(settings.postgres.dsn.get_secret_value())
    try:
        rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    finally:
        await connection.close()
    return [row["tablename"] for row in rows]


def test_postgres_asks_for_the_password(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    port = home.read_stack()["ports"]["postgres"]
    with pytest.raises(asyncpg.InvalidPasswordError):
        asyncio.run(_connect(port, "guess"))


async def _connect(port: int, password: str) -> None:
    await asyncpg.connect(host="127.0.0.1", port=port, user="opentinker", password=password, database="opentinker")


def test_secrets_and_settings_are_readable_by_their_owner_alone(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    for path in (*home.secrets.iterdir(), home.config_file, home.stack_file, *home.run.glob("*.json"), home.run / "supervisord.conf"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert home.secrets.stat().st_mode & 0o777 == 0o700


def test_up_on_a_running_stack_changes_nothing_and_adds_what_is_missing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    up(home, _POSTGRES, _QUIET)
    monkeypatch.setenv("PATH", f"/another/shell:{os.environ['PATH']}")
    first = {program.name: program.pid for program in read_status(home).programs}
    up(home, dataclasses.replace(_PARTS, only=("postgres", "s3")), _QUIET)
    second = {program.name: program.pid for program in read_status(home).programs}
    assert second["postgres"] == first["postgres"]
    assert second["s3"] > 0
    up(home, _POSTGRES, _QUIET)
    assert {program.name: program.pid for program in read_status(home).programs} == second, "what is left out stays as it is"


def test_a_killed_program_is_started_again_and_status_shows_its_new_pid(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    before = _program(home, "postgres")
    os.kill(before.pid, signal.SIGKILL)
    _wait_for(lambda: _program(home, "postgres").state == "running" and _program(home, "postgres").pid != before.pid, "the restart")
    restart(home, "postgres")
    _wait_for(lambda: _program(home, "postgres").state == "running", "postgres")
    with pytest.raises(StackError, match="no program 'postgre'"):
        restart(home, "postgre")


def test_another_program_that_answers_on_a_port_is_not_taken_for_ours_and_a_crash_loop_is_shown(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    up(home, _PARTS, _QUIET)
    port = home.read_stack()["ports"]["registry"]
    with _answers_everything(port):
        with pytest.raises(PartFailed, match="its port is taken by another program"):
            up(home, dataclasses.replace(_PARTS, only=("registry",)), _QUIET)
        restart(home, "registry")
        _wait_for(lambda: _program(home, "registry").state == "restarting", "the third end")
        shown = _program(home, "registry")
        assert shown.restarts >= 3
        assert "its port is taken by another program" in shown.reason
    monkeypatch.setattr(status, "_SETTLED_S", 2.0)  # so as not to wait that long
    _wait_for(lambda: _program(home, "registry").state == "running", "the port is free again", 90)


def test_a_part_that_hangs_is_not_shown_as_running(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    pid = _program(home, "postgres").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        shown = _program(home, "postgres")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (shown.state, shown.reason) == ("unready", "no answer yet")
    _wait_for(lambda: _program(home, "postgres").state == "running", "its answer")


def test_supervisord_that_is_told_to_end_ends_agents_first_and_parts_last(home: Home) -> None:
    up(home, dataclasses.replace(_PARTS, only=(*_PARTS.only, "registry", "agent-1")), _QUIET)
    os.kill(_program(home, "supervisord").pid, signal.SIGTERM)
    _wait_for(lambda: not _processes(home), "the end of every process", 90)
    ended = re.findall(r" stopped: (\S+)", (home.logs / "supervisord.log").read_text())
    assert ended[:2] == ["agent-1", "registry"]
    assert set(ended[2:]) == set(_PARTS.only)


@contextlib.contextmanager
def _answers_everything(port: int) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def test_a_port_that_moved_is_told(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    down(home, _QUIET)
    told: list[str] = []
    progress = SilentProgress()
    progress.say = told.append  # type: ignore[method-assign]
    port = home.read_stack()["ports"]["postgres"]
    with _answers_everything(port):
        up(home, dataclasses.replace(_POSTGRES, usual_ports=True), progress)
    assert any(f"port {port} of postgres is held by process {os.getpid()}" in line for line in told), told
    assert home.read_stack()["ports"]["postgres"] != port


def _program(home: Home, name: str) -> Any:
    return next(program for program in read_status(home).programs if program.name == name)


def test_killing_the_supervisor_leaves_nothing_after_down(home: Home) -> None:
    up(home, _PARTS, _QUIET)
    os.kill(_program(home, "supervisord").pid, signal.SIGKILL)
    down(home, _QUIET)
    assert _processes(home) == []


def test_up_after_a_killed_supervisor_starts_anew(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    before = _program(home, "postgres").pid
    os.kill(_program(home, "supervisord").pid, signal.SIGKILL)
    up(home, _POSTGRES, _QUIET)
    assert _program(home, "postgres").pid != before
    assert _program(home, "postgres").state == "running"


def test_an_interrupted_up_leaves_no_process(home: Home) -> None:
    launcher = _launch(home, "up", "--only", "kafka,postgres,s3")
    _wait_for(lambda: len(_processes(home)) >= 2, "the first programs")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, output
    assert "Traceback" not in output
    assert _processes(home) == []


def test_a_killed_launcher_leaves_nothing_after_down(home: Home) -> None:
    launcher = _launch(home, "up", "--only", "kafka,postgres,s3")
    _wait_for(lambda: len(_processes(home)) >= 2, "the first programs")
    launcher.kill()
    launcher.communicate(timeout=10)
    down(home, _QUIET)
    assert _processes(home) == []


def test_a_part_that_cannot_start_is_named_with_its_cause_and_its_last_lines(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    down(home, _QUIET)
    (home.data / "postgres" / "PG_VERSION").write_text("12\n")
    with pytest.raises(PartFailed, match=r"postgres did not start: its data is of another version; `opentinker up --fresh`") as failure:
        up(home, _POSTGRES, _QUIET)
    assert any("incompatible" in line for line in failure.value.last_lines)
    assert _processes(home) == []


def test_a_port_asked_for_by_number_and_taken_is_refused_before_anything_starts(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} for postgres is in use"):
            up(home, dataclasses.replace(_POSTGRES, ports={"postgres": port}), _QUIET)
    assert _processes(home) == []


def test_a_service_that_cannot_start_is_named_and_takes_the_rest_down_with_it(home: Home) -> None:
    options = dataclasses.replace(_PARTS, only=("kafka", "postgres", "s3", "agent-1"), agents=AgentShape(memory="much"))
    with pytest.raises(PartFailed) as failure:
        up(home, options, _QUIET)
    assert failure.value.part == "agent-1"
    assert failure.value.last_lines
    assert _processes(home) == []


def test_a_stack_of_tests_ends_with_its_caller_however_that_ends(home: Home) -> None:
    code = (
        "import os, signal; from pathlib import Path; from opentinker.compose.local.home import Home;"
        "from opentinker.compose.local.layout import UpOptions; from opentinker.compose.local.progress import SilentProgress;"
        "from opentinker.compose.local.stack import up;"
        f"up(Home(Path({str(home.root)!r})), UpOptions(only=('postgres', 's3'), usual_ports=False, ends_with_caller=True), SilentProgress());"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert result.returncode == -signal.SIGKILL
    _wait_for(lambda: not _processes(home), "the end of every process")


def test_two_stacks_run_side_by_side(home: Home) -> None:
    directory = Path(tempfile.mkdtemp(prefix="opentinker-other-"))
    other = Home(directory)
    try:
        up(home, _POSTGRES, _QUIET)
        up(other, _POSTGRES, _QUIET)
        assert not set(home.read_stack()["ports"].values()) & set(other.read_stack()["ports"].values())
        down(other, _QUIET)
        assert _program(home, "postgres").state == "running"
    finally:
        down(other, _QUIET)
        shutil.rmtree(directory, ignore_errors=True)


def test_an_outside_service_takes_the_place_of_a_part(home: Home, stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_POSTGRES__DSN", stack.settings.postgres.dsn.get_secret_value())
    monkeypatch.setenv("OPENTINKER_KAFKA__BOOTSTRAP_SERVERS", stack.settings.kafka.bootstrap_servers)
    up(home, dataclasses.replace(_PARTS, only=("s3",)), _QUIET)
    assert {program.name for program in read_status(home).programs} == {"supervisord", "s3"}
    monkeypatch.undo()
    assert settings_of(home.root).kafka.bootstrap_servers == stack.settings.kafka.bootstrap_servers


def test_status_as_json_names_pid_state_ports_and_memory(home: Home) -> None:
    up(home, _POSTGRES, _QUIET)
    with _launched(home, "status", "-o", "json") as (code, output):
        shown = {program["name"]: program for program in json.loads(output)["programs"]}
    assert code == 0
    assert shown["postgres"]["state"] == "running"
    assert shown["postgres"]["ports"] == {"postgres": home.read_stack()["ports"]["postgres"]}
    assert shown["postgres"]["pss_bytes"] > 1_000_000
    assert Path(f"/proc/{shown['postgres']['pid']}").exists()


def _launch(home: Home, *arguments: str) -> subprocess.Popen[str]:
    environment = clean_environment(home.root)
    command = [sys.executable, "-m", "opentinker.compose.local", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextlib.contextmanager
def _launched(home: Home, *arguments: str) -> Iterator[tuple[int, str]]:
    process = _launch(home, *arguments)
    output, _ = process.communicate(timeout=60)
    yield process.returncode, output
