"""Ports for servers that tests start."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable

__all__ = ["await_open", "free_port"]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_open(port: int, process: subprocess.Popen[bytes], said: Callable[[], str], timeout_s: float = 60.0) -> None:
    """Wait until the process listens. Fails with what it `said` if it ends before, or does not listen in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, said()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on port {port}: {said()}")
