"""Where a stack keeps things, and its secrets.

One directory holds all of it: data, logs, run files, secrets, `config.toml` (what every process and the CLI read) and `stack.json` (ports and
ids that stay the same between runs). Directories with secrets are 0700 and files in them 0600, also when an older run left them wider.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.compose.local.errors import HomeUnusable, StackBusy

__all__ = ["SECRETS", "Home", "render_toml", "write_private"]

_LOCK_WAIT_S = 180.0  # longer than a first `up` that fetches nothing; a first fetch prints progress, so nobody waits blindly
_DROPPED_BY_FRESH = ("data", "agents", "run", "work", "cache")  # never `secrets`: keys that clients hold go on working


def _api_key() -> str:
    return "otk_" + secrets.token_urlsafe(32)  # 43 characters after the prefix


def _token() -> str:
    return secrets.token_urlsafe(32)


SECRETS: Mapping[str, Callable[[], str]] = {
    "api-key": _api_key,
    "registry-agent-token": _token,
    "postgres-password": lambda: secrets.token_hex(24),  # hex: it stands in a DSN as it is
    "s3-access-key": lambda: secrets.token_hex(10).upper(),
    "s3-secret-key": lambda: secrets.token_hex(20),
    "supervisor-password": lambda: secrets.token_hex(20),
}


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under one home. Making the object touches nothing; `prepare` makes the directories."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def pids(self) -> Path:
        return self.root / "run" / "pids"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def config_file(self) -> Path:
        return self.root / "config.toml"

    @property
    def stack_file(self) -> Path:
        return self.root / "stack.json"

    def log_file(self, program: str) -> Path:
        return self.logs / f"{program}.log"

    def prepare(self) -> None:
        """Make what is missing. Raises HomeUnusable where the file system refuses."""
        try:
            for directory in (self.root, self.data, self.logs, self.run, self.pids, self.secrets):
                directory.mkdir(parents=True, exist_ok=True)
            for private in (self.run, self.secrets):
                private.chmod(0o700)
            self.data.chmod(0o711)  # each part's own directory is 0700; where root starts PostgreSQL as another user, that user must come through
            for file in (self.config_file, self.stack_file):
                if file.is_dir():
                    raise HomeUnusable(f"{file} is a folder, where `opentinker up` keeps a file; move it away")
        except OSError as error:
            raise HomeUnusable(f"cannot use {self.root} as OPENTINKER_HOME: {error.strerror}; choose another directory") from error

    def secret(self, name: str) -> str:
        """The secret of that name, made on first use."""
        path = self.secrets / name
        if path.exists():
            path.chmod(0o600)
            return path.read_text(encoding="utf-8").strip()
        value = SECRETS[name]()
        write_private(path, value + "\n")
        return value

    def read_stack(self) -> dict[str, Any]:
        """What earlier runs chose. An unreadable file counts as none: ports are chosen again and the data is still there."""
        try:
            loaded = json.loads(self.stack_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def write_stack(self, stack: Mapping[str, Any]) -> None:
        write_private(self.stack_file, json.dumps(stack, indent=2, sort_keys=True) + "\n")

    def drop_data(self) -> None:
        """Forget everything but keys, ports and logs. Refuses a directory in which no stack ever ran."""
        if not self.stack_file.exists():
            return
        for name in _DROPPED_BY_FRESH:
            shutil.rmtree(self.root / name, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the home: one `up` or `down` at a time. Raises StackBusy after a bounded wait."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_WAIT_S
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StackBusy(f"another `opentinker up` or `down` holds {self.root}; wait for it or stop it") from None
                    time.sleep(0.1)
            yield
        finally:
            os.close(descriptor)  # gives the lock up; the file stays, so that everyone locks the same one


def write_private(path: Path, text: str) -> None:
    """Replace the file in one move, readable by its owner alone."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    beside.replace(path)


def render_toml(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML of flat groups. JSON's strings, numbers, booleans and lists are TOML's too, so no library is needed."""
    lines = ["# Written by `opentinker up`. Change settings by OPENTINKER_* variables; the next `up` writes this file again.\n"]
    for group, fields in groups.items():
        lines.append(f"[{group}]")
        lines.extend(f"{name} = {json.dumps(value)}" for name, value in fields.items())
        lines.append("")
    return "\n".join(lines)
