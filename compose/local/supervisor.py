"""supervisord: its configuration, its start, and asking it things.

It restarts what ends, a little later each time, and rotates logs. Nothing is started by it on its own: `stack.py` starts programs in their order.
It listens on 127.0.0.1 behind a generated password (a Unix socket's path would be too long in a deep home).
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import os
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.compose.local.errors import PartFailed
from opentinker.compose.local.home import Home, write_private
from opentinker.compose.local.processes import is_alive, read_records
from opentinker.compose.local.programs import Program, stop_stages

__all__ = ["SUPERVISOR", "Supervisor", "render_configuration", "render_spec"]

SUPERVISOR = "supervisord"
_LAUNCH = Path(__file__).with_name("launch.py")
_SIGNALS = {"TERM": 15, "INT": 2}
_INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "XDG_CACHE_HOME",
)
_RESTARTS_MAX = 30  # supervisord waits one second longer before each: about eight minutes in all, then FATAL until the next `up`
_WAIT_TOLD_S = 2.0
_LOG_BYTES, _LOG_BACKUPS = 8 * 2**20, 2  # 24 MiB a program at most


def render_spec(program: Program, record: Path) -> str:
    """What launch.py reads: the exact command, environment and signal of parent's death."""
    spec = {
        "name": program.name,
        "argv": list(program.argv),
        "env": dict(program.env),
        "cwd": str(program.cwd),
        "death_signal": _SIGNALS[program.stop_signal],
        "record": str(record),
        "user": dict(program.user) if program.user else None,
    }
    return json.dumps(spec, indent=1, sort_keys=True)


def render_configuration(home: Home, programs: Sequence[Program], port: int, password: str) -> str:
    """supervisord.conf. Commands carry a digest of their spec, so that supervisord sees a change of either."""
    digest = hashlib.sha1(password.encode(), usedforsecurity=False).hexdigest()
    lines = [
        "[supervisord]",
        f"logfile={_quoted(home.logs / 'supervisord.log')}",
        "logfile_maxbytes=4MB",
        "logfile_backups=1",
        f"pidfile={_quoted(home.run / 'supervisord.pid')}",
        f"directory={_quoted(home.run)}",
        "nodaemon=true",
        "umask=077",
        "",
        "[inet_http_server]",
        f"port=127.0.0.1:{port}",
        "username=opentinker",
        f"password={{SHA}}{digest}",
        "",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
    ]
    # Supervisord, when it is told to end, ends the highest priority first.
    stages = stop_stages(program.name for program in programs)
    priorities = {name: 100 * (len(stages) - place) for place, stage in enumerate(stages) for name in stage}
    for program in programs:
        spec = home.run / f"{program.name}.json"
        changed = _digest(program, home.pids / f"{program.name}.json")
        lines += [
            "",
            f"[program:{program.name}]",
            f'command="{_quoted(sys.executable)}" -I -S "{_quoted(_LAUNCH)}" "{_quoted(spec)}" {changed}',
            "autostart=false",
            "autorestart=true",
            "startsecs=1",
            f"startretries={_RESTARTS_MAX}",
            f"stopsignal={program.stop_signal}",
            f"stopwaitsecs={program.stop_wait_s}",
            f"priority={priorities[program.name]}",
            "killasgroup=true",
            "redirect_stderr=true",
            f"stdout_logfile={_quoted(home.log_file(program.name))}",
            f"stdout_logfile_maxbytes={_LOG_BYTES}",
            f"stdout_logfile_backups={_LOG_BACKUPS}",
        ]
    return "\n".join(lines) + "\n"


def _digest(program: Program, record: Path) -> str:
    """Of what makes the program another one. The caller's shell does not: `up` from an activated environment must restart nothing."""
    own = {name: value for name, value in program.env.items() if name not in _INHERITED}
    return hashlib.sha256(render_spec(dataclasses.replace(program, env=own), record).encode()).hexdigest()[:12]


def _quoted(path: object) -> str:
    return str(path).replace("%", "%%")  # supervisord expands %(name)s


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """One home's supervisord, running or not."""

    home: Home
    port: int
    password: str

    def write(self, programs: Sequence[Program]) -> None:
        for program in programs:
            write_private(self.home.run / f"{program.name}.json", render_spec(program, self.home.pids / f"{program.name}.json"))
        write_private(self.home.run / "supervisord.conf", render_configuration(self.home, programs, self.port, self.password))

    def start(self, env: Mapping[str, str], *, ends_with_caller: bool = False) -> None:
        """Start it in a session of its own, and wait until it answers. Raises PartFailed."""
        spec = self.home.run / f"{SUPERVISOR}.json"
        argv = [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(self.home.run / "supervisord.conf")]
        record = str(self.home.pids / f"{SUPERVISOR}.json")
        death_signal = _SIGNALS["TERM"] if ends_with_caller else 0
        content = {"name": SUPERVISOR, "argv": argv, "env": dict(env), "cwd": str(self.home.run), "record": record, "death_signal": death_signal}
        write_private(spec, json.dumps(content))
        log = self.home.logs / "supervisord.out"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCH), str(spec)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and process.poll() is None:
            if self.answers():
                return
            time.sleep(0.03)
        process.kill()
        raise PartFailed(SUPERVISOR, "it did not answer", str(log), log.read_text(errors="replace").splitlines()[-10:])

    def is_running(self) -> bool:
        """Whether this home's own supervisord lives and answers. Another program on its port does not count."""
        mine = [record for record in read_records(self.home.pids) if record.name == SUPERVISOR and is_alive(record)]
        return bool(mine) and self.answers()

    def answers(self) -> bool:
        try:
            return bool(self.call("getState")["statename"] == "RUNNING")
        except (OSError, xmlrpc.client.Error, http.client.HTTPException):
            return False

    def call(self, method: str, *arguments: Any) -> Any:
        """One XML-RPC call in the `supervisor` namespace."""
        url = f"http://opentinker:{self.password}@127.0.0.1:{self.port}/RPC2"
        with xmlrpc.client.ServerProxy(url, allow_none=True) as proxy:
            return getattr(proxy.supervisor, method)(*arguments)

    def states(self) -> dict[str, dict[str, Any]]:
        """What supervisord knows of each program, by name."""
        return {info["name"]: info for info in self.call("getAllProcessInfo")}

    def reload(self) -> None:
        """Take over a changed configuration: only programs that changed are stopped."""
        added, changed, removed = self.call("reloadConfig")[0]
        for name in (*changed, *removed):
            self.call("stopProcessGroup", name)
            self.call("removeProcessGroup", name)
        for name in (*added, *changed):
            self.call("addProcessGroup", name)

    def start_program(self, name: str) -> None:
        """Start it unless it runs; returns at once."""
        try:
            self.call("startProcess", name, False)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != 60:  # ALREADY_STARTED
                raise PartFailed(name, str(fault.faultString), str(self.home.log_file(name)), []) from None

    def stop_programs(self, names: Sequence[str], wait_s: float, on_wait: Callable[[list[str]], None] = lambda waiting: None) -> None:
        """Stop them side by side and wait; supervisord kills what outlives its own stop wait. `on_wait` hears once who takes longer than a moment."""
        for name in names:
            try:
                self.call("stopProcess", name, False)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode not in (10, 70):  # BAD_NAME, NOT_RUNNING
                    raise
        began, told = time.monotonic(), False
        while time.monotonic() - began < wait_s:
            states = self.states()
            waiting = [name for name in names if name in states and states[name]["statename"] not in ("STOPPED", "EXITED", "FATAL")]
            if not waiting:
                return
            if not told and time.monotonic() - began > _WAIT_TOLD_S:
                on_wait(waiting)
                told = True
            time.sleep(0.05)

    def shut_down(self) -> None:
        self.call("shutdown")


def scrubbed_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every program inherits: how to find programs, the language, certificates and proxies. No other variable of the caller's shell."""
    return {name: environ[name] for name in _INHERITED if name in environ} | {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
