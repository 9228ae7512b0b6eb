"""What the registry remembers anew (`checkpoints`, key job_uid), published through its outbox."""

from __future__ import annotations

from ..records import Message
from .types import Count, Digest, JobUid, Millis, Name, Ordinal, Uid

__all__ = ["CheckpointCommitted", "ModelVersionRegistered"]


class CheckpointCommitted(Message):
    job_uid: JobUid
    namespace: Name
    attempt_number: Ordinal
    lease_epoch: Ordinal
    checkpoint_id: Uid
    global_step: Count
    size_bytes: Count
    digest: Digest  # of the manifest
    final: bool
    time_ms: Millis


class ModelVersionRegistered(Message):
    namespace: Name
    model: Name
    version: Ordinal
    job_uid: JobUid
    checkpoint_id: Uid
    time_ms: Millis
