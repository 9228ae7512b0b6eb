"""Whether the database says what the topics say: both directions, row by row, after whatever happened."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

import asyncpg
import orjson
from checker import Marks, records_since
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings, Settings
from opentinker.schemas.topics import CHECKPOINTS, EVENTS, METRICS

__all__ = ["disagreements"]


async def disagreements(settings: Settings, since: Marks, jobs: Collection[str], timeout_s: float = 60.0) -> list[str]:
    """Sentences; none if events, metrics, checkpoints and model versions of the jobs are the same in both. Waits for the projections to catch up."""
    connection = await asyncpg.connect(settings.postgres.dsn.get_secret_value())
    try:
        await _caught_up(settings.kafka, connection, timeout_s)
        wanted = set(jobs)
        found = await _compare(
            "event", settings.kafka, EVENTS, since, lambda event, _: (event["job_uid"], event["revision"]), connection,
            "SELECT job_uid, revision FROM job_events WHERE job_uid = ANY($1)", wanted,
        )  # fmt: skip
        found += await _compare(
            "metric sample", settings.kafka, METRICS, since,
            lambda sample, _: (sample["job_uid"], sample["attempt_number"], sample["replica_rank"], sample["global_step"]), connection,
            "SELECT job_uid, attempt_number, replica_rank, global_step FROM training_metrics WHERE job_uid = ANY($1)", wanted,
        )  # fmt: skip
        found += await _compare(
            "checkpoint", settings.kafka, CHECKPOINTS, since,
            lambda event, kind: (event["job_uid"], event["checkpoint_id"]) if kind.startswith("CheckpointCommitted") else None, connection,
            "SELECT job_uid, checkpoint_id FROM checkpoints WHERE job_uid = ANY($1)", wanted, gone_is_fine=True,
        )  # fmt: skip
        found += await _compare(
            "model version", settings.kafka, CHECKPOINTS, since,
            lambda event, kind: (event["job_uid"], event["version"]) if kind.startswith("ModelVersionRegistered") else None, connection,
            "SELECT job_uid, version FROM model_versions WHERE job_uid = ANY($1)", wanted,
        )  # fmt: skip
        return found
    finally:
        await connection.close()


async def _caught_up(settings: KafkaSettings, connection: Any, timeout_s: float) -> None:
    """Until every projection stands at the end of its topic, and the outbox is empty."""
    deadline = time.monotonic() + timeout_s
    behind = ["not asked yet"]
    while behind:
        behind = []
        rows = await connection.fetch("SELECT topic, partition, next_offset FROM projection_offsets")
        for topic in {row["topic"] for row in rows}:
            mine = {row["partition"]: row["next_offset"] for row in rows if row["topic"] == topic}
            ends = await kafka.end_offsets(settings, topic, list(mine))
            behind += [f"{topic}:{partition} at {mine[partition]} of {end}" for partition, end in ends.items() if mine[partition] < end]
        if waiting := await connection.fetchval("SELECT count(*) FROM outbox WHERE published_at IS NULL"):
            behind.append(f"{waiting} events in the outbox")
        if time.monotonic() > deadline:
            raise AssertionError(f"the projections do not catch up: {behind}")


async def _compare(
    what: str, settings: KafkaSettings, topic: str, since: Marks, key_of: Any, connection: Any, query: str, jobs: set[str], *, gone_is_fine: bool = False
) -> list[str]:  # fmt: skip
    """`gone_is_fine`: retention may have removed rows since."""
    on_topic = set()
    for record in await records_since(settings, topic, since):
        kind = next(value.decode() for name, value in record.headers if name == "ce_type").removeprefix("io.opentinker.")
        key = key_of(orjson.loads(record.value), kind)
        if key is not None and key[0] in jobs:
            on_topic.add(key)
    in_database = {tuple(row) for row in await connection.fetch(query, list(jobs))}
    found = [f"{what} {json.dumps(key)} is in the database and on no topic" for key in sorted(in_database - on_topic)[:5]]
    if not gone_is_fine:
        found += [f"{what} {json.dumps(key)} is on the topic and not in the database" for key in sorted(on_topic - in_database)[:5]]
    if not on_topic:
        found.append(f"no {what} on {topic}: nothing was compared")
    return found
