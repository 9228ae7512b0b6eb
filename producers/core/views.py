"""Jobs as JSON for people and programs: camelCase, `{apiVersion, kind, metadata, spec, status}` like the manifest they came from."""

from __future__ import annotations

from typing import Any

from opentinker.schemas.algorithms import ALGORITHMS
from opentinker.schemas.manifest import drawn_seed
from opentinker.schemas.messages import JobStatus, Progress
from opentinker.schemas.records import iso_time

__all__ = ["algorithm_views", "iso", "job_view"]


def iso(millis: int | None) -> str | None:
    """Milliseconds since 1970 as ISO 8601 in UTC."""
    return None if millis is None else iso_time(millis)


def job_view(status: JobStatus) -> dict[str, Any]:
    return {
        "apiVersion": "opentinker.io/v1",
        "kind": "TrainingJob",
        "metadata": {"uid": status.job_uid, "name": status.name, "namespace": status.namespace, "labels": status.labels},
        "spec": status.spec,
        "status": {
            "phase": status.phase.value,
            "reason": status.reason,
            "message": status.message,
            "pool": status.pool,
            "attempt": status.attempt_number,
            "leaseEpoch": status.lease_epoch,
            "replicas": status.replicas,
            "replicasRunning": status.replicas_running,
            "nodes": list(status.nodes),
            "progress": _progress(status.progress),
            "seed": drawn_seed(status.job_uid) if status.spec.get("seed") is None else status.spec["seed"],
            "stopReason": status.stop_reason or None,
            "model": {"name": status.model.name, "version": status.model.version} if status.model else None,
            "submittedBy": status.submitted_by,
            "submittedAt": iso(status.submitted_ms),
            "startedAt": iso(status.started_ms),
            "finishedAt": iso(status.finished_ms),
            "updatedAt": iso(status.updated_ms),
            "revision": status.revision,
            "specDigest": status.spec_digest,
        },
    }


def _progress(progress: Progress) -> dict[str, Any]:
    left = progress.total_steps - progress.global_step
    known = progress.total_steps > 0 and progress.env_steps_per_s > 0
    return {
        "globalStep": progress.global_step,
        "totalSteps": progress.total_steps or None,
        "envStepsPerS": progress.env_steps_per_s,
        "meanReturn": progress.mean_return,
        "episodes": progress.episodes,
        "checkpointId": progress.checkpoint_id,
        "checkpointStep": progress.checkpoint_step,
        "etaS": round(max(0, left) / progress.env_steps_per_s) if known else None,
    }


def algorithm_views() -> list[dict[str, Any]]:
    """Every algorithm with its hyperparameters: name, type, default, bounds and meaning, as JSON Schema says them."""
    views = []
    for name, model in sorted(ALGORITHMS.items()):
        schema = model.model_json_schema()
        views.append({"name": name, "description": (model.__doc__ or "").strip(), "hyperparameters": schema["properties"]})
    return views
