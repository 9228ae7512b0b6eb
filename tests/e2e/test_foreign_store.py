"""The whole line with the object store named by settings: nothing of ours starts one, trainers upload to it, and the model comes out of it."""

from __future__ import annotations

import asyncio

import pytest
from foreign_store import foreign_store
from opentinker.compose.local.home import Home
from opentinker.compose.local.status import read_status
from opentinker.compose.runtime.settings import S3Settings
from opentinker.producers.client import Client
from opentinker.registry.blobs import open_blob_store
from own_stack import own_stack

pytestmark = [pytest.mark.stack, pytest.mark.slow]
MANIFEST = {
    "apiVersion": "opentinker.io/v1",
    "kind": "TrainingJob",
    "metadata": {"name": "elsewhere"},
    "spec": {"algorithm": "PPO", "environment": "CartPole-v1", "replicas": 2, "resources": {"cpu": 1}, "stop": {"totalSteps": 4096}},
}


async def keys(settings: S3Settings, job_uid: str) -> list[str]:
    async with open_blob_store(settings) as blobs:
        return [key async for key in blobs.keys_below(f"checkpoints/default/{job_uid}/")]


def test_a_job_trains_with_its_checkpoints_in_a_store_that_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with foreign_store() as store:
        for name, value in store.model_dump().items():
            text = value.get_secret_value() if hasattr(value, "get_secret_value") else str(value)
            monkeypatch.setenv(f"OPENTINKER_S3__{name.upper()}", text)
        with own_stack() as stack:
            settings = stack.settings
            assert "s3" not in {program.name for program in read_status(Home(stack.home)).programs}
            assert settings.s3.endpoint_url == store.endpoint_url
            with Client(settings.gateway.url, settings.api_key_file.read_text().strip()) as client:
                uid = client.submit(MANIFEST).metadata.uid
                view = client.wait(uid, timeout_s=120)
            assert (view.status.phase, view.status.progress.global_step) == ("Completed", 4096)
            kept = asyncio.run(keys(settings.s3, uid))
            assert any(key.endswith("weights.safetensors") for key in kept), kept
