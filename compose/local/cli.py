"""The commands `up`, `down`, `status` and `restart`, for `opentinker` and for `python -m opentinker.compose.local`.

Only click is imported here; what a command needs it imports when it runs, so that `--help` stays quick. Exit codes: 0 done, 1 a part failed,
2 wrong usage or a home or port that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from opentinker.compose.local.home import Home
    from opentinker.compose.local.status import StackStatus

__all__ = ["COMMANDS", "down", "main", "restart", "status", "up"]


def _home() -> Home:
    from opentinker.compose.local.home import Home
    from opentinker.compose.runtime.settings import home_directory

    return Home(home_directory(dict(os.environ)))


def _parse_ports(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    ports = {}
    for value in values:
        name, _, number = value.partition("=")
        if not number.isdigit() or not 0 < int(number) < 65536:
            raise click.BadParameter(f"{value!r} is not NAME=NUMBER, for example kafka=9092")
        ports[name] = int(number)
    return ports


@click.command()
@click.option("--only", default="", help="Start only these programs, comma-separated (for example kafka,postgres,s3).")
@click.option("--fresh", is_flag=True, help="Drop all data first; keys and ports stay.")
@click.option("--agents", default=4, show_default=True, type=click.IntRange(0, 64), help="Trainer agents to run.")
@click.option("--gpus-per-agent", default=1, show_default=True, type=click.IntRange(0, 64), help="Simulated GPUs each agent advertises.")
@click.option("--cpu-per-agent", default=2.0, show_default=True, type=click.FloatRange(0.1, 1024), help="Cores each agent advertises.")
@click.option("--memory-per-agent", default="4Gi", show_default=True, help="Memory each agent advertises.")
@click.option(
    "--port", "ports", multiple=True, callback=_parse_ports, metavar="NAME=NUMBER", help="A port by number (kafka, postgres, s3, gateway, …)."
)
def up(only: str, fresh: bool, agents: int, gpus_per_agent: int, cpu_per_agent: float, memory_per_agent: str, ports: dict[str, int]) -> None:
    """Start the local stack and wait until every part answers. Safe to repeat."""
    from opentinker.compose.local.errors import StackError
    from opentinker.compose.local.layout import UpOptions
    from opentinker.compose.local.programs import AgentShape
    from opentinker.compose.local.progress import progress_for_output
    from opentinker.compose.local.stack import up as bring_up

    options = UpOptions(
        only=tuple(name.strip() for name in only.split(",") if name.strip()),
        fresh=fresh,
        agents=AgentShape(count=agents, gpus=gpus_per_agent, cpu=cpu_per_agent, memory=memory_per_agent),
        ports=ports,
    )
    progress = progress_for_output()
    home = _home()
    try:
        layout = bring_up(home, options, progress)
    except StackError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; everything that was started is stopped", 130)
    progress.say("the stack is ready")
    if not options.only:
        _print_addresses(home, layout.ports["gateway"], layout.ports["kafka"] if "kafka" in layout.embedded else None)
        click.echo("  stop it        opentinker down")


@click.command()
def down() -> None:
    """Stop the local stack; data and keys stay."""
    from opentinker.compose.local.errors import StackError
    from opentinker.compose.local.progress import progress_for_output
    from opentinker.compose.local.stack import down as bring_down

    progress = progress_for_output()
    try:
        bring_down(_home(), progress)
    except StackError as error:
        _fail(str(error), error.exit_code)
    progress.say("stopped")


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
def status(output: str) -> None:
    """Show every program of the local stack. Exit code 1 unless all that was started runs."""
    from opentinker.compose.local.status import read_status

    found = read_status(_home())
    if output == "json":
        click.echo(json.dumps(found.as_json(), indent=2))
    elif output == "yaml":
        import yaml

        click.echo(yaml.safe_dump(found.as_json(), sort_keys=False), nl=False)
    else:
        _print_table(found)
        ports = {name: port for program in found.programs for name, port in program.ports.items()}
        if found.running and "gateway" in ports:
            _print_addresses(_home(), ports["gateway"], ports.get("kafka"))
    healthy = found.running and all(program.state in ("running", "stopped") for program in found.programs)  # stopped: left out by --only
    sys.exit(0 if healthy else 1)


@click.command()
@click.argument("name")
def restart(name: str) -> None:
    """Stop one program of the local stack and start it again."""
    from opentinker.compose.local.errors import StackError
    from opentinker.compose.local.stack import restart as restart_program

    try:
        restart_program(_home(), name)
    except StackError as error:
        _fail(str(error), error.exit_code)


def _print_table(found: StackStatus) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    left = [program for program in found.programs if program.pid]
    if not found.running and not left:
        console.print(f"{escape(found.home)}: stopped; `opentinker up` starts it")
        return
    table = Table("program", "state", "pid", "up", "restarts", "memory", "ports", box=None, pad_edge=False)
    for program in found.programs:
        ports = " ".join(str(port) if name == program.name else f"{name}:{port}" for name, port in program.ports.items())
        memory = f"{program.pss_bytes / 2**20:.0f} MiB" if program.pid else ""
        uptime, restarts = f"{program.uptime_s} s" if program.uptime_s else "", str(program.restarts or "")
        table.add_row(program.name, program.state, str(program.pid or ""), uptime, restarts, memory, ports)
    console.print(table)
    for program in found.programs:
        if program.reason:
            console.print(
                f"\n{program.name} is {program.state}: {escape(program.reason)}\n  its log: {escape(found.home)}/logs/{program.name}.log",
                soft_wrap=True,
            )
    console.print(f"\n{escape(found.home)}: {sum(program.pss_bytes for program in found.programs) / 2**20:.0f} MiB in all")


def _print_addresses(home: Home, gateway: int, kafka: int | None) -> None:
    """Where people and programs reach the stack; an outside Kafka is known to whoever named it."""
    click.echo(f"\n  page and API   http://127.0.0.1:{gateway}\n  API key        {home.secrets / 'api-key'}")
    if kafka is not None:
        click.echo(f"  Kafka          127.0.0.1:{kafka}")


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"opentinker: {text}", err=True)
    sys.exit(code)


COMMANDS = (up, down, status, restart)


def main(home: Path | None = None) -> None:
    """`python -m opentinker.compose.local`."""
    if home is not None:
        os.environ["OPENTINKER_HOME"] = str(home)
    group = click.Group(commands={command.name or "": command for command in COMMANDS}, help="The local stack.")
    group()
