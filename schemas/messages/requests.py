"""The public door: what other systems publish to `jobs.requests` and read from `jobs.replies`.

A submission is a record of type `io.opentinker.SubmitTrainingJob.v1` whose value is the TrainingJob manifest itself (see `manifest.py`), so it has no
class here. Every record gets exactly one reply per reading, keyed by its `ce_id`; the same `ce_id` from the same source is the same job.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import FieldError
from ..records import Message
from .types import Count, JobUid, Name, Text

__all__ = ["SUBMIT_REQUEST_TYPE", "CancelTrainingJob", "JobAccepted", "JobRejected", "RequestReference"]

SUBMIT_REQUEST_TYPE = "io.opentinker.SubmitTrainingJob.v1"


class CancelTrainingJob(Message):
    """Ask for a job's end, by uid or by namespace and name (the newest of that name)."""

    namespace: Name = "default"
    name: Name | None = None
    job_uid: JobUid | None = None
    pool: Name = "default"

    @model_validator(mode="after")
    def _identified(self) -> CancelTrainingJob:
        if self.job_uid is None:
            raise ValueError("has no job_uid; add job_uid, which the JobAccepted reply holds")
        return self


class RequestReference(Message):
    """Which record a reply answers, also when it had no `ce_id`."""

    topic: Text
    partition: Count
    offset: Count
    ce_id: Text | None = None


class JobAccepted(Message):
    """The job is in the scheduler's log: it will run once, or end with a reason."""

    request: RequestReference
    job_uid: JobUid
    namespace: Name
    name: Name
    pool: Name


class JobRejected(Message):
    """Nothing was accepted. Each error names a field, what is wrong and what to do."""

    request: RequestReference
    errors: tuple[FieldError, ...] = Field(min_length=1)
