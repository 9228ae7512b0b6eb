"""Producers on the real stack: topics read back as values, the ingress and the gateway as processes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from opentinker.compose.runtime.kafka import groupless_consumer, input_record, producer
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import topic_table
from ports import free_port

API_KEY = "otk_test_0123456789abcdef0123456789abcdef"


def unique(prefix: str = "job") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:10]}"


class Topic:
    """Follows one topic from when it was made; remembers what it read."""

    def __init__(self, reader: AIOKafkaConsumer) -> None:
        self._reader = reader
        self.records: list[InputRecord] = []

    async def wait_for(self, wanted: Callable[[InputRecord], bool], count: int = 1, timeout_s: float = 20.0) -> list[InputRecord]:
        """The first `count` records that match. Fails when they do not come."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [record for record in self.records if wanted(record)]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"{len(found)} of {count} records came within {timeout_s} s"
            for batch in (await self._reader.getmany(timeout_ms=100)).values():
                self.records += [input_record(record) for record in batch]

    async def none_within(self, wanted: Callable[[InputRecord], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for batch in (await self._reader.getmany(timeout_ms=100)).values():
                self.records += [input_record(record) for record in batch]
        assert not [record for record in self.records if wanted(record)]


@contextlib.asynccontextmanager
async def following(settings: Any, topic: str) -> AsyncIterator[Topic]:
    count = topic_table(settings.partitions)[topic][0]
    reader = groupless_consumer(settings, "test-follow")
    await reader.start()
    try:
        places = [TopicPartition(topic, number) for number in range(count)]
        reader.assign(places)
        await reader.seek_to_end(*places)
        for place in places:
            await reader.position(place)
        yield Topic(reader)
    finally:
        await reader.stop()


def header(record: InputRecord, name: str) -> str:
    return dict(record.headers)[name].decode()


@pytest.fixture
async def sender(stack: Any) -> AsyncIterator[AIOKafkaProducer]:
    made = producer(stack.settings.kafka, "test-producers")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture(scope="session")
def api_key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "api-key"
    path.write_text(API_KEY + "\n")
    path.chmod(0o600)
    return path


@contextlib.asynccontextmanager
async def running(stack: Any, module: str, port: int, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One of our services as a process, ready; its log is shown when it does not become so."""
    log = Path(str(stack.home)) / f"test-{module.rpartition('.')[2]}-{port}.log"
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, env=stack.environment(**variables), stderr=output, stdout=output, cwd=str(stack.home)
        )
    try:
        await _ready(port, child, log)
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                await asyncio.wait_for(child.wait(), 25)
            except TimeoutError:
                child.kill()
                await child.wait()
                raise AssertionError(f"{module} did not stop:\n{log.read_text()[-3000:]}") from None
        assert b"Traceback" not in log.read_bytes(), log.read_text()[-5000:]


async def _ready(port: int, child: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + 60
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        while time.monotonic() < deadline and child.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise AssertionError(f"not ready (exit {child.returncode}):\n{log.read_text()[-3000:]}")  # noqa: ASYNC240


@pytest.fixture(scope="session")
async def ingress(stack: Any, api_key_file: Path) -> AsyncIterator[int]:
    """The ingress as a process; its metrics port."""
    port = free_port()
    variables = {
        "OPENTINKER_INGRESS__METRICS_PORT": str(port),
        "OPENTINKER_INGRESS__TRUSTED_NAMESPACES": '["default"]',
        "OPENTINKER_GATEWAY__API_KEY_FILE": str(api_key_file),
    }
    async with running(stack, "opentinker.producers.ingress", port, **variables):
        yield port
