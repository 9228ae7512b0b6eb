"""What gateway, operator and ingress tell the scheduler (`jobs.commands`, key pool, explicit partition)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_serializer

from ..manifest import JobSpec
from ..records import Message
from .types import Digest, JobUid, Name, Text

__all__ = ["CancelJob", "SubmitJob"]


class SubmitJob(Message):
    """A validated job. `spec` is what was asked for; effective hyperparameters follow from it by `algorithms.py`."""

    job_uid: JobUid
    namespace: Name
    name: Name
    pool: Name
    labels: dict[str, str] = Field(default_factory=dict)
    spec: JobSpec
    spec_digest: Digest
    submitted_by: Text

    @field_serializer("spec")
    def _as_asked(self, spec: JobSpec) -> dict[str, Any]:
        # Defaults are left out, so that every reader can tell what was asked for from what was filled in.
        return spec.model_dump(mode="json", by_alias=True, exclude_unset=True)


class CancelJob(Message):
    job_uid: JobUid
    namespace: Name
    pool: Name
    requested_by: Text
    reason: Text = ""
