"""Our Kafka behind TLS, with SCRAM users and an authorizer: what is not allowed is refused, and written to its log."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opentinker.compose.local.jars import fetch_jars
from opentinker.compose.local.kafka import _Files, _format, new_cluster_id, render_properties
from opentinker.compose.runtime.settings import KafkaSettings
from own_stack import clean_environment
from ports import await_open, free_port
from pydantic import SecretStr

__all__ = ["ADMIN_PASSWORD", "ADMIN_USER", "Denial", "SecureBroker", "secure_broker"]

ADMIN_USER, ADMIN_PASSWORD = "super", "correct-horse-battery-staple"
_DENIED = re.compile(
    r"Principal = User:(?P<user>\S+) is Denied operation = (?P<operation>\w+) from host = \S+ on resource = (?P<resource>\w+:\w+:\S+) for request = (?P<request>\w+)"
)


@dataclass(frozen=True, slots=True)
class Denial:
    """One refusal, as the broker's authorizer wrote it down."""

    user: str
    operation: str  # WRITE, READ, …
    resource: str  # Topic:LITERAL:opentinker.jobs.commands.v1
    request: str  # Produce, Fetch, …


@dataclass(frozen=True, slots=True)
class SecureBroker:
    """A running broker that speaks SASL_SSL only."""

    port: int
    directory: Path

    def settings(self, user: str = ADMIN_USER, password: str = ADMIN_PASSWORD, mechanism: str = "SCRAM-SHA-512") -> KafkaSettings:
        return KafkaSettings(
            bootstrap_servers=f"127.0.0.1:{self.port}",
            security_protocol="SASL_SSL",
            sasl_mechanism=mechanism,  # type: ignore[arg-type]
            sasl_username=user,
            sasl_password=SecretStr(password),
            ssl_cafile=self.directory / "ca.pem",
        )

    def variables(self, user: str = ADMIN_USER, password: str = ADMIN_PASSWORD) -> dict[str, str]:
        """The same for a child process."""
        return {
            "OPENTINKER_KAFKA__BOOTSTRAP_SERVERS": f"127.0.0.1:{self.port}",
            "OPENTINKER_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
            "OPENTINKER_KAFKA__SASL_MECHANISM": "SCRAM-SHA-512",
            "OPENTINKER_KAFKA__SASL_USERNAME": user,
            "OPENTINKER_KAFKA__SASL_PASSWORD": password,
            "OPENTINKER_KAFKA__SSL_CAFILE": str(self.directory / "ca.pem"),
        }

    def environment(self, home: Path, user: str = ADMIN_USER, password: str = ADMIN_PASSWORD, **more: str) -> dict[str, str]:
        """A child's whole environment: nothing of ours is inherited."""
        return clean_environment(home, **self.variables(user, password) | more)

    def kafka_tools(self, directory: Path) -> dict[str, str]:
        """Kafka's own commands on the PATH, and the variables that our printed lines name: the super user's login among them."""
        java = " ".join(map(shlex.quote, _Files(self.directory / "run", fetch_jars(lambda _: None)).java()))
        for name, main in (("kafka-acls.sh", "org.apache.kafka.tools.AclCommand"), ("kafka-configs.sh", "kafka.admin.ConfigCommand")):
            (directory / name).write_text(f'#!/bin/sh\nexec {java} {main} "$@"\n')
            (directory / name).chmod(0o755)
        login = f'org.apache.kafka.common.security.scram.ScramLoginModule required username="{ADMIN_USER}" password="{ADMIN_PASSWORD}";'
        (directory / "admin.properties").write_text(
            f"security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\nsasl.jaas.config={login}\n"
            f"ssl.truststore.type=PEM\nssl.truststore.location={self.directory / 'ca.pem'}\n"
        )
        variables = {"BOOTSTRAP": f"127.0.0.1:{self.port}", "ADMIN_PROPERTIES": str(directory / "admin.properties")}
        return dict(os.environ) | variables | {"PATH": f"{directory}:{os.environ['PATH']}"}

    def denials(self) -> list[Denial]:
        """Every refusal so far, oldest first."""
        text = (self.directory / "kafka.log").read_text(errors="replace")
        return [Denial(**found.groupdict()) for found in _DENIED.finditer(text)]


@contextmanager
def secure_broker(directory: Path) -> Iterator[SecureBroker]:
    """Start one; it ends with the block. `ADMIN_USER` is its super user; nobody else may do anything until access is granted."""
    _make_certificates(directory)
    broker, controller = free_port(), free_port()
    (directory / "data").mkdir()
    files = _Files(directory / "run", fetch_jars(lambda _: None))
    files.write(_properties(directory, broker, controller))
    _format(files, new_cluster_id(), dict(os.environ), "--add-scram", f"SCRAM-SHA-512=[name={ADMIN_USER},password={ADMIN_PASSWORD}]")
    log = directory / "kafka.log"
    with log.open("w") as output:
        process = subprocess.Popen([*files.java(), "kafka.Kafka", str(files.properties)], stdout=output, stderr=output)
    try:
        await_open(broker, process, lambda: log.read_text()[-2000:])
        yield SecureBroker(broker, directory)
    finally:
        process.terminate()
        process.wait(30)


def _properties(directory: Path, broker: int, controller: int) -> str:
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule"
    login = f'required username="{ADMIN_USER}" password="{ADMIN_PASSWORD}"'
    additions: Mapping[str, object] = {
        "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{scram} {login};",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f'{plain} {login} user_{ADMIN_USER}="{ADMIN_PASSWORD}";',
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": directory / "server.pem",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": directory / "ca.pem",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # The controller's own listener is the one without users; in production it is on a network of its own, or has certificates.
        "super.users": f"User:{ADMIN_USER};User:ANONYMOUS",
        "allow.everyone.if.no.acl.found": "false",
    }
    base = render_properties(directory / "data", broker, controller).replace("PLAINTEXT", "SASL_SSL")
    return base + "".join(f"{name}={value}\n" for name, value in additions.items())


def _make_certificates(directory: Path) -> None:
    """A server certificate for 127.0.0.1 that signs itself, as a lab would make one."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(directory / "key.pem"), "-out", str(directory / "ca.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    (directory / "server.pem").write_text((directory / "key.pem").read_text() + (directory / "ca.pem").read_text())
