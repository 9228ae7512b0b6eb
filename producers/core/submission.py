"""A manifest as a command. Every door (REST, Kafka, operator) goes through `plan_submission`, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from opentinker.schemas.errors import FieldError, InvalidManifest
from opentinker.schemas.manifest import IMPLICIT_STEP_BUDGET, TrainingJob, dns_label, effective_values, parse_manifest, spec_digest
from opentinker.schemas.messages import SubmitJob
from opentinker.schemas.records import OutputRecord, encode, job_uid_of
from opentinker.schemas.topics import COMMANDS, partition_of

__all__ = ["Known", "Repeat", "command_record", "effective_rows", "judge_repeat", "namespace_of", "plan_submission", "queue_full"]

_SUFFIX_CHARACTERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a job: enough to tell a repetition from another job."""

    job_uid: str
    spec_digest: str
    terminal: bool


class Repeat(StrEnum):
    """What a submission is in the light of what is known."""

    NEW = "New"
    SAME = "Same"  # the same key, the same payload: the same job, whatever became of it
    OTHER_PAYLOAD = "OtherPayload"  # the same key, another payload
    NAME_TAKEN = "NameTaken"  # another live job has the name


def plan_submission(
    document: object, *, ce_source: str, ce_id: str, submitted_by: str, environments: Collection[str] | None, suffix: str | None = None
) -> SubmitJob:
    """The command that a manifest asks for. Raises InvalidManifest.

    `suffix` completes `generateName`; by default it follows from the job's uid, so that the same submission has the same name whoever repeats it.
    """
    job = parse_manifest(document, environments)
    job_uid = job_uid_of(ce_source, ce_id)
    name = job.metadata.name or _generated(job, suffix or job_uid.replace("-", "")[:_SUFFIX_CHARACTERS])
    return SubmitJob(
        job_uid=job_uid,
        namespace=job.metadata.namespace,
        name=name,
        pool=job.spec.pool,
        labels=job.metadata.labels,
        spec=job.spec,
        spec_digest=spec_digest(job),
        submitted_by=submitted_by,
    )


def namespace_of(document: object) -> str | None:
    """The namespace that a manifest names, before it is checked; None if it is none, for which `plan_submission` refuses the manifest."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    namespace = metadata.get("namespace", "default") if isinstance(metadata, dict) else "default"
    try:
        return dns_label(namespace)
    except ValueError:
        return None


def _generated(job: TrainingJob, suffix: str) -> str:
    name = f"{job.metadata.generate_name}{suffix}"
    try:
        return dns_label(name)
    except ValueError as error:
        message, _, remedy = str(error).partition("; ")
        raise InvalidManifest([FieldError(field="metadata.generateName", message=message, remedy=remedy)]) from None


def judge_repeat(command: SubmitJob, same_key: Known | None, same_name: Known | None) -> Repeat:
    """What the submission is, given the job that its key stands for and the newest job of its name (None: there is none)."""
    if same_key is not None:
        return Repeat.SAME if same_key.spec_digest == command.spec_digest else Repeat.OTHER_PAYLOAD
    if same_name is not None and not same_name.terminal:
        return Repeat.NAME_TAKEN
    return Repeat.NEW


def queue_full(command: SubmitJob, queued: int, queued_max: int | None) -> FieldError | None:
    """What is wrong with one more job of this namespace, or None. `queued_max` None: it is not known how many may wait, and the scheduler judges alone."""
    if queued_max is None or queued < queued_max:
        return None
    message = f"{command.namespace} has {queued:,} jobs waiting in pool {command.pool} and may have {queued_max:,}"
    remedy = "submit again when some have started, cancel some, or ask an administrator for more (opentinker limits set)"
    return FieldError(field="metadata.namespace", message=message, remedy=remedy)


def command_record(command: Any, *, ce_id: str, ce_source: str, time_ms: int, traceparent: str, partitions: int) -> OutputRecord:
    """A command as a record on the partition of its pool. `time_ms`: when it was asked for, which decides whether it is stale."""
    value, headers = encode(command, id=ce_id, source=ce_source, subject=command.job_uid, time_ms=time_ms, traceparent=traceparent)
    return OutputRecord(topic=COMMANDS, key=command.pool, value=value, headers=headers, partition=partition_of(command.pool, partitions))


def effective_rows(document: object, environments: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Every value that the job would run with: {field, value, source}. Raises InvalidManifest."""
    job = parse_manifest(document, environments)
    rows: list[dict[str, Any]] = [{"field": field, "value": value, "source": source} for field, value, source in effective_values(job)]
    implied = _implicit_stop(job, environments)
    for row in rows:
        if row["value"] is not None:
            continue
        if row["field"] == "spec.output.model":
            row |= {"value": job.metadata.name, "source": "job name"}
        elif row["field"] == "spec.seed":
            row["source"] = "drawn from the job's uid"
        elif row["field"] in implied:
            row["value"], row["source"] = implied[row["field"]]
    return rows


def _implicit_stop(job: TrainingJob, environments: Mapping[str, float | None]) -> dict[str, tuple[Any, str]]:
    """What ends a job that names no stop rule, as the trainer decides it."""
    if job.spec.stop.given:
        return {}
    name = job.spec.environment.id
    threshold = environments.get(name)
    if threshold is not None:
        return {"spec.stop.targetReturn": (threshold, f"reward_threshold of {name}, since no stop rule is given")}
    return {"spec.stop.totalSteps": (IMPLICIT_STEP_BUDGET, f"default, since no stop rule is given and {name} has no reward_threshold")}
