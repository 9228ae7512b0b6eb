"""What a step hands out: messages for other topics, and the helpers that make them from entities.

`Effects` collects outputs during one step; the shell turns them into records with ids that follow from the input's place, so that publishing them
again is seen to be the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opentinker.schemas.messages import alerts, jobs, placements
from opentinker.schemas.messages.jobs import Cause, JobPhase, ModelReference, Progress
from opentinker.schemas.records import Message
from opentinker.schemas.topics import ALERTS, EVENTS, PLACEMENTS, STATUS

from .entities import Attempt, Job, Part, Training
from .lifecycle import JobMove, move_job
from .policy import COMMAND_VALID_MS, STOP_GRACE_S
from .state import State

__all__ = ["Effects", "Output", "progress_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A message to publish. `latency_since_ms`: the broker time from which a placement's scheduling latency counts."""

    topic: str
    key: str
    message: Message
    traceparent: str = ""
    latency_since_ms: int | None = None


class Effects:
    """One step's view of the world: the state it may write, the input's time and place, and the outputs so far."""

    def __init__(self, state: State, cause: Cause) -> None:
        self.state = state
        self.cause = cause
        self.now = state.clock.now_ms
        self.outputs: list[Output] = []
        self._status_of: dict[str, None] = {}

    @property
    def broker_ms(self) -> int:
        return self.cause.append_time_ms

    # Jobs

    def change_job(self, job: Job, event: type[jobs.JobEvent], fields: dict[str, Any], **changes: Any) -> Job:
        """Write a job's next revision, tell its event, and its status at the end of the step."""
        job = replace(job, revision=job.revision + 1, **changes)
        self.state.put(job)
        message = event(
            job_uid=job.uid,
            namespace=job.namespace,
            name=job.name,
            pool=job.pool,
            revision=job.revision,
            time_ms=self.broker_ms,
            cause=self.cause,
            **fields,
        )
        self.outputs.append(Output(topic=EVENTS, key=job.uid, message=message, traceparent=job.traceparent))
        self.status_changed(job.uid)
        return job

    def move_job(self, job: Job, move: JobMove, event: type[jobs.JobEvent], fields: dict[str, Any], **changes: Any) -> Job:
        """`change_job` along one legal move."""
        return self.change_job(job, event, fields, phase=move_job(job.phase, move), **changes)

    def status_changed(self, job_uid: str) -> None:
        self._status_of[job_uid] = None

    def finish(self) -> list[Output]:
        """Add one status per changed job, as it is now."""
        for uid in self._status_of:
            job = self.state.jobs.get(uid)
            if job is not None:
                self.outputs.append(Output(topic=STATUS, key=uid, message=_status(job, self.state.attempts.get(uid), self.broker_ms)))
        return self.outputs

    # Commands to agents

    def start_command(self, job: Job, attempt: Attempt, part: Part) -> None:
        """Publish StartAttempt for one part, with the number it has."""
        needs = job.needs
        message = placements.StartAttempt(
            **self._command(job, attempt, part, part.start_seq),
            replicas=tuple(placements.ReplicaAssignment(rank=rank, devices=devices) for rank, devices in zip(part.ranks, part.devices, strict=True)),
            world_size=attempt.size,
            cpu_millis=needs.cpu_millis,
            memory_bytes=needs.memory_bytes,
            rendezvous=placements.Rendezvous(address=attempt.address, port=attempt.port),
            seed=job.seed,
            spec=job.spec,
            spec_digest=job.spec_digest,
            model=job.model,
        )
        since = job.placeable_ms if attempt.placed_at == self.now else None  # not when it is sent again
        self.outputs.append(Output(topic=PLACEMENTS, key=job.uid, message=message, traceparent=job.traceparent, latency_since_ms=since))

    def stop_command(self, job: Job, attempt: Attempt, part: Part) -> None:
        assert attempt.stop is not None
        message = placements.StopAttempt(
            **self._command(job, attempt, part, part.stop_seq), reason=attempt.stop.told, message=attempt.stop_message, grace_s=STOP_GRACE_S
        )
        self.outputs.append(Output(topic=PLACEMENTS, key=job.uid, message=message, traceparent=job.traceparent))

    def resume_command(self, job: Job, attempt: Attempt, part: Part, heartbeat_sequence: int) -> None:
        message = placements.ResumeAttempt(**self._command(job, attempt, part, part.resume_seq), heartbeat_sequence=heartbeat_sequence)
        self.outputs.append(Output(topic=PLACEMENTS, key=job.uid, message=message, traceparent=job.traceparent))

    def stop_unknown(self, node: str, incarnation: str, seq: int, job_uid: str, attempt_number: int, lease_epoch: int) -> None:
        """Stop something that this state does not have as live."""
        job = self.state.jobs.get(job_uid)
        message = placements.StopAttempt(
            node=node,
            incarnation=incarnation,
            command_seq=seq,
            job_uid=job_uid,
            namespace=job.namespace if job else "default",
            name=job.name if job else "unknown",
            attempt_number=attempt_number,
            lease_epoch=lease_epoch,
            valid_until_ms=self.broker_ms + COMMAND_VALID_MS,
            reason=placements.StopReason.UNKNOWN_ATTEMPT,
            grace_s=0,
        )
        self.outputs.append(Output(topic=PLACEMENTS, key=job_uid, message=message))

    def _command(self, job: Job, attempt: Attempt, part: Part, seq: int) -> dict[str, Any]:
        return {
            "node": part.node,
            "incarnation": part.incarnation,
            "command_seq": seq,
            "job_uid": job.uid,
            "namespace": job.namespace,
            "name": job.name,
            "attempt_number": attempt.attempt_number,
            "lease_epoch": attempt.lease_epoch,
            "valid_until_ms": self.broker_ms + COMMAND_VALID_MS,
        }

    # Alerts

    def alert(
        self, subject: str, message: alerts.NodeLost | alerts.NodeNameTaken | alerts.NodeRecovered | alerts.BrakeEngaged | alerts.BrakeReleased
    ) -> None:
        self.outputs.append(Output(topic=ALERTS, key=subject, message=message))


def progress_of(training: Training) -> Progress:
    """Training as the messages show it."""
    return Progress(
        global_step=training.global_step,
        total_steps=training.total_steps,
        env_steps_per_s=float(training.env_steps_per_s),
        mean_return=None if training.mean_return_milli is None else training.mean_return_milli / 1000,
        episodes=training.episodes,
        checkpoint_id=training.checkpoint_id,
        checkpoint_step=training.checkpoint_step,
    )


def _status(job: Job, attempt: Attempt | None, broker_ms: int) -> jobs.JobStatus:
    live = attempt is not None and job.phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING)
    return jobs.JobStatus(
        job_uid=job.uid,
        namespace=job.namespace,
        name=job.name,
        pool=job.pool,
        revision=job.revision,
        phase=job.phase,
        reason=job.reason,
        message=job.message,
        labels=job.labels,
        spec=job.spec,
        spec_digest=job.spec_digest,
        submitted_by=job.submitted_by,
        attempt_number=job.attempt_number,
        lease_epoch=job.lease_epoch,
        replicas=job.needs.replicas,
        replicas_running=sum(part.replicas_running for part in attempt.parts) if live and attempt else 0,
        nodes=tuple(part.node for part in attempt.parts) if live and attempt else (),
        progress=progress_of(attempt.training if live and attempt else job.training),
        stop_reason=job.stop_reason,
        model=ModelReference(name=job.model, version=job.model_version) if job.model_version else None,
        submitted_ms=job.submitted_ms,
        started_ms=job.started_ms,
        finished_ms=job.finished_ms,
        updated_ms=broker_ms,
    )
