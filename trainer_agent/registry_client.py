"""The registry's HTTP API as trainers and agents use it: fence and resume, begin, upload, commit.

RegistryError                the registry or its store cannot do it now; tried again within a bound, then an infrastructure failure
├── UnauthorizedError        it does not accept the token: a fault of the node's or its settings', never of a job's (never tried again)
├── RefusedError             it will not do it, however often it is asked (never tried again)
├── FencedError              a newer attempt holds the fence: stop, and publish nothing (never tried again)
└── CheckpointConflictError  the same checkpoint id with another content (never tried again)

The attempt token goes to the registry only, never to the store: uploads use presigned URLs and carry no other credential.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from opentinker.schemas.messages.jobs import ModelReference
from opentinker.schemas.registry_api import (
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointFile,
    CheckpointSettled,
    CommitCheckpoint,
    CommittedFile,
    OpenAttempt,
    OpenedAttempt,
    PartETag,
    PartUpload,
)
from pydantic import BaseModel, ValidationError

__all__ = [
    "CheckpointConflictError",
    "FencedError",
    "Publication",
    "RefusedError",
    "RegistryClient",
    "RegistryError",
    "StagedFile",
    "UnauthorizedError",
    "check_token",
    "checkpoint_id_of",
    "open_attempt",
]

_CHECKPOINT_NAMESPACE = uuid.UUID("5c1e1d5e-6a34-5d0b-9a53-0d2f5f6f4f21")
_TRIES_MAX = 8  # with the delays below about 30 s: longer than a restart of the registry takes
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 8.0
_TRY_AGAIN = (408, 425, 429)  # client errors that time may mend
_ALREADY_THERE = (PartETag(number=1, etag="committed"),)  # parts of a file whose checkpoint is committed are asked for by no one

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class RegistryError(Exception):
    """The registry or its store could not be reached, or failed."""


class UnauthorizedError(RegistryError):
    """Who asks is not known there."""


class RefusedError(RegistryError):
    """The request itself was refused."""


class FencedError(RegistryError):
    """Another attempt has raised the fence: this one may publish nothing any more."""


class CheckpointConflictError(RegistryError):
    """A checkpoint of this id is committed with another content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A file of a checkpoint, ready to be uploaded."""

    name: str
    data: bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One checkpoint to publish. `succeeded`: the last of a run that a stop rule ended; the registry then makes a model version."""

    checkpoint_id: str
    global_step: int
    files: tuple[StagedFile, ...]
    metrics: Mapping[str, Any]
    lineage: Mapping[str, Any]
    final: bool = False
    succeeded: bool = False
    stop_reason: str | None = None


def checkpoint_id_of(job_uid: str, attempt_number: int, global_step: int, kind: str) -> str:
    """The same checkpoint has the same id however often it is sent: uuid5 of what it is of. `kind`: periodic or final."""
    return str(uuid.uuid5(_CHECKPOINT_NAMESPACE, f"{job_uid}\x00{attempt_number}\x00{global_step}\x00{kind}"))


class RegistryClient:
    """For a trainer: blocking, used from one thread at a time, bounded in tries and time."""

    def __init__(self, url: str, token: str, *, sleep: Callable[[float], None] = time.sleep, transport: httpx.BaseTransport | None = None) -> None:
        timeout = httpx.Timeout(30.0, connect=5.0)
        headers = {"Authorization": f"Bearer {token}"}
        self._registry = httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=transport, trust_env=False)
        self._store = httpx.Client(timeout=timeout, transport=transport, trust_env=False)
        self._sleep = sleep

    def publish(self, publication: Publication, may_commit: Callable[[], None] = lambda: None) -> ModelReference | None:
        """Begin, upload every part, commit. Repeating it is harmless. Returns the model version that it made, if it made one.

        `may_commit` is called just before the commit and may wait or raise: past its lease a trainer commits nothing.
        """
        files = tuple(CheckpointFile(name=file.name, size=len(file.data), sha256=file.sha256) for file in publication.files)
        begin = BeginCheckpoint(checkpoint_id=publication.checkpoint_id, global_step=publication.global_step, files=files)
        begun = self._post("/v1/checkpoints/begin", begin, CheckpointBegun)
        content = {file.name: file.data for file in publication.files}
        parts = {upload.name: self._upload(upload.name, content[upload.name], upload.parts) for upload in begun.uploads}
        commit = CommitCheckpoint(
            files=tuple(CommittedFile(**file.model_dump(), parts=parts.get(file.name, _ALREADY_THERE)) for file in files),
            metrics=dict(publication.metrics),
            final=publication.final,
            outcome="Succeeded" if publication.succeeded else None,
            stop_reason=publication.stop_reason,
            lineage=dict(publication.lineage),
        )
        may_commit()
        return self._post(f"/v1/checkpoints/{publication.checkpoint_id}/commit", commit, CheckpointSettled).model

    def download(self, url: str, size: int) -> bytes:
        """The bytes behind a presigned URL. Raises RegistryError when they are not `size` many."""

        def attempt() -> bytes:
            answer = self._store.get(url)
            _raise_for_store(answer)
            if len(answer.content) != size:
                raise RegistryError(f"a download has {len(answer.content)} bytes, not {size}")
            return answer.content

        return self._patiently(attempt)

    def close(self) -> None:
        self._registry.close()
        self._store.close()

    def _upload(self, name: str, data: bytes, parts: Sequence[PartUpload]) -> tuple[PartETag, ...]:
        sent, offset = [], 0
        for part in parts:
            sent.append(PartETag(number=part.number, etag=self._put(part.url, data[offset : offset + part.size])))
            offset += part.size
        if offset != len(data):
            raise RegistryError(f"the registry asked for {offset} bytes of {name}, which has {len(data)}")
        return tuple(sent)

    def _put(self, url: str, content: bytes) -> str:
        def attempt() -> str:
            answer = self._store.put(url, content=content)
            _raise_for_store(answer)
            return str(answer.headers["etag"])

        return self._patiently(attempt)

    def _post(self, path: str, body: BaseModel, kind: type[M]) -> M:
        def attempt() -> M:
            answer = self._registry.post(path, content=body.model_dump_json(exclude_none=True), headers=_JSON)
            _raise_for_registry(answer)
            return kind.model_validate_json(answer.content)

        return self._patiently(attempt)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        delay_s = _FIRST_DELAY_S
        for tried in range(1, _TRIES_MAX + 1):
            try:
                return attempt()
            except (FencedError, CheckpointConflictError, RefusedError, UnauthorizedError):
                raise
            except (httpx.HTTPError, RegistryError, ValidationError, KeyError) as error:
                if tried == _TRIES_MAX:
                    raise RegistryError(f"{type(error).__name__}: {error} (tried {tried} times)") from error
            self._sleep(delay_s * random.uniform(0.75, 1.25))  # noqa: S311 (spreads load, keeps no secret)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        raise AssertionError("unreachable")


_JSON = {"Content-Type": "application/json"}


async def open_attempt(http: httpx.AsyncClient, body: OpenAttempt) -> OpenedAttempt:
    """For an agent: raise the fence to this attempt's epoch; returns its token and where to go on. One try. Raises RegistryError and its kinds."""
    try:
        answer = await http.post("/v1/attempts/open", content=body.model_dump_json(), headers=_JSON)
        _raise_for_registry(answer)
        return OpenedAttempt.model_validate_json(answer.content)
    except (httpx.HTTPError, ValidationError) as error:
        raise RegistryError(f"open_attempt failed: {type(error).__name__}: {error}") from error


async def check_token(http: httpx.AsyncClient) -> None:
    """For an agent: whether the registry answers, and knows this agent. One try. Raises RegistryError and its kinds."""
    try:
        _raise_for_registry(await http.get("/v1/agents/check"))
    except httpx.HTTPError as error:
        raise RegistryError(f"{type(error).__name__}: {error}") from error


def _raise_for_registry(answer: httpx.Response) -> None:
    """An answer of the registry: a problem document, whose member `reason` tells `fenced` from `conflict` where the status is 409."""
    if answer.is_success:
        return
    try:
        document = answer.json()
    except ValueError:
        document = None
    members = document if isinstance(document, dict) else {}
    text = f"{_what(answer)}: {str(members.get('detail', ''))[:300]}"
    if answer.status_code == 409:
        raise (CheckpointConflictError if members.get("reason") == "conflict" else FencedError)(text)
    if answer.status_code in (401, 403):
        raise UnauthorizedError(text)
    if answer.is_client_error and answer.status_code not in _TRY_AGAIN:
        raise RefusedError(text)
    raise RegistryError(text)


def _raise_for_store(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    if answer.is_client_error and answer.status_code not in _TRY_AGAIN:
        raise RefusedError(_what(answer))  # for example an expired URL
    raise RegistryError(_what(answer))


def _what(answer: httpx.Response) -> str:
    """What was asked of whom. Without the query: in a presigned URL it is a credential."""
    return f"{answer.request.method} {answer.request.url.path} at {answer.request.url.host} answered {answer.status_code}"
