"""What README.md and docs/ show is run as it stands there: every `sh` command, every `python` block, every shown error.

Replaced are only addresses and the home (the stack under test has its own). NOT_RUN lists the commands that are left out, each with the test that
covers it. A command that goes on until it is stopped (BACKGROUND) is started, must print something, and is ended when its block is over.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from command import PROGRAM, ROOT, job, ok, opentinker, until
from opentinker.compose.runtime.settings import Settings
from opentinker.producers.cli import cli
from opentinker.schemas.topics import TOPICS

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {  # command: the test that covers it
    "make demo": "tests/e2e/test_demo.py::test_the_demo_runs_twice_and_registers_two_versions",
    "make test": "tests/e2e/test_readme.py::test_every_make_target_that_a_document_names_exists",  # this run is it
    "opentinker up": "tests/e2e/test_demo.py::test_the_demo_runs_twice_and_registers_two_versions",
    "opentinker down": "tests/e2e/test_demo.py::test_the_demo_runs_twice_and_registers_two_versions",
    ". .venv/bin/activate": "tests/e2e/test_readme.py::test_every_command_of_a_block_runs",  # the environment's bin is on the path
    "pip install confluent-kafka": "tests/e2e/test_examples.py::test_confluent_with_default_settings_is_answered_in_every_pool",
}
BACKGROUND = {  # command: (what it prints, its exit code once the block is over)
    r"opentinker watch \S+": (r"Starting|Running", 10),  # the block cancels its job
    r"opentinker logs -f \S+": (r"rank \d of 4 begins", 0),
    r"python examples/other_systems/consume_metrics.py .*": (r"step +[\d,]+ mean return", 0),
    r"python examples/other_systems/consume_alerts.py .*": (r"DeadLettered: ", 0),
}
ENDS_WITH_ITS_JOB = ("opentinker watch", "opentinker logs -f")  # the others are interrupted, as a person would
LANGUAGES = {"sh", "python", "json", ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Without comments; a line that ends in a backslash goes on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#\s.*", "", line).strip())]


def blocks(language: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in _fenced(document) if block.language == language]


def _fenced(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(document=document, line=text[: match.start()].count("\n") + 1, language=match[1].strip(), text=match[2])


def _named(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


# Quick: the documents name things that exist.


def test_no_block_escapes_by_its_language() -> None:
    used = {block.language for document in DOCUMENTS for block in _fenced(document)}
    assert used <= LANGUAGES, "write shell commands as sh: only these are run here"


def test_what_is_not_run_stands_in_a_document_and_names_a_test_that_exists() -> None:
    shown = {command for block in blocks("sh") for command in block.commands()}
    assert set(NOT_RUN) <= shown, "an entry that no document needs any more"
    for test in NOT_RUN.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`(?:\$ )?make ([a-z][a-z-]*)", document.read_text())) | {
            command.split()[1] for block in blocks("sh") if block.document == document for command in block.commands() if command.startswith("make ")
        }
        assert named <= targets, document


def test_commands_in_the_text_exist_with_their_options() -> None:
    seen = 0
    for document in DOCUMENTS:
        for words in re.findall(r"`opentinker ([^`]+)`", document.read_text()):
            _check_usage(words.split())
            seen += 1
    assert seen > 5


def _check_usage(words: list[str]) -> None:
    command: click.Command = cli
    context = click.Context(command)
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest.pop(0))
        assert found is not None, f"opentinker {' '.join(words)}: no such command"
        command = found
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word for word in rest if word.startswith("-")} <= known, f"opentinker {' '.join(words)}"


def test_variables_that_documents_name_are_settings() -> None:
    special = {"OPENTINKER_API_KEY"}  # read by the client, which has no settings
    groups = {name: field.annotation for name, field in Settings.model_fields.items()}
    for document in DOCUMENTS:
        for line in document.read_text().splitlines():
            group = ""
            for variable, suffix in re.findall(r"`(OPENTINKER_[A-Z0-9_]+)|`…__([A-Z0-9_]+)", line):
                name = variable or f"{group}__{suffix}"
                group, _, field = name.partition("__")
                known = getattr(groups.get(group.removeprefix("OPENTINKER_").lower()), "model_fields", groups if not field else {})
                word = field.lower() or name.removeprefix("OPENTINKER_").lower()
                assert name in special or word in known or (not field and word in groups), f"{document.name}: {name}"


def test_topics_and_files_that_documents_name_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for topic in re.findall(r"`(opentinker\.[a-z.]+\.v\d)`", text):
            assert topic in TOPICS, f"{document.name}: {topic}"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_the_manifest_shown_is_the_example() -> None:
    shown = [json.loads(block.text) for block in blocks("json")]
    assert json.loads((ROOT / "examples" / "cartpole-v1.json").read_text()) in shown


# On the whole stack.


@pytest.fixture
def environment(full_stack: Any) -> Iterator[dict[str, str]]:
    """What a person's shell has after `. .venv/bin/activate`; the example's name is free before and after."""
    _free_the_name(full_stack)
    yield full_stack.environment(PATH=f"{PROGRAM.parent}:{os.environ['PATH']}")
    _free_the_name(full_stack)


def _free_the_name(stack: Any) -> None:
    for live in json.loads(ok(opentinker(stack, "get", "jobs", "-o", "json"))):
        if live["metadata"]["name"] == "cartpole-v1" and live["status"]["phase"] not in ("Completed", "Failed", "Cancelled"):
            uid = live["metadata"]["uid"]
            opentinker(stack, "cancel", uid)
            until(lambda uid=uid: job(stack, uid)["status"]["phase"] in ("Completed", "Failed", "Cancelled"), f"the end of {uid}")


def _as_here(command: str, stack: Any) -> str:
    """The document's addresses are the usual ones; this stack has its own."""
    return (
        command.replace("127.0.0.1:9092", stack.settings.kafka.bootstrap_servers)
        .replace("http://127.0.0.1:8080", stack.settings.gateway.url)
        .replace("~/.opentinker", str(stack.home))
    )


@pytest.mark.slow
@_named([block for block in blocks("sh") if set(block.commands()) - set(NOT_RUN)])
def test_every_command_of_a_block_runs(block: Block, full_stack: Any, environment: dict[str, str], tmp_path: Path) -> None:
    assignments, malformed = "", tmp_path / "malformed"
    background: list[_Running] = []
    malformed.write_text("no JSON")
    try:
        for command in block.commands():
            if command in NOT_RUN:
                continue
            script = f"{assignments}{_as_here(command, full_stack)}"
            if re.fullmatch(r"(\w+=\S+|\w+=\$\(.*?\))(\s+(\w+=\S+|\w+=\$\(.*?\)))*", command):
                assignments = f"{script}\n"
            elif expected := next((value for pattern, value in BACKGROUND.items() if re.fullmatch(pattern, command)), None):
                background.append(_Running(command, script, environment, *expected, tmp_path / f"output-{len(background)}"))
                _await_output(background[-1], full_stack, malformed)
            else:
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
                )
                assert done.returncode == 0, f"{block.name}: {command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
                assert done.stdout.strip(), f"{block.name}: {command} prints nothing"
                if command.startswith("curl"):
                    assert json.loads(done.stdout)["metadata"]["name"] == "cartpole-v1"
        for each in background:
            each.end()
    finally:
        for each in background:
            each.process.kill()


class _Running:
    """A command that goes on until it is stopped."""

    def __init__(self, command: str, script: str, environment: dict[str, str], prints: str, code: int, output: Path) -> None:
        self.command, self.prints, self._code, self._output = command, prints, code, output
        with output.open("wb") as file:
            self.process = subprocess.Popen(["bash", "-c", f"exec {script}"], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def printed(self) -> str:
        return self._output.read_text()

    def end(self) -> None:
        if not self.command.startswith(ENDS_WITH_ITS_JOB):
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(60)
        assert code == self._code, f"{self.command} exited {code}\n{self.printed()[-1500:]}"
        assert "Traceback" not in self.printed()


def _await_output(running: _Running, stack: Any, malformed: Path) -> None:
    """The topics' consumers hear only what comes: let something come, again and again until they listen."""
    deadline, provoked = time.monotonic() + 90, 0.0
    while not re.search(running.prints, running.printed()):
        assert time.monotonic() < deadline, f"{running.command} prints {running.printed()!r}"
        assert running.process.poll() is None, f"{running.command} ended\n{running.printed()}"
        if "consume_" in running.command and time.monotonic() - provoked > 10:
            provoked = time.monotonic()
            ok(opentinker(stack, "submit", "-f", "examples/quick.json"))
            _publish(stack, malformed)
        time.sleep(0.2)


def _publish(stack: Any, path: Path) -> None:
    script = ROOT / "examples" / "other_systems" / "publish_confluent.py"
    done = subprocess.run(
        [sys.executable, str(script), "--bootstrap", stack.settings.kafka.bootstrap_servers, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "errors" in json.loads(done.stdout)


@pytest.mark.slow
@_named(blocks("python"))
def test_every_python_block_runs(block: Block, environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", block.text], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{block.name}\n{done.stdout}\n{done.stderr[-1500:]}"
    assert "cartpole-v1" in done.stdout


@pytest.mark.slow
@_named([block for block in blocks("") if block.text.startswith("$ ")])
def test_every_shown_answer_is_the_answer(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    manifest = json.loads((ROOT / "examples" / "cartpole-v1.json").read_text())
    manifest["spec"]["replica"] = manifest["spec"].pop("replicas")
    (tmp_path / "job.json").write_text(json.dumps(manifest))
    command, _, shown = block.text.removeprefix("$ ").partition("\n")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout + done.stderr == shown
