"""The same registry on a store that is not the local stack's: nothing depends on what only one server does."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from foreign_store import foreign_store

from .conftest import Registry, contents, registry_on, sha


@pytest.fixture(scope="module")
async def foreign(stack: Any) -> AsyncIterator[Registry]:
    with foreign_store() as settings:
        async with registry_on(stack.settings.postgres.dsn.get_secret_value(), settings) as made:
            yield made


async def test_a_checkpoint_in_parts_is_committed_and_read_back_by_ranges(foreign: Registry, job_uid: str) -> None:
    token = await foreign.token(job_uid)
    files = contents() | {"weights.safetensors": bytes(range(256)) * (36 * 4096)}  # 36 MiB, three parts
    begun = await foreign.begin(token, "big", files)
    assert len(begun.json()["uploads"][0]["parts"]) == 3
    assert (await foreign.commit(token, "big", await foreign.upload(begun, files))).status_code == 200
    [listed] = (await foreign.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"]
    assert {file["name"]: file["sha256"] for file in listed["files"]} == {name: sha(data) for name, data in files.items()}
    resumed = (await foreign.open(job_uid, attempt=2, epoch=2)).json()["resume"]
    url = next(file["url"] for file in resumed["files"] if file["name"] == "weights.safetensors")
    read = hashlib.sha256()
    for start in range(0, 36 * 2**20, 12 * 2**20):
        answer = await foreign.store.get(url, headers={"Range": f"bytes={start}-{start + 12 * 2**20 - 1}"})
        assert answer.status_code == 206
        read.update(answer.content)
    assert read.hexdigest() == sha(files["weights.safetensors"])


async def test_wrong_bytes_are_refused_and_leave_nothing(foreign: Registry, job_uid: str) -> None:
    token, files = await foreign.token(job_uid), contents()
    uploaded = await foreign.upload(await foreign.begin(token, "wrong", files), files | {"state.json": files["state.json"][::-1]})
    for entry in uploaded:
        entry["sha256"] = sha(files[entry["name"]])
    assert (await foreign.commit(token, "wrong", uploaded)).status_code == 422
    assert await foreign.objects(job_uid) == []
    assert (await foreign.save(token, "wrong")).status_code == 200


async def test_an_upload_that_was_begun_and_left_is_discarded(foreign: Registry, job_uid: str) -> None:
    token = await foreign.token(job_uid)
    await foreign.upload(await foreign.begin(token, "left", contents()), contents())
    assert await foreign.blobs.discard(f"checkpoints/default/{job_uid}/left/") == 3
    assert await foreign.blobs.discard(f"checkpoints/default/{job_uid}/left/") == 0
