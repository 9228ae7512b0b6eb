"""The read side: questions that the gateway and the registry's own API ask. Producers may import this module.

Everything is bounded: pages by cursor, ranges down-sampled with their extremes kept, tails by number of lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opentinker.compose.runtime.settings import PostgresSettings

from .database import open_pool

__all__ = ["MetricPoint", "ReadSide", "open_read_side"]

_POINTS_MAX = 2_000
_LINES_MAX = 10_000
_PAGE_MAX = 500

# Points of one metric as they count: where a later attempt went on from a checkpoint, what the earlier one did beyond it is left out.
# In each bucket the lowest and the highest value stay, so that no spike is lost. NaN and infinities come as PostgreSQL's float8 reads them.
_METRIC_RANGE = """
WITH points AS (
    SELECT m.global_step, m.time_ms, m.attempt_number, (m.metric_values ->> $2)::float8 AS value
    FROM training_metrics m
    WHERE m.job_uid = $1 AND m.replica_rank = $3 AND m.metric_values ? $2 AND m.global_step BETWEEN $4 AND $5
      AND NOT EXISTS (SELECT 1 FROM (SELECT attempt_number, min(global_step) AS first_step FROM training_metrics
                                     WHERE job_uid = $1 AND replica_rank = $3 GROUP BY attempt_number) later
                      WHERE later.attempt_number > m.attempt_number AND later.first_step <= m.global_step)
), bucketed AS (
    SELECT *, least(floor((global_step - min(global_step) OVER ())::float8 * $6
              / greatest(max(global_step) OVER () - min(global_step) OVER (), 1)), $6 - 1) AS bucket
    FROM points
), ranked AS (
    SELECT *, row_number() OVER (PARTITION BY bucket ORDER BY value, global_step) AS lowest,
              row_number() OVER (PARTITION BY bucket ORDER BY value DESC, global_step) AS highest
    FROM bucketed
)
SELECT global_step, time_ms, attempt_number, value FROM ranked WHERE lowest = 1 OR highest = 1 ORDER BY global_step
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    global_step: int
    time_ms: int
    attempt_number: int
    value: float  # may be NaN or infinite


class ReadSide:
    """Questions over one pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def close(self) -> None:
        await self._pool.close()

    async def answers(self) -> None:
        """Raises unless the database answers."""
        await self._pool.fetchval("SELECT 1")

    async def job_events(self, job_uid: str, *, after_revision: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """Events by rising revision: {revision, type, time_ms, data}."""
        rows = await self._pool.fetch(
            "SELECT revision, type, time_ms, data FROM job_events WHERE job_uid = $1 AND revision > $2 ORDER BY revision LIMIT $3",
            job_uid, after_revision, min(limit, _PAGE_MAX),
        )  # fmt: skip
        return [dict(row) for row in rows]

    async def job(self, job_uid: str) -> dict[str, Any] | None:
        row = await self._pool.fetchrow("SELECT * FROM jobs WHERE job_uid = $1", job_uid)
        return dict(row) if row else None

    async def metric_names(self, job_uid: str) -> list[str]:
        """Names in the newest sample of rank 0."""
        values = await self._pool.fetchval(
            "SELECT metric_values FROM training_metrics WHERE job_uid = $1 AND replica_rank = 0 ORDER BY attempt_number DESC, global_step DESC LIMIT 1",
            job_uid,
        )
        return sorted(values or ())

    async def metrics(
        self, job_uid: str, name: str, *, rank: int = 0, from_step: int = 0, to_step: int | None = None, points: int = 500
    ) -> list[MetricPoint]:
        """One metric by rising global step: at most `points`, the lowest and highest of every bucket among them."""
        buckets = max(1, min(points, _POINTS_MAX) // 2)
        rows = await self._pool.fetch(_METRIC_RANGE, job_uid, name, rank, from_step, 2**62 if to_step is None else to_step, buckets)
        return [MetricPoint(**dict(row)) for row in rows]

    async def log_tail(self, job_uid: str, *, lines: int = 200, rank: int | None = None, attempt: int | None = None) -> list[dict[str, Any]]:
        """The newest lines, oldest first: {attempt_number, replica_rank, stream, node, time_ms, line_number, text, dropped}."""
        wanted = min(lines, _LINES_MAX)
        rows = await self._pool.fetch(
            "SELECT * FROM attempt_logs WHERE job_uid = $1 AND ($2::integer IS NULL OR replica_rank = $2) "
            "AND ($3::integer IS NULL OR attempt_number = $3) ORDER BY seq DESC LIMIT $4",
            job_uid, rank, attempt, wanted,
        )  # fmt: skip
        found: list[dict[str, Any]] = []
        for row in rows:
            block = [
                {
                    "attempt_number": row["attempt_number"],
                    "replica_rank": row["replica_rank"],
                    "stream": row["stream"],
                    "node": row["node"],
                    "time_ms": row["time_ms"],
                    "line_number": row["first_line"] + position,
                    "text": text,
                    "dropped": row["dropped"] if position == 0 else 0,
                }
                for position, text in enumerate(row["lines"])
            ]
            found.extend(reversed(block))
            if len(found) >= wanted:
                break
        return list(reversed(found[:wanted]))

    async def alerts(self, *, before: int | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Newest first: {seq, source, id, type, subject, time_ms, data}; `before` is the `seq` to go on below."""
        rows = await self._pool.fetch(
            "SELECT * FROM alerts WHERE ($1::bigint IS NULL OR seq < $1) ORDER BY seq DESC LIMIT $2", before, min(limit, _PAGE_MAX)
        )
        return [dict(row) for row in rows]

    async def checkpoints(self, job_uid: str, *, limit: int = 100) -> list[dict[str, Any]]:
        """Visible checkpoints of a job, newest first."""
        rows = await self._pool.fetch(
            "SELECT * FROM checkpoints WHERE job_uid = $1 AND expired_at IS NULL ORDER BY global_step DESC, committed_at DESC LIMIT $2",
            job_uid, min(limit, _PAGE_MAX),
        )  # fmt: skip
        return [dict(row) for row in rows]

    async def models(self, *, namespace: str | None = None, after: tuple[str, str] = ("", ""), limit: int = 100) -> list[dict[str, Any]]:
        """Models by (namespace, name): {namespace, name, last_version, created_at}; `after` is the last pair of the page before."""
        rows = await self._pool.fetch(
            "SELECT * FROM models WHERE ($1::text IS NULL OR namespace = $1) AND (namespace, name) > ($2, $3) ORDER BY namespace, name LIMIT $4",
            namespace, after[0], after[1], min(limit, _PAGE_MAX),
        )  # fmt: skip
        return [dict(row) for row in rows]

    async def model_versions(self, namespace: str, name: str, *, before: int | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Versions of a model, newest first, with lineage."""
        rows = await self._pool.fetch(
            "SELECT v.*, c.global_step, c.size_bytes, c.digest, c.files, c.object_prefix FROM model_versions v "
            "JOIN checkpoints c USING (job_uid, checkpoint_id) WHERE v.namespace = $1 AND v.name = $2 AND ($3::integer IS NULL OR v.version < $3) "
            "ORDER BY v.version DESC LIMIT $4",
            namespace, name, before, min(limit, _PAGE_MAX),
        )  # fmt: skip
        return [dict(row) for row in rows]

    async def model_version(self, namespace: str, name: str, version: int) -> dict[str, Any] | None:
        found = await self.model_versions(namespace, name, before=version + 1, limit=1)
        return found[0] if found and found[0]["version"] == version else None


async def open_read_side(settings: PostgresSettings, *, service: str) -> ReadSide:
    """A read side with its own pool, which connects when it is first asked. Close it."""
    return ReadSide(await open_pool(settings, service=service, lazy=True))
