"""Model versions: numbered 1..n without a gap, one for each job that succeeded."""

from __future__ import annotations

from typing import Any

from opentinker.schemas.messages import ModelReference

from .attempts import Holder
from .outbox import model_version_registered, put

__all__ = ["model_of_job", "register_version"]


async def register_version(connection: Any, fence: Any, holder: Holder, checkpoint_id: str, now_ms: int) -> ModelReference:
    """The job's model version, made now unless an earlier final checkpoint of the job made it. Call within the commit's transaction."""
    if existing := await model_of_job(connection, holder.job_uid):
        return existing
    namespace, name = holder.namespace, fence["model_name"]
    await connection.execute("INSERT INTO models (namespace, name) VALUES ($1, $2) ON CONFLICT DO NOTHING", namespace, name)
    # The row stays locked until the commit, so numbers follow each other without a gap.
    version = await connection.fetchval(
        "UPDATE models SET last_version = last_version + 1 WHERE namespace = $1 AND name = $2 RETURNING last_version", namespace, name
    )
    await connection.execute(
        "INSERT INTO model_versions (namespace, name, version, job_uid, checkpoint_id, attempt_number, spec_digest, stop_reason, metrics, lineage) "
        "SELECT $1, $2, $3, job_uid, checkpoint_id, attempt_number, $6, stop_reason, metrics, lineage "
        "FROM checkpoints WHERE job_uid = $4 AND checkpoint_id = $5",
        namespace, name, version, holder.job_uid, checkpoint_id, fence["spec_digest"],
    )  # fmt: skip
    await put(connection, model_version_registered(holder, name, version, checkpoint_id, now_ms), now_ms)
    return ModelReference(name=name, version=version)


async def model_of_job(connection: Any, job_uid: str) -> ModelReference | None:
    row = await connection.fetchrow("SELECT name, version FROM model_versions WHERE job_uid = $1", job_uid)
    return ModelReference(name=row["name"], version=row["version"]) if row else None
