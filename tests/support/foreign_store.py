"""An S3 server that is not ours (moto), as a process of its own: for what must hold with any store that settings name."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentinker.compose.runtime.settings import S3Settings
from pydantic import SecretStr

__all__ = ["foreign_store"]


@contextmanager
def foreign_store() -> Iterator[S3Settings]:
    """Settings of a fresh, empty store; it ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    try:
        _await_open(port, process)
        yield S3Settings(
            endpoint_url=f"http://127.0.0.1:{port}", access_key_id=SecretStr("somebody"), secret_access_key=SecretStr("else"), bucket="labs-own-bucket"
        )  # fmt: skip
    finally:
        process.terminate()
        process.wait(15)


def _await_open(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(150):
        assert process.poll() is None, "the foreign store ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the foreign store does not listen")
