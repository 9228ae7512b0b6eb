"""What agents and trainers say to the registry over HTTP, and what it answers.

Authority: `open` needs the agent token; everything that writes a checkpoint needs the attempt token that `open` returned. Bytes of checkpoints never
pass through the registry: it hands out presigned URLs and verifies what lies in the store. Unknown fields are refused on the way in.

A refusal is a problem document (RFC 9457) whose member `reason` is for programs: `unauthorised` 401, `notfound` 404, `fenced` 409 (stop: a later epoch
owns the job), `conflict` 409 (the id stands for other contents), `gone` 410 (the upload was collected), `invalidcheckpoint` 422 (with `errors`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .messages.jobs import ModelReference
from .messages.training import MetricValue
from .messages.types import Count, Digest, JobUid, Name, NodeName, Text

__all__ = [
    "CHECKPOINT_BYTES_MAX",
    "CHECKPOINT_FILES_MAX",
    "REQUIRED_MEMBERS",
    "BeginCheckpoint",
    "CheckpointBegun",
    "CheckpointFile",
    "CheckpointSettled",
    "CommitCheckpoint",
    "CommittedFile",
    "DownloadFile",
    "FileUpload",
    "OpenAttempt",
    "OpenedAttempt",
    "PartETag",
    "PartUpload",
    "RestrictedUid",
    "ResumeFrom",
]

# What every algorithm must save for a resume to be honest: weights, optimizer, and the counters and RNG state beside them.
REQUIRED_MEMBERS = ("weights.safetensors", "optimizer.safetensors", "state.json")
CHECKPOINT_FILES_MAX = 512  # one file of environment state per replica of a gang of 315, and room
CHECKPOINT_BYTES_MAX = 4 * 2**40
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


def _file_name(value: str) -> str:
    if not _FILE_NAME.fullmatch(value) or ".." in value:
        shown = value[:40]
        raise ValueError(f"{shown!r} is not a plain file name; use up to 128 of A-Z, a-z, 0-9, '.', '_', '-' without a leading dot or '..'")
    return value


def _restricted(value: str) -> str:
    if not _UID.fullmatch(value) or ".." in value:
        raise ValueError(f"{value[:40]!r} is not an id; use up to 64 of A-Z, a-z, 0-9, '.', '_', ':', '-', starting with a letter or digit")
    return value


FileName = Annotated[str, AfterValidator(_file_name)]
RestrictedUid = Annotated[str, AfterValidator(_restricted)]  # becomes part of an object's key
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OpenAttempt(_Wire):
    """Raise the fence of a job to (attempt_number, lease_epoch): everything lower is refused for ever."""

    job_uid: JobUid
    namespace: Name
    attempt_number: int = Field(ge=1, lt=2**31)
    lease_epoch: int = Field(ge=1, lt=2**53)
    node: NodeName
    world_size: int = Field(ge=1, le=4096)
    spec_digest: Digest
    model_name: Name


class DownloadFile(_Wire):
    name: str
    size: int
    sha256: str
    url: str


class ResumeFrom(_Wire):
    checkpoint_id: str
    global_step: int
    attempt_number: int
    files: tuple[DownloadFile, ...]


class OpenedAttempt(_Wire):
    attempt_token: str
    resume: ResumeFrom | None


class CheckpointFile(_Wire):
    name: FileName
    size: int = Field(ge=1, le=CHECKPOINT_BYTES_MAX)
    sha256: Sha256


class BeginCheckpoint(_Wire):
    checkpoint_id: RestrictedUid
    global_step: Count
    files: tuple[CheckpointFile, ...] = Field(min_length=1, max_length=CHECKPOINT_FILES_MAX)


class PartUpload(_Wire):
    number: int
    size: int
    url: str


class FileUpload(_Wire):
    name: str
    upload_id: str
    parts: tuple[PartUpload, ...]


class CheckpointBegun(_Wire):
    """`committed`: this very checkpoint is there already; nothing to upload."""

    uploads: tuple[FileUpload, ...]
    committed: bool = False


class PartETag(_Wire):
    number: int = Field(ge=1, le=10_000)
    etag: str = Field(min_length=1, max_length=256)


class CommittedFile(CheckpointFile):
    parts: tuple[PartETag, ...] = Field(min_length=1, max_length=10_000)


class CommitCheckpoint(_Wire):
    """`final` with outcome Succeeded also registers a model version. `lineage`: effective configuration, versions, resume class."""

    files: tuple[CommittedFile, ...] = Field(min_length=1, max_length=CHECKPOINT_FILES_MAX)
    metrics: dict[Annotated[str, Field(max_length=64)], MetricValue] = Field(default_factory=dict, max_length=128)
    final: bool = False
    outcome: Literal["Succeeded"] | None = None
    stop_reason: Text | None = None
    lineage: dict[str, Any] = Field(default_factory=dict, max_length=128)


class CheckpointSettled(_Wire):
    """The checkpoint is committed. The same answer comes however often it is asked."""

    checkpoint_id: str
    model: ModelReference | None
