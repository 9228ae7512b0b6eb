"""An external Kafka behind TLS and SASL: topics, scheduler and clients work with it by settings alone, and a wrong password gets nowhere."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.errors import KafkaError
from opentinker.compose.local.jars import fetch_jars
from opentinker.compose.local.kafka import _Files, _format, new_cluster_id, render_properties
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.messages import JobPhase
from pydantic import SecretStr
from scheduler_process import FakeNode, Publisher, Worker, statuses

pytestmark = [pytest.mark.stack, pytest.mark.slow]

PASSWORD = "correct horse battery staple"
LOGIN = f'org.apache.kafka.common.security.plain.PlainLoginModule required username="ot" password="{PASSWORD}" user_ot="{PASSWORD}";'


def make_certificates(directory: Path) -> None:
    """A server certificate for 127.0.0.1 that signs itself, as a lab would make one."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(directory / "key.pem"), "-out", str(directory / "ca.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    (directory / "server.pem").write_text((directory / "key.pem").read_text() + (directory / "ca.pem").read_text())


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """A broker that speaks SASL_SSL only."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("secure-kafka")
    make_certificates(directory)
    broker, controller = _free_port(), _free_port()
    properties = render_properties(directory / "data", broker, controller).replace("PLAINTEXT", "SASL_SSL")
    properties += f"""listener.security.protocol.map=SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.sasl_ssl.plain.sasl.jaas.config={LOGIN}
ssl.keystore.type=PEM
ssl.keystore.location={directory / "server.pem"}
ssl.truststore.type=PEM
ssl.truststore.location={directory / "ca.pem"}
"""
    (directory / "data").mkdir()
    files = _Files(directory / "run", fetch_jars(lambda _: None))
    files.write(properties)
    _format(files, new_cluster_id(), dict(os.environ))
    log = (directory / "kafka.log").open("w")
    process = subprocess.Popen([*files.java(), "kafka.Kafka", str(files.properties)], stdout=log, stderr=log)
    settings = KafkaSettings(
        bootstrap_servers=f"127.0.0.1:{broker}",
        security_protocol="SASL_SSL",
        sasl_mechanism="PLAIN",
        sasl_username="ot",
        sasl_password=SecretStr(PASSWORD),
        ssl_cafile=directory / "ca.pem",
    )
    try:
        _await_open(broker, process, directory / "kafka.log")
        yield settings
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_open(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()[-2000:]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.25)
    raise AssertionError(log.read_text()[-2000:])


async def test_topics_scheduler_and_clients_work_by_settings_alone(secure: KafkaSettings, tmp_path: Path) -> None:
    assert len(await kafka.wait_for_broker(lambda: kafka.ensure_topics(secure), 30)) > 10
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENTINKER_")} | {
        "OPENTINKER_HOME": str(tmp_path),
        "OPENTINKER_KAFKA__BOOTSTRAP_SERVERS": secure.bootstrap_servers,
        "OPENTINKER_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
        "OPENTINKER_KAFKA__SASL_MECHANISM": "PLAIN",
        "OPENTINKER_KAFKA__SASL_USERNAME": "ot",
        "OPENTINKER_KAFKA__SASL_PASSWORD": PASSWORD,
        "OPENTINKER_KAFKA__SSL_CAFILE": str(secure.ssl_cafile),
    }
    worker = Worker(environment, tmp_path / "worker.log")
    publisher = Publisher(secure, f"pool-{uuid.uuid4().hex[:8]}")
    await publisher.start()
    try:
        async with FakeNode(secure, publisher, f"n-{publisher.pool}"):
            uid = await publisher.submit("secure")
            assert (await statuses(secure, {uid}))[uid].phase is JobPhase.COMPLETED
    finally:
        await publisher.stop()
        assert worker.stop() == 0
    assert PASSWORD not in worker.path.read_text()


async def test_a_wrong_password_gets_nowhere(secure: KafkaSettings) -> None:
    wrong = secure.model_copy(update={"sasl_password": SecretStr("wrong")})
    with pytest.raises(KafkaError):
        await kafka.ensure_topics(wrong)
