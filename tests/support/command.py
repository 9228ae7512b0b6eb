"""`opentinker` and the services' addresses, for tests against a running stack."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PROGRAM = Path(sys.executable).parent / "opentinker"
ROOT = Path(__file__).resolve().parents[2]


def opentinker(
    stack: Any, *arguments: str, stdin: str | bytes | None = None, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in the stack's environment, from the repository's root."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [str(PROGRAM), *arguments], input=data, capture_output=True, timeout=timeout_s, env=stack.environment(**environment), cwd=ROOT, check=False
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def ok(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args} exited {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    return done.stdout


def job(stack: Any, uid: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ok(opentinker(stack, "get", "job", uid, "-o", "json")))
    return found


def until(condition: Callable[[], T], what: str, timeout_s: float = 90, pause_s: float = 0.25) -> T:
    """The first true value of `condition`; fails with `what` after a generous time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not seen within {timeout_s:g} s: {what}"
        time.sleep(pause_s)
