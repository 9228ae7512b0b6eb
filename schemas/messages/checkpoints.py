"""What the registry remembers anew (`checkpoints`, key job_uid), published through its outbox."""

from __future__ import annotations

from pydantic import Field

from ..records import Message
from .types import Count, Digest, JobUid, Millis, Name, Uid

__all__ = ["CheckpointCommitted", "ModelVersionRegistered"]


class CheckpointCommitted(Message):
    job_uid: JobUid
    namespace: Name
    attempt_number: int = Field(ge=1)
    lease_epoch: int = Field(ge=1)
    checkpoint_id: Uid
    global_step: Count
    size_bytes: Count
    digest: Digest  # of the manifest
    final: bool
    time_ms: Millis


class ModelVersionRegistered(Message):
    namespace: Name
    model: Name
    version: int = Field(ge=1)
    job_uid: JobUid
    checkpoint_id: Uid
    time_ms: Millis
