"""Publishing a checkpoint: what is asked, what is retried, what is final."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_registry import AGENT_TOKEN, FakeRegistry
from opentinker.schemas.registry_api import OpenAttempt
from opentinker.trainer_agent.publishing import fetch, staged
from opentinker.trainer_agent.registry_client import (
    CheckpointConflictError,
    FencedError,
    Publication,
    RefusedError,
    RegistryClient,
    RegistryError,
    UnauthorizedError,
    check_token,
    checkpoint_id_of,
    open_attempt,
)

JOB = "11111111-1111-1111-1111-111111111111"
FILES = {"weights.safetensors": b"w" * 1000, "state.json": b"{}"}


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    registry = FakeRegistry()
    yield registry
    registry.close()


async def _opened(registry: FakeRegistry, number: int = 1) -> Any:
    async with httpx.AsyncClient(base_url=registry.url, headers={"Authorization": f"Bearer {AGENT_TOKEN}"}) as http:
        body = OpenAttempt(
            job_uid=JOB, namespace="default", attempt_number=number, lease_epoch=number, node="n", world_size=1,
            spec_digest="sha256:" + "0" * 64, model_name="m",
        )  # fmt: skip
        return await open_attempt(http, body)


async def _client(registry: FakeRegistry, slept: list[float] | None = None) -> RegistryClient:
    opened = await _opened(registry)
    return RegistryClient(registry.url, opened.attempt_token, sleep=(slept if slept is not None else []).append)


def _publication(step: int = 10, files: dict[str, bytes] = FILES, **changes: Any) -> Publication:
    known = {"checkpoint_id": checkpoint_id_of(JOB, 1, step, "periodic"), "global_step": step, "files": staged(files), "metrics": {}, "lineage": {}}
    return Publication(**(known | changes))


async def test_a_published_checkpoint_is_what_the_next_attempt_resumes_from(registry: FakeRegistry) -> None:
    client = await _client(registry)
    assert client.publish(_publication()) is None
    resume = (await _opened(registry, 2)).resume
    assert (resume.global_step, fetch(client, resume)) == (10, FILES)


async def test_a_final_success_returns_the_model_version(registry: FakeRegistry) -> None:
    model = (await _client(registry)).publish(_publication(final=True, succeeded=True, stop_reason="TotalSteps"))
    assert model is not None
    assert (model.name, model.version) == ("cartpole", 1)


async def test_publishing_twice_is_one_checkpoint(registry: FakeRegistry) -> None:
    client = await _client(registry)
    client.publish(_publication())
    client.publish(_publication())
    assert len(registry.committed) == 1


async def test_the_same_id_with_another_content_is_a_conflict(registry: FakeRegistry) -> None:
    client, slept = await _client(registry), []
    client.publish(_publication())
    with pytest.raises(CheckpointConflictError):
        client.publish(_publication(files={**FILES, "state.json": b"{1}"}))
    assert slept == []


async def test_a_fenced_attempt_is_told_at_once(registry: FakeRegistry) -> None:
    slept: list[float] = []
    client = await _client(registry, slept)
    await _opened(registry, 2)
    with pytest.raises(FencedError, match="later attempt"):
        client.publish(_publication())
    assert slept == []


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_a_fault_that_passes_is_waited_out(registry: FakeRegistry, method: str) -> None:
    slept: list[float] = []
    client = await _client(registry, slept)
    faults = iter([503, 500, 429])
    registry.fault = lambda asked, path: next(faults, None) if asked == method else None
    client.publish(_publication())
    assert len(registry.committed) == 1
    assert len(slept) == 3
    assert slept[2] > slept[0]


async def test_a_fault_that_stays_is_given_up_within_a_bound(registry: FakeRegistry) -> None:
    slept: list[float] = []
    client = await _client(registry, slept)
    registry.fault = lambda method, path: 503
    with pytest.raises(RegistryError, match="tried 8 times"):
        client.publish(_publication())
    assert sum(slept) < 60


async def test_an_expired_url_is_not_tried_again_and_not_called_a_fence(registry: FakeRegistry) -> None:
    client = await _client(registry)
    registry.fault = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(RefusedError) as caught:
        client.publish(_publication())
    assert not isinstance(caught.value, FencedError)


async def test_nothing_is_committed_when_the_lease_does_not_allow_it(registry: FakeRegistry) -> None:
    def refuse() -> None:
        raise TimeoutError("the lease is over")

    with pytest.raises(TimeoutError):
        (await _client(registry)).publish(_publication(), refuse)
    assert registry.committed == {}


async def test_the_attempt_token_does_not_go_to_the_store_and_urls_are_not_shown(registry: FakeRegistry) -> None:
    client = await _client(registry)
    client.publish(_publication())
    assert {authorization for _, path, authorization in registry.requests if path.startswith("/blob/")} == {""}
    with pytest.raises(RegistryError) as caught:
        RegistryClient(registry.url, "t", sleep=lambda _: None).download(f"{registry.url}/v1/checkpoints/begin?signature=secret", 1)
    assert "secret" not in str(caught.value)


async def test_a_damaged_download_is_refused(registry: FakeRegistry) -> None:
    client = await _client(registry)
    client.publish(_publication())
    resume = (await _opened(registry, 2)).resume
    for name in list(registry.blobs):
        registry.blobs[name] = b"x" * len(registry.blobs[name])
    with pytest.raises(RegistryError, match="SHA-256 differs"):
        fetch(client, resume)


def test_checkpoint_ids_say_what_they_are_of() -> None:
    ids = {checkpoint_id_of(JOB, number, step, kind) for number in (1, 2) for step in (0, 64) for kind in ("periodic", "final")}
    assert len(ids) == 8
    assert checkpoint_id_of(JOB, 1, 64, "final") in ids


async def test_an_agent_without_its_token_is_refused(registry: FakeRegistry) -> None:
    async with httpx.AsyncClient(base_url=registry.url) as http:
        body = OpenAttempt(
            job_uid=JOB, namespace="d", attempt_number=1, lease_epoch=1, node="n", world_size=1, spec_digest="sha256:" + "0" * 64, model_name="m"
        )
        with pytest.raises(UnauthorizedError):
            await open_attempt(http, body)
        with pytest.raises(UnauthorizedError):
            await check_token(http)
