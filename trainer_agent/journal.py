"""The agent's own memory: the processes that it started and the reports that Kafka has not acknowledged. Nothing else, and no token.

One JSON file, replaced whole and synced at each change; changes are rare (an attempt starts or ends). A lock on the folder keeps a second agent out.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog
from opentinker.schemas.messages.placements import StartAttempt
from opentinker.schemas.messages.reports import AttemptEnded
from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["FolderError", "Journal", "JournalEntry", "JournalledReplica"]


_INCARNATION = re.compile(r"([0-9]{13})-([0-9a-f]+)")  # what else stands in the file is nobody's name


class FolderError(Exception):
    """The folder cannot be this agent's: another agent uses it, or it is none that can be written."""


class JournalledReplica(BaseModel):
    """A process as it can be recognised again: a pid alone may be somebody else's by now."""

    model_config = ConfigDict(frozen=True)

    rank: int
    devices: tuple[int, ...] = ()
    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat
    token_sha256: str


class JournalEntry(BaseModel):
    """One part whose processes may be there."""

    model_config = ConfigDict(frozen=True)

    command: StartAttempt
    marker: str  # in the environment of every process of the part, and of its children
    replicas: tuple[JournalledReplica, ...]


class _Document(BaseModel):
    version: int = 1
    boot_id: str
    entries: tuple[JournalEntry, ...] = ()
    reports: tuple[AttemptEnded, ...] = ()


@dataclass(frozen=True, slots=True)
class Remembered:
    """What an earlier incarnation left. Entries of another boot are left out: their processes died with it."""

    entries: tuple[JournalEntry, ...]
    reports: tuple[AttemptEnded, ...]
    lost: tuple[JournalEntry, ...]  # of another boot


class Journal:
    """The file and the lock of one folder."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        """Take the folder. Raises FolderError."""
        self._path, self._boot_id = directory / "journal.json", boot_id
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.chmod(directory, 0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FolderError(f"{error.filename}: {error.strerror}; set OPENTINKER_AGENT__DIRECTORY to a folder that this user may write") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise FolderError(f"another agent runs in {directory}; give this one another OPENTINKER_AGENT__DIRECTORY") from None

    def next_incarnation(self, now_ms: int, suffix: str) -> tuple[str, str | None]:
        """A name for this run of the agent that sorts behind all before it in this folder, also when the machine's clock was set back; and the one before."""
        path = self._path.with_name("incarnation")
        try:
            text = path.read_text()
        except (OSError, ValueError):
            text = ""
        known = _INCARNATION.fullmatch(text)
        before = int(known[1]) if known else 0
        made = f"{max(now_ms, before + 1):013d}-{suffix}"
        try:
            path.with_suffix(".partial").write_text(made)
            os.replace(path.with_suffix(".partial"), path)
        except OSError as error:  # a full disk: the clock alone has to do
            structlog.get_logger().warning("the incarnation could not be written down", path=str(path), error=str(error))
        return made, text if known else None

    def read(self) -> Remembered:
        """What is written down. A file that cannot be read is set aside: its processes find no agent and end by themselves."""
        try:
            document = _Document.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return Remembered((), (), ())
        except (OSError, ValidationError) as error:
            aside = self._path.with_suffix(".unreadable")
            structlog.get_logger().error("the journal cannot be read; it is set aside", path=str(aside), error=str(error))
            os.replace(self._path, aside)
            return Remembered((), (), ())
        if document.boot_id != self._boot_id:
            return Remembered((), document.reports, document.entries)
        return Remembered(document.entries, document.reports, ())

    def write(self, entries: Iterable[JournalEntry], reports: Iterable[AttemptEnded]) -> None:
        """Replace what is written down; returns once it is on disk."""
        document = _Document(boot_id=self._boot_id, entries=tuple(entries), reports=tuple(reports))
        partial = self._path.with_suffix(".partial")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(json.dumps(document.model_dump(mode="json", by_alias=True), separators=(",", ":")).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)

    def close(self) -> None:
        os.close(self._lock)
