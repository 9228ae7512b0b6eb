"""Where a trainer's checkpoints go: to the registry, or to a folder when there is none. A publisher thread does it, so that training goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from opentinker.schemas.messages.jobs import ModelReference
from opentinker.schemas.registry_api import ResumeFrom
from opentinker.trainer_agent.registry_client import FencedError, Publication, RegistryError, StagedFile

__all__ = ["FolderStore", "Publisher", "Store", "fetch", "staged"]

_FOLDER_KEEP = 3
_FINAL_TRIES = 3  # of a whole publication, each with its own patience: the last checkpoint is worth waiting for


class Store(Protocol):
    """RegistryClient, or its twin below."""

    def publish(self, publication: Publication, may_commit: Callable[[], None] = ...) -> ModelReference | None: ...
    def download(self, url: str, size: int) -> bytes: ...
    def close(self) -> None: ...


class FolderStore:
    """Checkpoints as folders `<directory>/<global_step>-<kind>`: complete or not there, the newest three kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def publish(self, publication: Publication, may_commit: Callable[[], None] = lambda: None) -> ModelReference | None:
        partial = self._directory / f".partial-{publication.checkpoint_id}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for file in publication.files:
            (partial / file.name).write_bytes(file.data)
        lineage = {"checkpoint_id": publication.checkpoint_id, "metrics": dict(publication.metrics), "lineage": dict(publication.lineage)}
        (partial / "lineage.json").write_text(json.dumps(lineage, indent=1))
        may_commit()
        final = self._directory / f"{publication.global_step:015d}-{'final' if publication.final else 'periodic'}"
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        for old in sorted(path for path in self._directory.iterdir() if not path.name.startswith("."))[:-_FOLDER_KEEP]:
            shutil.rmtree(old)
        return None

    def download(self, url: str, size: int) -> bytes:
        data = Path(unquote(urlparse(url).path)).read_bytes()
        if len(data) != size:
            raise RegistryError(f"{url} has {len(data)} bytes, not {size}")
        return data

    def close(self) -> None:
        return


def staged(files: dict[str, bytes]) -> tuple[StagedFile, ...]:
    """The files with their digests, by name."""
    return tuple(StagedFile(name=name, data=data, sha256=hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items()))


def fetch(store: Store, resume: ResumeFrom) -> dict[str, bytes]:
    """The files of a checkpoint, verified. Raises RegistryError."""
    files = {}
    for file in resume.files:
        data = store.download(file.url, file.size)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise RegistryError(f"{file.name} of checkpoint {resume.checkpoint_id} is damaged: its SHA-256 differs from the manifest")
        files[file.name] = data
    return files


class Publisher:
    """Publishes one checkpoint at a time, in a thread; a failed periodic one is told and forgotten, since the next follows."""

    def __init__(self, store: Store, may_commit: Callable[[], None], committed: Callable[[Publication], None]) -> None:
        self._store, self._may_commit, self._committed = store, may_commit, committed
        self._thread: threading.Thread | None = None
        self.fenced = False

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, publication: Publication) -> None:
        """Publish in the background. Not to be called while busy."""
        assert not self.busy
        self._thread = threading.Thread(target=self._periodic, args=(publication,), name="publisher", daemon=True)
        self._thread.start()

    def finish(self, publication: Publication) -> ModelReference | None:
        """Publish the last checkpoint, after any that is under way. Raises RegistryError, FencedError and what `may_commit` raises."""
        if self._thread is not None:
            self._thread.join()
        for tried in range(1, _FINAL_TRIES + 1):
            try:
                model = self._store.publish(publication, self._may_commit)
                break
            except FencedError:
                self.fenced = True
                raise
            except RegistryError:
                if tried == _FINAL_TRIES:
                    raise
        self._committed(publication)
        return model

    def _periodic(self, publication: Publication) -> None:
        try:
            self._store.publish(publication, self._may_commit)
        except FencedError as error:
            self.fenced = True
            _say(f"checkpoint {publication.global_step}: {error}")
        except Exception as error:
            _say(f"checkpoint {publication.global_step} was not committed: {type(error).__name__}: {error}")
        else:
            self._committed(publication)


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())
