"""Model versions, the outbox, and what is collected."""

from __future__ import annotations

import asyncio
from typing import Any

from opentinker.compose.runtime.kafka import end_offsets, producer, read_range
from opentinker.registry.collector import Bounds, collect_uploads, expire_checkpoints
from opentinker.registry.outbox import publish_pending
from opentinker.schemas.messages import CheckpointCommitted, ModelVersionRegistered
from opentinker.schemas.records import InputRecord, decode
from opentinker.schemas.topics import CHECKPOINTS, TOPICS, accepted_types

from .conftest import Registry, contents, new_uid


async def _succeed(registry: Registry, job_uid: str, model: str, attempt: int = 1) -> dict[str, Any]:
    token = await registry.token(job_uid, attempt, attempt, model_name=model)
    answer = await registry.save(token, f"final-{attempt}", 1000 * attempt, job_uid, final=True, outcome="Succeeded", stop_reason="RewardThreshold",
                                 metrics={"mean_return": 480.0}, lineage={"resume_class": "exact"})  # fmt: skip
    assert answer.status_code == 200, answer.text
    model_reference: dict[str, Any] = answer.json()["model"]
    return model_reference


async def test_concurrent_successes_give_versions_without_a_gap(registry: Registry) -> None:
    uids = [new_uid() for _ in range(12)]
    models = await asyncio.gather(*(_succeed(registry, job_uid, "crowded") for job_uid in uids))
    assert sorted(model["version"] for model in models) == list(range(1, 13))
    listed = (await registry.get("/v1/models/default/crowded")).json()["versions"]
    assert [version["version"] for version in listed] == list(range(12, 0, -1))
    assert {version["job_uid"] for version in listed} == set(uids)


async def test_a_job_has_one_version_however_often_it_ends(registry: Registry, job_uid: str) -> None:
    first = await _succeed(registry, job_uid, "once", 1)
    assert await _succeed(registry, job_uid, "once", 2) == first == {"name": "once", "version": 1}


async def test_only_a_success_makes_a_version(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid, model_name="never")
    for number, members in enumerate(({}, {"final": True}, {"outcome": "Succeeded"})):
        assert (await registry.save(token, f"c{number}", number + 1, str(number), **members)).json()["model"] is None
    assert (await registry.get("/v1/models/default/never")).status_code == 404


async def test_a_version_tells_its_lineage_and_gives_its_files(registry: Registry, job_uid: str) -> None:
    await _succeed(registry, job_uid, "traced")
    version = (await registry.get("/v1/models/default/traced/versions/1")).json()
    assert (version["job_uid"], version["attempt_number"], version["global_step"], version["stop_reason"]) == (job_uid, 1, 1000, "RewardThreshold")
    assert (version["metrics"], version["lineage"], version["spec_digest"]) == (
        {"mean_return": 480.0},
        {"resume_class": "exact"},
        "sha256:" + "0" * 64,
    )
    files = {file["name"]: (await registry.store.get(file["url"])).content for file in version["files"]}
    assert files == contents(job_uid)
    assert (await registry.get("/v1/models/default/traced/versions/2")).status_code == 404
    assert (await registry.get("/v1/models/default/traced/versions/99999999999999999999")).status_code == 404


async def test_models_are_paged_by_name(registry: Registry) -> None:
    for name in ("page-a", "page-b", "page-c"):
        await _succeed(registry, new_uid(), name)
    first = (await registry.get("/v1/models?limit=2&after=default/page")).json()
    second = (await registry.get(f"/v1/models?limit=2&after={first['next']}")).json()
    assert [item["name"] for item in first["items"]] == ["page-a", "page-b"]
    assert second["items"][0]["name"] == "page-c"


async def _published(stack: Any, job_uid: str) -> list[InputRecord]:
    partitions = range(int(TOPICS[CHECKPOINTS].partitions))
    ends = await end_offsets(stack.settings.kafka, CHECKPOINTS, partitions)
    records = [record for partition in partitions for record in await read_range(stack.settings.kafka, CHECKPOINTS, partition, 0, ends[partition])]
    return [record for record in records if record.key == job_uid.encode()]


async def test_the_outbox_publishes_in_order_and_once(registry: Registry, stack: Any, job_uid: str) -> None:
    token = await registry.token(job_uid, model_name="published")
    await registry.save(token, "c1", 10)
    assert registry.wake.is_set()
    await registry.save(token, "c2", 20, "b", final=True, outcome="Succeeded")
    sender = producer(stack.settings.kafka, "test-outbox")
    await sender.start()
    try:
        while await publish_pending(registry.pool, sender):
            pass
        assert await publish_pending(registry.pool, sender) == 0
    finally:
        await sender.stop()
    envelopes = [decode(record.headers, record.value, accepted_types(CHECKPOINTS)) for record in await _published(stack, job_uid)]
    assert [type(envelope.message) for envelope in envelopes] == [CheckpointCommitted, CheckpointCommitted, ModelVersionRegistered]
    assert len({envelope.id for envelope in envelopes}) == 3
    last = envelopes[-1].message
    assert isinstance(last, ModelVersionRegistered)
    assert (last.model, last.version, last.checkpoint_id) == ("published", 1, "c2")


async def test_uploads_that_were_never_committed_are_collected(registry: Registry, job_uid: str) -> None:
    token, files = await registry.token(job_uid), contents()
    await registry.upload(await registry.begin(token, "half", files), files)
    kept = await registry.begin(token, "fresh", files)
    await registry.pool.execute("UPDATE uploads SET begun_at = now() - interval '7 hours' WHERE job_uid = $1 AND checkpoint_id = 'half'", job_uid)
    await collect_uploads(registry.pool, registry.blobs, Bounds())
    assert await registry.pool.fetchval("SELECT array_agg(checkpoint_id) FROM uploads WHERE job_uid = $1", job_uid) == ["fresh"]
    left = await registry.blobs._client.list_multipart_uploads(Bucket=registry.blobs._bucket)
    assert not [upload for upload in left.get("Uploads", ()) if f"{job_uid}/half/" in upload["Key"]]
    assert (await registry.commit(token, "fresh", await registry.upload(kept, files))).status_code == 200
    gone = await registry.commit(token, "half", [])
    assert gone.status_code == 422
    assert (await registry.save(token, "half", 200)).status_code == 200  # the id may be begun anew


async def test_uploads_of_a_fenced_epoch_are_collected_soon(registry: Registry, job_uid: str) -> None:
    await registry.begin(await registry.token(job_uid, 1, 1), "old", contents())
    await registry.token(job_uid, 2, 2)
    await collect_uploads(registry.pool, registry.blobs, Bounds(fenced_s=0.0))
    assert await registry.pool.fetchval("SELECT count(*) FROM uploads WHERE job_uid = $1", job_uid) == 0


async def test_a_crash_between_store_and_database_leaves_nothing_visible(registry: Registry, job_uid: str) -> None:
    """The objects are complete, the transaction never came: nobody sees them, and they are collected."""
    token, files = await registry.token(job_uid), contents()
    begun = await registry.begin(token, "half", files)
    uploaded = await registry.upload(begun, files)
    prefix = await registry.pool.fetchval("SELECT object_prefix FROM uploads WHERE job_uid = $1", job_uid)
    for entry, described in zip(begun.json()["uploads"], uploaded, strict=True):
        await registry.blobs.complete(prefix + entry["name"], entry["upload_id"], [(part["number"], part["etag"]) for part in described["parts"]])
    assert len(await registry.objects(job_uid)) == 3
    assert (await registry.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"] == []
    assert (await registry.open(job_uid, 2, 2)).json()["resume"] is None
    await collect_uploads(registry.pool, registry.blobs, Bounds(fenced_s=0.0))
    assert await registry.objects(job_uid) == []


async def test_a_commit_after_such_a_crash_is_finished_by_the_retry(registry: Registry, job_uid: str) -> None:
    token, files = await registry.token(job_uid), contents()
    begun = await registry.begin(token, "c", files)
    uploaded = await registry.upload(begun, files)
    prefix = await registry.pool.fetchval("SELECT object_prefix FROM uploads WHERE job_uid = $1", job_uid)
    for entry, described in zip(begun.json()["uploads"], uploaded, strict=True):
        await registry.blobs.complete(prefix + entry["name"], entry["upload_id"], [(part["number"], part["etag"]) for part in described["parts"]])
    assert (await registry.commit(token, "c", uploaded)).status_code == 200


async def test_a_collected_upload_cannot_be_committed(registry: Registry, job_uid: str) -> None:
    token, files = await registry.token(job_uid), contents()
    uploaded = await registry.upload(await registry.begin(token, "slow", files), files)
    await registry.pool.execute("UPDATE uploads SET state = 'collecting' WHERE job_uid = $1", job_uid)  # the collector is at work
    for answer in (await registry.commit(token, "slow", uploaded), await registry.begin(token, "slow", files)):
        assert (answer.status_code, answer.json()["reason"]) == (410, "gone")


async def test_old_checkpoints_go_but_never_what_somebody_needs(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid, 1, 1, model_name="kept")
    await registry.save(token, "model", 1, "m", final=True, outcome="Succeeded")
    await registry.save(token, "pinned", 2, "p")
    token = await registry.token(job_uid, 2, 2, model_name="kept")
    for step in range(3, 8):
        await registry.save(token, f"c{step}", step, str(step))
    await expire_checkpoints(registry.pool, registry.blobs, Bounds())
    left = [item["checkpoint_id"] for item in (await registry.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"]]
    assert left == ["c7", "c6", "c5", "pinned", "model"]
    assert {key.split("/")[3] for key in await registry.objects(job_uid)} == set(left)
    assert (await registry.open(job_uid, 3, 3, model_name="kept")).json()["resume"]["checkpoint_id"] == "c7"
