"""An external Kafka behind TLS and SASL: topics, scheduler and clients work with it by settings alone, and a wrong password gets nowhere."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.errors import KafkaError
from opentinker.compose.runtime import kafka
from opentinker.schemas.messages import JobPhase
from scheduler_process import FakeNode, Publisher, Worker, statuses
from secure_kafka import ADMIN_PASSWORD, ADMIN_USER, SecureBroker, secure_broker

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with secure_broker(tmp_path_factory.mktemp("secure-kafka")) as broker:
        yield broker


async def test_topics_scheduler_and_clients_work_by_settings_alone(secure: SecureBroker, tmp_path: Path) -> None:
    """Admin client, idempotent and transactional producers, group and groupless consumers, Faust: all of them by SCRAM."""
    settings = secure.settings()
    assert len(await kafka.wait_for_broker(lambda: kafka.ensure_topics(settings), 30)) > 10
    worker = Worker(secure.environment(tmp_path), tmp_path / "worker.log")
    publisher = Publisher(settings, f"pool-{uuid.uuid4().hex[:8]}")
    await publisher.start()
    try:
        async with FakeNode(settings, publisher, f"n-{publisher.pool}"):
            uid = await publisher.submit("secure")
            assert (await statuses(settings, {uid}))[uid].phase is JobPhase.COMPLETED
    finally:
        await publisher.stop()
        assert worker.stop() == 0
    assert ADMIN_PASSWORD not in worker.path.read_text()
    assert not secure.denials()


async def test_plain_works_too(secure: SecureBroker) -> None:
    assert await kafka.ensure_topics(secure.settings(mechanism="PLAIN")) == []


@pytest.mark.parametrize(("user", "mechanism"), [(ADMIN_USER, "SCRAM-SHA-512"), (ADMIN_USER, "PLAIN"), ("nobody", "SCRAM-SHA-512")])
async def test_a_wrong_password_gets_nowhere(secure: SecureBroker, user: str, mechanism: str) -> None:
    with pytest.raises(KafkaError):
        await kafka.ensure_topics(secure.settings(user, "a wrong password", mechanism))
