"""`make demo` as its module, in a home of its own, twice; then the stack alone, up and down."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import PROGRAM, ROOT
from opentinker.compose.local.home import Home
from opentinker.compose.local.processes import Recorded, find_marked, is_alive, read_records
from own_stack import clean_environment

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_the_demo_runs_twice_and_registers_two_versions(tmp_path: Path) -> None:
    environment = clean_environment(tmp_path)
    home = Home(tmp_path)
    try:
        for version in (1, 2):
            done = _run(environment, sys.executable, "-m", "opentinker.compose.local.demo", "--down")
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            assert f"  ok      model version registered: cartpole-v1 version {version}\n" in done.stdout
            assert re.search(r"  ok      mean return of the last 100 episodes at least 475: [45]\d\d", done.stdout)
            assert "FAILED" not in done.stdout
            assert _processes(home) == []
        done = _run(environment, str(PROGRAM), "up")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "the stack is ready" in done.stdout
        status = _run(environment, str(PROGRAM), "status")
        assert status.returncode == 0, status.stdout
        for address in re.findall(r"(?:page and API|API key|Kafka) +\S+", done.stdout):
            assert address in status.stdout
    finally:
        assert _run(environment, str(PROGRAM), "down").returncode == 0
    assert _processes(home) == []
    assert _run(environment, str(PROGRAM), "status").returncode == 1


def _processes(home: Home) -> list[Recorded]:
    return [record for record in read_records(home.pids) if is_alive(record)] + find_marked(home.read_stack()["stack_id"])


def _run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False)
