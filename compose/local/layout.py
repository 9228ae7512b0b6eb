"""What a stack consists of, decided before anything starts: which parts are embedded, which ports, which settings, which programs.

A part is embedded unless the caller's environment names an outside one. Ports and ids are kept in stack.json; every setting that others need in
order to reach the stack goes to config.toml.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentinker.compose.local.errors import PortTaken
from opentinker.compose.local.home import SECRETS, Home, render_toml, write_private
from opentinker.compose.local.jars import cache_directory
from opentinker.compose.local.ports import reserve_ports
from opentinker.compose.local.processes import STACK_ID_VARIABLE
from opentinker.compose.local.programs import PARTS, AgentShape, Program, port_requests, service_programs
from opentinker.compose.local.supervisor import scrubbed_environment

if TYPE_CHECKING:
    from opentinker.compose.runtime.settings import Settings

__all__ = ["EXTERNAL", "Layout", "UpOptions", "choose_layout", "config_groups", "embedded_parts", "prepare_programs", "settings_of"]

# The variable that names an outside service in place of an embedded part.
EXTERNAL = {
    "kafka": "OPENTINKER_KAFKA__BOOTSTRAP_SERVERS",
    "postgres": "OPENTINKER_POSTGRES__DSN",
    "s3": "OPENTINKER_S3__ENDPOINT_URL",
}
_PORT_FIELDS = {  # a port that is set for a service itself counts as asked for
    "OPENTINKER_GATEWAY__PORT": "gateway",
    "OPENTINKER_REGISTRY__PORT": "registry",
    "OPENTINKER_SCHEDULER__REPLICA_PORT": "replica",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What a caller of `up` may choose."""

    only: tuple[str, ...] = ()  # empty: everything
    fresh: bool = False
    agents: AgentShape = field(default_factory=AgentShape)
    ports: Mapping[str, int] = field(default_factory=dict)
    usual_ports: bool = True  # tests leave 9092 and its like to people
    ends_with_caller: bool = False  # tests: the stack ends when the calling process does, however that ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One decided stack."""

    home: Home
    stack_id: str
    cluster_id: str
    ports: Mapping[str, int]
    moved: Mapping[str, tuple[int, int]]  # ports that people know by heart or by the last run: (where it was, where it is)
    embedded: tuple[str, ...]
    agents: AgentShape
    environment: Mapping[str, str]  # of every program, before its own additions


def embedded_parts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Parts for which the environment names no outside service."""
    return tuple(part for part in PARTS if not environ.get(EXTERNAL[part]))


def config_groups(ports: Mapping[str, int], secrets: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """config.toml as groups: addresses of what is embedded, and the caller's own settings of what is not."""
    groups: dict[str, dict[str, Any]] = {
        "kafka": {"bootstrap_servers": f"127.0.0.1:{ports['kafka']}"},
        "postgres": {"dsn": f"postgresql://opentinker:{secrets['postgres-password']}@127.0.0.1:{ports['postgres']}/opentinker"},
        "s3": {
            "endpoint_url": f"http://127.0.0.1:{ports['s3']}",
            "access_key_id": secrets["s3-access-key"],
            "secret_access_key": secrets["s3-secret-key"],
        },
        "gateway": {"port": ports["gateway"], "url": f"http://127.0.0.1:{ports['gateway']}"},
        "registry": {"port": ports["registry"], "url": f"http://127.0.0.1:{ports['registry']}"},
        "scheduler": {"replica_port": ports["replica"], "replica_url": f"http://127.0.0.1:{ports['replica']}"},
        "ingress": {"trusted_namespaces": ["default"]},
    }
    for part, variable in EXTERNAL.items():
        prefix = f"OPENTINKER_{part.upper()}__"
        given = {name.removeprefix(prefix).lower(): value for name, value in environ.items() if name.startswith(prefix) and value}
        groups[part] = given if environ.get(variable) else groups[part] | given
    return groups


def choose_layout(home: Home, options: UpOptions, environ: Mapping[str, str], *, running: bool) -> Layout:
    """Decide ports and ids, keep them in stack.json, write config.toml. Raises PortTaken."""
    kept = home.read_stack()
    requests = port_requests(options.agents.count)
    if not options.usual_ports:
        requests = [dataclasses.replace(request, usual=0) for request in requests]
    by_setting = {name: variable for variable, name in _PORT_FIELDS.items() if environ.get(variable) and name not in options.ports}
    asked = {name: _port_of(variable, environ[variable]) for name, variable in by_setting.items()} | dict(options.ports)
    kept_ports: dict[str, int] = kept.get("ports", {})
    shapes = {request.name: request for request in requests}
    held = frozenset(number for name, port in kept_ports.items() for number in (shapes[name].numbers(port) if name in shapes else [port]))
    ports = reserve_ports(
        requests,
        home=home.root,
        asked=asked,
        kept=kept_ports,
        ours=held if running else frozenset(),
        register=cache_directory() / "ports.json",
        settings=by_setting,
    )
    stack_id = kept.get("stack_id") or uuid.uuid4().hex
    from opentinker.compose.local.kafka import new_cluster_id

    cluster_id = kept.get("cluster_id") or new_cluster_id()
    secrets = {name: home.secret(name) for name in SECRETS}
    write_private(home.config_file, render_toml(config_groups(ports, secrets, environ)))
    own = {name: value for name, value in environ.items() if name.startswith("OPENTINKER_")}
    environment = scrubbed_environment(environ) | own | {"OPENTINKER_HOME": str(home.root), STACK_ID_VARIABLE: stack_id}
    layout = Layout(
        home=home,
        stack_id=stack_id,
        cluster_id=cluster_id,
        ports=ports,
        moved={
            request.name: (before, ports[request.name])
            for request in requests
            if request.usual and request.name not in asked and (before := kept_ports.get(request.name, request.usual)) != ports[request.name]
        },
        embedded=embedded_parts(environ),
        agents=options.agents,
        environment=environment,
    )
    home.write_stack({"programs": {}, "listens": {}} | kept | {"stack_id": stack_id, "cluster_id": cluster_id, "ports": dict(ports)})
    return layout


def _port_of(variable: str, value: str) -> int:
    if not value.isdigit() or not 0 < int(value) < 65536:
        raise PortTaken(f"{variable} is {value!r}, which is no port; set it to a number from 1 to 65535, or unset it")
    return int(value)


def prepare_programs(layout: Layout, wanted: Callable[[str], bool], say: Callable[[str], None]) -> list[Program]:
    """Every program of the stack. Wanted parts are made ready to start (fetched, formatted, initialised), side by side."""
    from opentinker.compose.local.kafka import prepare_kafka
    from opentinker.compose.local.postgres import prepare_postgres
    from opentinker.compose.local.s3 import prepare_s3

    home, ports, secret = layout.home, layout.ports, layout.home.secret
    bare = {name: value for name, value in layout.environment.items() if not name.startswith("OPENTINKER_") or name == STACK_ID_VARIABLE}
    preparations: dict[str, Callable[[], Program]] = {
        "kafka": lambda: prepare_kafka(home, ports, layout.cluster_id, bare, say),
        "postgres": lambda: prepare_postgres(home, ports, secret("postgres-password"), bare),
        "s3": lambda: prepare_s3(home, ports, "opentinker", secret("s3-access-key"), secret("s3-secret-key"), bare),
    }
    with ThreadPoolExecutor(max_workers=len(preparations)) as pool:
        parts = list(pool.map(lambda name: preparations[name](), [name for name in layout.embedded if wanted(name)]))
    return parts + service_programs(ports, layout.agents, layout.environment, home.root, layout.embedded)


def settings_of(home: Path) -> Settings:
    """The settings that a process of that home reads. `OPENTINKER_HOME` is set only for the reading."""
    from opentinker.compose.runtime.settings import load_settings

    before = os.environ.get("OPENTINKER_HOME")
    os.environ["OPENTINKER_HOME"] = str(home)
    try:
        return load_settings()
    finally:
        if before is None:
            del os.environ["OPENTINKER_HOME"]
        else:
            os.environ["OPENTINKER_HOME"] = before
