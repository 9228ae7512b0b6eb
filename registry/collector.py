"""Removes what nobody will ever see: uploads without a commit, and checkpoints beyond what their job keeps.

Rules: a row is claimed in the database before anything is deleted in the store, and deleted after; a commit takes only unclaimed rows. So a crash or a
race leaves either a visible checkpoint with all its objects, or a claimed row that the next round finishes. The checkpoint an open attempt resumes from,
a model's checkpoint and the newest `keep` are never removed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog
from opentinker.compose.runtime.metrics import counter

from .blobs import BlobStore

__all__ = ["Bounds", "collect_uploads", "expire_checkpoints", "run_collector", "trim_logs"]

_ROUND_S = 60.0
_BATCH = 100  # rows a round and kind: more waits for the next round
_COLLECTED = counter("registry_uploads_collected_total", "Uploads that were begun and never committed, removed")
_EXPIRED = counter("registry_checkpoints_expired_total", "Checkpoints removed because the job keeps newer ones")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long an upload may take, and how soon a fenced one is removed (its trainer may just be sending its last part)."""

    upload_s: float = 6 * 3600.0  # the lifetime of the presigned URLs
    fenced_s: float = 300.0
    keep_default: int = 3
    log_blocks_max: int = 2_000  # of one replica's stream; a block holds up to 1,000 lines


_CLAIM_UPLOADS = """
UPDATE uploads SET state = 'collecting' WHERE (job_uid, checkpoint_id) IN (
    SELECT u.job_uid, u.checkpoint_id FROM uploads u JOIN fences f USING (job_uid)
    WHERE u.state = 'collecting'
       OR u.begun_at < now() - make_interval(secs => $1)
       OR (u.begun_at < now() - make_interval(secs => $2) AND (u.attempt_number, u.lease_epoch) < (f.attempt_number, f.lease_epoch))
    ORDER BY u.begun_at LIMIT $3 FOR UPDATE OF u SKIP LOCKED)
RETURNING job_uid, checkpoint_id, object_prefix
"""

_CLAIM_CHECKPOINTS = """
WITH ranked AS (
    SELECT c.job_uid, c.checkpoint_id, c.object_prefix, c.expired_at,
           row_number() OVER (PARTITION BY c.job_uid ORDER BY c.global_step DESC, c.committed_at DESC) AS age,
           COALESCE((j.spec #>> '{checkpoint,keep}')::integer, $1) AS keep
    FROM checkpoints c LEFT JOIN jobs j USING (job_uid) WHERE c.expired_at IS NULL
)
UPDATE checkpoints c SET expired_at = now() FROM (
    SELECT r.job_uid, r.checkpoint_id FROM ranked r JOIN fences f USING (job_uid)
    WHERE r.age > r.keep AND r.checkpoint_id IS DISTINCT FROM f.resume_checkpoint_id
      AND NOT EXISTS (SELECT 1 FROM model_versions m WHERE m.job_uid = r.job_uid AND m.checkpoint_id = r.checkpoint_id)
    LIMIT $2) old
WHERE c.job_uid = old.job_uid AND c.checkpoint_id = old.checkpoint_id
RETURNING c.job_uid, c.checkpoint_id, c.object_prefix
"""


async def collect_uploads(pool: Any, blobs: BlobStore, bounds: Bounds) -> int:
    """Remove uploads that can no longer be committed; returns how many."""
    rows = await pool.fetch(_CLAIM_UPLOADS, bounds.upload_s, bounds.fenced_s, _BATCH)
    for row in rows:
        removed = await blobs.discard(row["object_prefix"])
        await pool.execute(
            "DELETE FROM uploads WHERE job_uid = $1 AND checkpoint_id = $2 AND object_prefix = $3",
            row["job_uid"], row["checkpoint_id"], row["object_prefix"],
        )  # fmt: skip
        structlog.get_logger().info("upload collected", job_uid=row["job_uid"], checkpoint_id=row["checkpoint_id"], objects=removed)
    _COLLECTED.inc(len(rows))
    return len(rows)


async def expire_checkpoints(pool: Any, blobs: BlobStore, bounds: Bounds) -> int:
    """Remove the objects of checkpoints that are older than what their job keeps; returns how many."""
    rows = await pool.fetch(_CLAIM_CHECKPOINTS, bounds.keep_default, _BATCH)
    unfinished = await pool.fetch(
        "SELECT job_uid, checkpoint_id, object_prefix FROM checkpoints WHERE expired_at IS NOT NULL AND NOT emptied LIMIT 100"
    )
    for row in {row["object_prefix"]: row for row in [*rows, *unfinished]}.values():
        await blobs.discard(row["object_prefix"])
        await pool.execute("UPDATE checkpoints SET emptied = true WHERE job_uid = $1 AND checkpoint_id = $2", row["job_uid"], row["checkpoint_id"])
        structlog.get_logger().info("checkpoint expired", job_uid=row["job_uid"], checkpoint_id=row["checkpoint_id"])
    _EXPIRED.inc(len(rows))
    return len(rows)


async def trim_logs(pool: Any, bounds: Bounds) -> None:
    """Keep the tail of every replica's output; the whole of it stays on its topic for three days."""
    await pool.execute(
        "DELETE FROM attempt_logs WHERE seq IN (SELECT seq FROM (SELECT seq, row_number() OVER "
        "(PARTITION BY job_uid, attempt_number, replica_rank, stream ORDER BY first_line DESC) AS age FROM attempt_logs) aged WHERE age > $1)",
        bounds.log_blocks_max,
    )


async def run_collector(pool: Any, blobs: BlobStore, bounds: Bounds) -> None:
    """A round a minute, for ever."""
    while True:
        await collect_uploads(pool, blobs, bounds)
        await expire_checkpoints(pool, blobs, bounds)
        await trim_logs(pool, bounds)
        await pool.execute("DELETE FROM outbox WHERE published_at < now() - interval '2 days'")
        await asyncio.sleep(_ROUND_S)
