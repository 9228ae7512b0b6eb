"""Begin, upload, verify, commit: on a real database and a real object store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import Registry, contents, new_uid, sha


async def test_a_committed_checkpoint_is_listed_with_its_files(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid)
    answer = await registry.save(token, "ckpt-1", 4096, metrics={"mean_return": 200.5, "value_loss": "NaN"}, lineage={"seed": 7})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"checkpoint_id": "ckpt-1", "model": None}
    [listed] = (await registry.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"]
    assert listed["global_step"] == 4096
    assert listed["metrics"] == {"mean_return": 200.5, "value_loss": "NaN"}
    assert listed["lineage"] == {"seed": 7}
    assert {file["name"]: file["sha256"] for file in listed["files"]} == {name: sha(data) for name, data in contents().items()}
    assert (await registry.get(f"/v1/jobs/{job_uid}/checkpoints", token)).status_code == 200  # the attempt itself may look too


async def test_large_files_are_cut_into_parts_and_verified_whole(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid)
    files = contents() | {"weights.safetensors": bytes(range(256)) * (36 * 4096)}  # 36 MiB
    begun = await registry.begin(token, "big", files)
    sizes = [part["size"] for part in begun.json()["uploads"][0]["parts"]]
    assert sizes == [16 * 2**20, 16 * 2**20, 4 * 2**20]
    assert (await registry.commit(token, "big", await registry.upload(begun, files))).status_code == 200


async def test_the_same_commit_twice_is_one_checkpoint_and_one_answer(registry: Registry, job_uid: str) -> None:
    token, files = await registry.token(job_uid), contents()
    uploaded = await registry.upload(await registry.begin(token, "ckpt-1", files), files)
    answers = await asyncio.gather(*(registry.commit(token, "ckpt-1", uploaded, final=True, outcome="Succeeded") for _ in range(4)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.text for answer in answers}) == 1
    assert await registry.pool.fetchval("SELECT count(*) FROM checkpoints WHERE job_uid = $1", job_uid) == 1
    assert await registry.pool.fetchval("SELECT count(*) FROM outbox WHERE key = $1", job_uid) == 2  # the checkpoint and its model version
    again = await registry.begin(token, "ckpt-1", files)
    assert again.json() == {"uploads": [], "committed": True}


async def test_other_contents_under_the_same_id_are_a_conflict(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid)
    assert (await registry.save(token, "ckpt-1")).status_code == 200
    other = await registry.begin(token, "ckpt-1", contents("b"))
    assert (other.status_code, other.json()["reason"]) == (409, "conflict")
    described = [
        {"name": name, "size": len(data), "sha256": sha(data), "parts": [{"number": 1, "etag": "x"}]} for name, data in contents("b").items()
    ]
    commit = await registry.commit(token, "ckpt-1", described)
    assert (commit.status_code, commit.json()["reason"]) == (409, "conflict")
    final = await registry.commit(token, "ckpt-1", described, final=True)
    assert final.status_code == 409
    [listed] = (await registry.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"]
    assert {file["sha256"] for file in listed["files"]} == {sha(data) for data in contents().values()}


async def test_bytes_that_are_not_what_was_announced_are_never_visible(registry: Registry, job_uid: str) -> None:
    token, files = await registry.token(job_uid), contents()
    begun = await registry.begin(token, "ckpt-1", files)
    wrong = files | {"weights.safetensors": files["weights.safetensors"][::-1]}  # same size, other bytes
    uploaded = await registry.upload(begun, wrong)
    for entry in uploaded:
        entry["sha256"] = sha(files[entry["name"]])
    answer = await registry.commit(token, "ckpt-1", uploaded)
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == "files[0]"
    assert "SHA-256" in error["message"]
    assert (await registry.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"] == []
    assert await registry.objects(job_uid) == []
    assert (await registry.save(token, "ckpt-1")).status_code == 200  # the id is free again for the right bytes


async def test_missing_and_short_parts_are_refused(registry: Registry, job_uid: str) -> None:
    token, files = await registry.token(job_uid), contents()
    begun = await registry.begin(token, "ckpt-1", files)
    described = [{"name": name, "size": len(data), "sha256": sha(data), "parts": [{"number": 1, "etag": '"0"'}]} for name, data in files.items()]
    nothing_uploaded = await registry.commit(token, "ckpt-1", described)
    assert nothing_uploaded.status_code == 422, nothing_uploaded.text
    begun = await registry.begin(token, "ckpt-2", files)
    uploaded = await registry.upload(begun, files)
    uploaded[0]["parts"] = [{"number": 2, "etag": uploaded[0]["parts"][0]["etag"]}]
    answer = await registry.commit(token, "ckpt-2", uploaded)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "files[0].parts"
    assert (await registry.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"] == []


@pytest.mark.parametrize("name", ["../state.json", "a/b", "", ".hidden", "x" * 200, "a\\b", "nul\x00", "..", "a..b", "%2e%2e", "ä"])
async def test_names_that_could_leave_their_place_are_refused(registry: Registry, job_uid: str, name: str) -> None:
    answer = await registry.begin(await registry.token(job_uid), "ckpt-1", contents() | {name: b"x"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"] == "files[3].name"


@pytest.mark.parametrize("checkpoint_id", ["..", ".x", "a..b", "-", "a/b", "x" * 65, "", "nul\x00"])
async def test_ids_that_could_leave_their_place_are_refused(registry: Registry, job_uid: str, checkpoint_id: str) -> None:
    answer = await registry.begin(await registry.token(job_uid), checkpoint_id, contents())
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "checkpoint_id"


async def test_a_checkpoint_without_a_required_member_is_refused(registry: Registry, job_uid: str) -> None:
    files = contents()
    del files["optimizer.safetensors"]
    answer = await registry.begin(await registry.token(job_uid), "ckpt-1", files)
    assert answer.status_code == 422
    assert "'optimizer.safetensors' is missing" in answer.json()["errors"][0]["message"]


async def test_sizes_and_counts_are_bounded(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid)
    body: dict[str, Any] = {"checkpoint_id": "c", "global_step": 1, "files": [{"name": "weights.safetensors", "size": 2**50, "sha256": "0" * 64}]}
    assert (await registry.post(token, "/v1/checkpoints/begin", body)).status_code == 422
    body["files"] = [{"name": f"f{number}", "size": 1, "sha256": "0" * 64} for number in range(600)]
    assert (await registry.post(token, "/v1/checkpoints/begin", body)).status_code == 422
    body["files"] = [{"name": "a", "size": 1, "sha256": "0" * 64, "surprise": 1}]
    unknown = await registry.post(token, "/v1/checkpoints/begin", body)
    assert (unknown.status_code, unknown.json()["errors"][0]["message"]) == (422, "unknown key")


async def test_a_commit_that_was_not_begun_is_not_found(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid)
    described = [{"name": name, "size": len(data), "sha256": sha(data), "parts": [{"number": 1, "etag": "x"}]} for name, data in contents().items()]
    assert (await registry.commit(token, "never", described)).status_code == 404


async def test_one_id_in_two_jobs_is_two_checkpoints(registry: Registry) -> None:
    for job_uid in (new_uid(), new_uid()):
        assert (await registry.save(await registry.token(job_uid), "the-same-id", seed=job_uid)).status_code == 200


async def test_begin_again_gives_urls_of_the_same_upload(registry: Registry, job_uid: str) -> None:
    token, files = await registry.token(job_uid), contents()
    first, second = await registry.begin(token, "ckpt-1", files), await registry.begin(token, "ckpt-1", files)
    assert [entry["upload_id"] for entry in first.json()["uploads"]] == [entry["upload_id"] for entry in second.json()["uploads"]]
    assert (await registry.commit(token, "ckpt-1", await registry.upload(second, files))).status_code == 200
