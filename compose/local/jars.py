"""Kafka's jars: exactly the recorded ones, fetched once for all homes of a user.

`kafka-jars.sha256` lists every jar by Maven coordinates and SHA-256. Nothing is resolved at run time: each jar is fetched by its coordinates with
jgo and compared before it may be used. `python -m opentinker.compose.local.jars` resolves anew and rewrites the list (for a new Kafka version).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from opentinker.compose.local.errors import ArtifactMismatch, ArtifactUnavailable

__all__ = ["KAFKA_VERSION", "Jar", "cache_directory", "fetch_jars", "parse_lock", "read_lock", "verify"]

KAFKA_VERSION = "4.3.1"
_LOCK = Path(__file__).with_name("kafka-jars.sha256")
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+):([\w.-]+):([\w.-]+)")

# kafka-clients is named explicitly: jgo's resolver otherwise picks 3.9.1, and the broker dies with NoSuchMethodError.
_ENDPOINT = "+".join(
    [f"org.apache.kafka:{name}:{KAFKA_VERSION}" for name in ("kafka_2.13", "kafka-clients", "kafka-tools")]
    + ["org.apache.logging.log4j:log4j-slf4j-impl:2.25.1"]
)
# Kafka Connect and its web server come along with kafka-tools; a broker loads none of it, so it is not fetched (half of all jars).
_CONNECT_ONLY = re.compile(
    r"^(org\.apache\.kafka:connect-|org\.eclipse\.jetty|org\.glassfish|jakarta\.|javax\.|com\.sun\.activation|io\.swagger|io\.github\.classgraph"
    r"|org\.javassist|org\.apache\.maven|org\.codehaus\.plexus|com\.fasterxml\.jackson\.(jakarta|module)"
    r"|com\.fasterxml\.jackson\.dataformat:jackson-dataformat-yaml|org\.yaml)"
)


@dataclass(frozen=True, slots=True, order=True)
class Jar:
    """One recorded jar."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def cache_directory() -> Path:
    """What is the same for every home: `$XDG_CACHE_HOME/opentinker`, else `~/.cache/opentinker`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "opentinker"


def parse_lock(text: str) -> tuple[Jar, ...]:
    """`SHA256  group:artifact:version` a line; `#` starts a comment. Raises ValueError for anything else."""
    jars = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number} is not `SHA256  group:artifact:version`: {line!r}")
        digest, group, artifact, version = match.groups()
        jars.append(Jar(group, artifact, version, digest))
    return tuple(jars)


def read_lock() -> tuple[Jar, ...]:
    return parse_lock(_LOCK.read_text(encoding="utf-8"))


def lock_digest() -> str:
    """Changes whenever any jar changes; names the directory that holds them."""
    return hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:16]


def verify(path: Path, jar: Jar) -> None:
    """Raises ArtifactMismatch if the file is not the recorded one, and removes it, so that the next try fetches anew."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != jar.sha256:
        path.unlink(missing_ok=True)
        raise ArtifactMismatch(
            f"{jar.group}:{jar.artifact}:{jar.version} has SHA-256 {found}, recorded is {jar.sha256}; "
            "it was deleted and nothing was started. Try again; if it stays, the package source serves another file than the one we tested"
        )


def fetch_jars(say: Callable[[str], None]) -> list[Path]:
    """Paths of all jars, verified. Fetches what is missing; a complete set is recognised without reading it again."""
    jars = read_lock()
    directory = cache_directory() / f"kafka-{KAFKA_VERSION}-{lock_digest()}"
    complete = directory / ".verified"
    paths = [directory / jar.filename for jar in jars]
    if complete.exists() and all(path.exists() for path in paths):
        return paths
    directory.mkdir(parents=True, exist_ok=True)
    say(f"fetching Kafka {KAFKA_VERSION} ({len(jars)} jars, about 40 MB)")
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="fetch-") as scratch, ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(lambda jar: _fetch(jar, directory, Path(scratch)), jars))
    complete.touch()
    return paths


def _fetch(jar: Jar, directory: Path, scratch: Path) -> None:
    target = directory / jar.filename
    if target.exists():
        verify(target, jar)
        return
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=scratch, remote_repos={"central": _repository()}, timeout=60)
    try:
        fetched = context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()
    except Exception as error:
        raise ArtifactUnavailable(
            f"could not fetch {jar.group}:{jar.artifact}:{jar.version}: {error}. Check the network, or name a mirror in MAVEN_REPOSITORY_URL"
        ) from error
    verify(fetched, jar)
    beside = target.with_name(f".{target.name}.{os.getpid()}")  # two homes may fetch at once: whole files only, by one move
    shutil.copyfile(fetched, beside)
    beside.replace(target)


def _repository() -> str:
    from jgo.constants import MAVEN_CENTRAL_URL

    return (os.environ.get("MAVEN_REPOSITORY_URL") or str(MAVEN_CENTRAL_URL)).rstrip("/")


def _relock() -> None:
    """Resolve with jgo, drop what a broker does not use, write the list."""
    import jgo

    with tempfile.TemporaryDirectory() as scratch:
        jgo.build(_ENDPOINT, cache_dir=Path(scratch))
    found = set()
    for artifact in jgo.resolve(_ENDPOINT):
        if artifact.packaging != "jar" or _CONNECT_ONLY.match(f"{artifact.groupId}:{artifact.artifactId}"):
            continue
        digest = hashlib.sha256(artifact.resolve().read_bytes()).hexdigest()
        found.add(Jar(artifact.groupId, artifact.artifactId, artifact.version, digest))
    lines = ["# Written by `python -m opentinker.compose.local.jars`. SHA-256 and Maven coordinates of every jar of the local broker."]
    lines += [f"{jar.sha256}  {jar.group}:{jar.artifact}:{jar.version}" for jar in sorted(found)]
    _LOCK.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(found)} jars written to {_LOCK}")


if __name__ == "__main__":
    _relock()
