"""Fences, tokens and what an attempt resumes from."""

from __future__ import annotations

import asyncio

import httpx

from .conftest import AGENT_TOKEN, Registry, contents, new_uid


async def test_a_first_open_has_nothing_to_resume(registry: Registry, job_uid: str) -> None:
    answer = await registry.open(job_uid)
    assert answer.status_code == 200
    assert answer.json()["resume"] is None
    assert len(answer.json()["attempt_token"]) >= 43  # 256 bits


async def test_a_lower_attempt_or_epoch_is_refused_for_ever(registry: Registry, job_uid: str) -> None:
    assert (await registry.open(job_uid, 2, 5)).status_code == 200
    for attempt, epoch in ((1, 9), (2, 4), (1, 1)):
        answer = await registry.open(job_uid, attempt, epoch)
        assert (answer.status_code, answer.json()["reason"]) == (409, "fenced")
    assert (await registry.open(job_uid, 2, 5, "node-2")).status_code == 200
    assert (await registry.open(job_uid, 2, 6)).status_code == 200
    assert (await registry.open(job_uid, 2, 5, "node-3")).status_code == 409


async def test_a_fenced_holder_can_neither_begin_nor_commit(registry: Registry, job_uid: str) -> None:
    old, files = await registry.token(job_uid, 1, 1), contents()
    uploaded = await registry.upload(await registry.begin(old, "late", files), files)
    opened = await registry.open(job_uid, 2, 2)
    assert opened.json()["resume"] is None
    commit = await registry.commit(old, "late", uploaded, final=True, outcome="Succeeded")
    assert (commit.status_code, commit.json()["reason"]) == (409, "fenced")
    begin = await registry.begin(old, "later", files)
    assert (begin.status_code, begin.json()["reason"]) == (409, "fenced")
    assert (await registry.get(f"/v1/jobs/{job_uid}/checkpoints")).json()["items"] == []
    assert await registry.pool.fetchval("SELECT count(*) FROM model_versions WHERE job_uid = $1", job_uid) == 0


async def test_a_commit_and_an_open_at_the_same_time_have_one_order(registry: Registry) -> None:
    """Either the commit came first and is resumed from, or it is refused: never committed and passed over."""
    for _ in range(12):
        job_uid, files = new_uid(), contents()
        token = await registry.token(job_uid, 1, 1)
        uploaded = await registry.upload(await registry.begin(token, "race", files), files)
        commit, opened = await asyncio.gather(registry.commit(token, "race", uploaded), registry.open(job_uid, 2, 2))
        resume = opened.json()["resume"]
        if commit.status_code == 200:
            assert resume is not None
            assert resume["checkpoint_id"] == "race"
        else:
            assert commit.json()["reason"] == "fenced"
            assert resume is None


async def test_every_node_of_an_epoch_resumes_from_the_same_checkpoint(registry: Registry, job_uid: str) -> None:
    first = await registry.token(job_uid, 1, 1)
    await registry.save(first, "old", 100)
    await registry.save(first, "new", 300, "b")
    await registry.save(first, "in-between", 200, "c")
    early = await registry.open(job_uid, 2, 2, "node-1")
    assert (early.json()["resume"]["checkpoint_id"], early.json()["resume"]["global_step"], early.json()["resume"]["attempt_number"]) == (
        "new",
        300,
        1,
    )
    assert (await registry.save(early.json()["attempt_token"], "newest", 900, "d")).status_code == 200
    late = await registry.open(job_uid, 2, 2, "node-2")
    assert late.json()["resume"]["checkpoint_id"] == "new"
    assert (await registry.open(job_uid, 2, 3, "node-1")).json()["resume"]["checkpoint_id"] == "newest"


async def test_resume_urls_give_the_very_bytes(registry: Registry, job_uid: str) -> None:
    await registry.save(await registry.token(job_uid, 1, 1), "ckpt", 100)
    resume = (await registry.open(job_uid, 2, 2)).json()["resume"]
    for file in resume["files"]:
        assert (await registry.store.get(file["url"])).content == contents()[file["name"]]


async def test_opening_again_replaces_the_nodes_token_and_no_other(registry: Registry, job_uid: str) -> None:
    one, two = await registry.token(job_uid, node="node-1"), await registry.token(job_uid, node="node-2")
    again = await registry.token(job_uid, node="node-1")
    assert len({one, two, again}) == 3
    replaced = await registry.begin(one, "x", contents())
    assert (replaced.status_code, replaced.json()["reason"]) == (401, "unauthorised")
    assert replaced.headers["www-authenticate"].startswith("Bearer")
    assert (await registry.begin(two, "x", contents())).status_code == 200
    assert (await registry.begin(again, "x", contents())).status_code == 200


async def test_tokens_are_nowhere_in_the_database(registry: Registry, job_uid: str) -> None:
    token = await registry.token(job_uid)
    rows = await registry.pool.fetch("SELECT t::text AS text FROM attempt_tokens t")
    assert not any(token in row["text"] for row in rows)


async def test_a_uid_cannot_become_another_job(registry: Registry, job_uid: str) -> None:
    await registry.token(job_uid)
    for change in ({"namespace": "other"}, {"model_name": "other"}, {"spec_digest": "sha256:" + "1" * 64}):
        answer = await registry.open(job_uid, 2, 2, **change)
        assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")


async def test_who_shows_no_valid_token_gets_401_everywhere(registry: Registry, job_uid: str) -> None:
    attempt_token = await registry.token(job_uid)
    paths = [("POST", "/v1/attempts/open"), ("POST", "/v1/checkpoints/begin"), ("POST", "/v1/checkpoints/x/commit"),
             ("GET", f"/v1/jobs/{job_uid}/checkpoints"), ("GET", "/v1/models"), ("GET", "/v1/models/default/m"),
             ("GET", "/v1/models/default/m/versions/1")]  # fmt: skip
    for method, path in paths:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {AGENT_TOKEN}"}, {"Authorization": "Bearer "}):
            answer = await registry.http.request(method, path, headers=header, json={})
            assert answer.status_code == 401, (method, path, header)
            assert answer.headers["content-type"] == "application/problem+json"
    answer = await registry.http.post("/v1/attempts/open", json={}, headers={"Authorization": f"Bearer {attempt_token}"})
    assert answer.status_code == 401  # an attempt may not open attempts


async def test_an_attempt_reads_its_own_job_only(registry: Registry, job_uid: str) -> None:
    other = new_uid()
    await registry.token(other)
    token = await registry.token(job_uid)
    assert (await registry.get(f"/v1/jobs/{other}/checkpoints", token)).status_code == 404
    assert (await registry.get("/v1/models", token)).status_code == 404


async def test_bad_requests_name_the_field(registry: Registry) -> None:
    headers = {"Authorization": f"Bearer {AGENT_TOKEN}"}
    text = await registry.http.post("/v1/attempts/open", content=b"{}", headers=headers | {"content-type": "text/plain"})
    assert text.status_code == 415
    broken = await registry.http.post("/v1/attempts/open", content=b'{"job_uid": "', headers=headers | {"content-type": "application/json"})
    assert (broken.status_code, broken.json()["errors"][0]["message"]) == (422, "is not valid JSON")
    empty = await registry.http.post("/v1/attempts/open", json={}, headers=headers)
    assert {error["field"] for error in empty.json()["errors"]} >= {"job_uid", "lease_epoch", "node"}
    huge = await registry.http.post("/v1/attempts/open", content=b"x" * (5 * 2**20), headers=headers | {"content-type": "application/json"})
    assert huge.status_code == 413


async def test_health_is_open_and_a_foreign_host_is_refused(registry: Registry) -> None:
    for method in ("GET", "HEAD"):
        answer = await registry.http.request(method, "/health")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert (await registry.http.request(method, "/ready")).status_code == 200
    registry.faults["projections"] = "failed"
    assert (await registry.http.get("/ready")).json() == {"status": "unavailable", "parts": {"postgres": "ok", "s3": "ok", "projections": "failed"}}
    registry.faults.clear()
    assert (await registry.http.get("/health", headers={"Host": "evil.example"})).status_code == 421
    assert (await registry.http.get("/v1/models", headers={"Host": "a/health?x="})).status_code == 421
    assert b"opentinker_http_requests_total" in (await registry.http.get("/metrics")).content


async def test_openapi_tells_the_bodies(registry: Registry) -> None:
    document = (await registry.http.get("/openapi.json")).json()
    body = document["paths"]["/v1/checkpoints/begin"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "checkpoint_id" in body["properties"]


async def test_a_database_that_does_not_answer_is_503(registry: Registry) -> None:
    from opentinker.registry.http.app import build_app

    class Gone:
        def acquire(self) -> object:
            raise ConnectionRefusedError("gone")

        async def fetchrow(self, *_: object) -> object:
            raise ConnectionRefusedError("gone")

        fetchval = fetchrow

    app = build_app(Gone(), registry.blobs, agent_token=AGENT_TOKEN, hosts=("registry.test",), wake=asyncio.Event(), faults=dict)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://registry.test") as http:
        answer = await http.post("/v1/checkpoints/begin", json={}, headers={"Authorization": "Bearer anything"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert (await http.get("/ready")).status_code == 503
