"""`opentinker access` where there is nothing to give rights on, or nobody who may: one line that says what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest


async def run(stack: Any, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", "from opentinker.producers.cli import main; main()", "access", *arguments]
    environment = stack.environment(**variables)
    return await asyncio.to_thread(subprocess.run, line, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", [["check"], ["apply", "--passwords", "passwords"]], ids=["check", "apply"])
async def test_a_kafka_without_an_authorizer_is_told(stack: Any, tmp_path: Any, command: list[str]) -> None:
    arguments = [str(tmp_path / part) if part == "passwords" else part for part in command]
    done = await run(stack, *arguments)
    assert done.returncode == 1
    assert "this Kafka has no authorizer; set authorizer.class.name on its brokers" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_kafka_that_does_not_answer_is_told(stack: Any) -> None:
    done = await run(stack, "check", OPENTINKER_KAFKA__BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert done.returncode == 1
    assert "Kafka does not answer" in done.stderr
    assert "Traceback" not in done.stderr
