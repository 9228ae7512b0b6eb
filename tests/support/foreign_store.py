"""An S3 server that is not ours (moto), as a process of its own: for what must hold with any store that settings name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from opentinker.compose.runtime.settings import S3Settings
from ports import await_open, free_port
from pydantic import SecretStr

__all__ = ["foreign_store"]


@contextmanager
def foreign_store() -> Iterator[S3Settings]:
    """Settings of a fresh, empty store; it ends with the block."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    try:
        await_open(port, process, lambda: "the foreign store ended, or does not listen")
        yield S3Settings(
            endpoint_url=f"http://127.0.0.1:{port}", access_key_id=SecretStr("somebody"), secret_access_key=SecretStr("else"), bucket="labs-own-bucket"
        )  # fmt: skip
    finally:
        process.terminate()
        process.wait(15)
