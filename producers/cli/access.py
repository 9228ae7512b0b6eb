"""Commands that give every role its user, rights and quota on Kafka. They need the credentials of a super user, and nothing else of ours does."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from opentinker.compose.runtime.settings import load_settings
from opentinker.schemas.access import SERVICE_ROLES, Quota, Right, Role, grants, roles, tenant_role
from opentinker.schemas.manifest import dns_label
from opentinker.schemas.quantities import memory_bytes

from .connect import configured
from .output import print_data, print_table

if TYPE_CHECKING:
    from opentinker.compose.runtime.access import Difference

__all__ = ["access", "kafka_commands", "parse_quotas"]

_TOOL = '--bootstrap-server "$BOOTSTRAP" --command-config "$ADMIN_PROPERTIES"'


@click.group()
def access() -> None:
    """Users, rights and quotas on Kafka, from one table."""


def _table_options(function: Any) -> Any:
    namespace = click.option("--namespace", "namespaces", multiple=True, help="A tenant; repeat it. Default: OPENTINKER_INGRESS__NAMESPACES.")
    text = "Producer bytes/s and request share, for example tenant=1Mi:50."
    return namespace(click.option("--quota", "quotas", multiple=True, metavar="ROLE=BYTES[:PERCENT]", help=text)(function))


@access.command()
@_table_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "kafka-acls"]),
    default="table",
    show_default=True,
    help="Form; kafka-acls prints commands of Kafka's own tools.",
)
@click.option(
    "--passwords", type=click.Path(path_type=Path, file_okay=False), default=Path("passwords"), show_default=True,
    help="Where the commands of kafka-acls find the files.",
)  # fmt: skip
def plan(namespaces: tuple[str, ...], quotas: tuple[str, ...], form: str, passwords: Path) -> None:
    """Print what every role may do. Asks nobody and changes nothing."""
    wanted = _wanted(namespaces, quotas)
    if form == "kafka-acls":
        for line in kafka_commands(wanted, passwords):
            click.echo(line)
        return
    rows = [_row(role, *resource, rights) for role in wanted for resource, rights in _by_resource(role)]
    if form == "json":
        limits = {role.principal: role.quota.values() | {"per_client": role.quota.per_client} for role in wanted if role.quota}
        print_data({"rights": rows, "quotas": limits}, "json")
        return
    shown = [(row["user"], ", ".join(row["operations"]), f"{row['resource']} {row['name']}{'…' if row['prefixed'] else ''}") for row in rows]
    print_table(("USER", "MAY", "ON"), shown, "nobody may do anything")
    for role in wanted:
        if role.quota:
            share = f", {role.quota.request_percent} % of a request thread" if role.quota.request_percent is not None else ""
            click.echo(f"{role.principal}: {role.quota.producer_bytes_per_s:,} bytes/s{' for each client' if role.quota.per_client else ''}{share}")


@access.command()
@_table_options
@click.option(
    "--passwords", required=True, type=click.Path(path_type=Path, file_okay=False), help="A file of mode 0600 for each user; made where missing."
)
@click.option("--prune", is_flag=True, help="Also remove what stands in Kafka beyond the table.")
def apply(namespaces: tuple[str, ...], quotas: tuple[str, ...], passwords: Path, prune: bool) -> None:
    """Make Kafka as the table says. Safe to repeat."""
    from opentinker.compose.runtime import access as runtime

    wanted, settings = _wanted(namespaces, quotas), configured().kafka
    known = runtime.passwords(passwords, [role.principal for role in wanted])
    before: Difference = _run(runtime.apply(settings, wanted, known, prune=prune))
    for line in before.missing():
        click.echo(f"added    {line}")
    for line in before.beyond():
        click.echo(f"removed  {line}" if prune else f"beyond   {line}")
    click.echo(f"{len(wanted)} users as the table says; their passwords are in {passwords}")
    if before.beyond() and not prune:
        click.echo("what is beyond the table was left; --prune removes it", err=True)


@access.command()
@_table_options
def check(namespaces: tuple[str, ...], quotas: tuple[str, ...]) -> None:
    """Compare Kafka with the table. Exit code 1 if anything is missing or beyond it."""
    from opentinker.compose.runtime import access as runtime

    wanted, settings = _wanted(namespaces, quotas), configured().kafka
    found = runtime.compare(wanted, _run(runtime.read_standing(settings)))
    for line in found.missing():
        click.echo(f"missing  {line}")
    for line in found.beyond():
        click.echo(f"beyond   {line}")
    if found.missing() or found.beyond():
        raise click.ClickException("Kafka is not as the table says; opentinker access apply adds what is missing, and --prune removes the rest")
    click.echo(f"{len(wanted)} users, {len(grants(wanted))} rights, as the table says")


def _run(work: Any) -> Any:
    from opentinker.compose.runtime.access import AccessError

    try:
        return asyncio.run(work)
    except AccessError as error:
        raise click.ClickException(str(error)) from None


def _wanted(namespaces: Iterable[str], quotas: Iterable[str]) -> tuple[Role, ...]:
    for namespace in namespaces:
        try:
            dns_label(namespace)
        except ValueError as error:
            raise click.UsageError(f"--namespace {namespace}: {error}") from None
    return roles(tuple(namespaces) or load_settings().ingress.namespaces, parse_quotas(quotas))


def parse_quotas(texts: Iterable[str]) -> dict[str, Quota]:
    """`tenant=1Mi:50` by role. Raises UsageError."""
    usual: dict[str, Quota | None] = {role.name: role.quota for role in SERVICE_ROLES} | {"tenant": tenant_role("any").quota}
    found: dict[str, Quota] = {}
    for text in texts:
        role, _, amount = text.partition("=")
        rate, _, percent = amount.partition(":")
        if role not in usual:
            raise click.UsageError(f"--quota {text}: no role {role!r}; choose one of {', '.join(sorted(usual))}")
        try:
            rate_bytes = memory_bytes(rate)
        except ValueError as error:
            raise click.UsageError(f"--quota {text}: {error}") from None
        if percent and not (percent.isdigit() and 1 <= int(percent) <= 10_000):
            raise click.UsageError(f"--quota {text}: {percent!r} is no share; 100 is one request thread of a broker")
        before = usual[role]
        found[role] = Quota(
            producer_bytes_per_s=rate_bytes,
            request_percent=int(percent) if percent else None,
            per_client=before.per_client if before else False,
        )
    return found


def _by_resource(role: Role) -> list[tuple[tuple[str, str, bool], list[Right]]]:
    def resource(right: Right) -> tuple[str, str, bool]:
        return right.resource.value, right.name, right.prefixed

    return [(key, list(each)) for key, each in groupby(sorted(role.rights, key=resource), resource)]


def _row(role: Role, kind: str, name: str, prefixed: bool, rights: Sequence[Right]) -> dict[str, Any]:
    operations = sorted({right.operation.value for right in rights})
    return {"user": role.principal, "resource": kind, "name": name, "prefixed": prefixed, "operations": operations}


def kafka_commands(wanted: Iterable[Role], passwords: Path) -> list[str]:
    """The same with Kafka's own tools, for those who may not use ours. Passwords are read from their files when a line runs."""
    lines = ["# BOOTSTRAP: host:port of Kafka; ADMIN_PROPERTIES: a file with the login of a super user"]
    for role in wanted:
        lines += ["", f"# {role.name}: {role.summary}", _user_command(role, passwords)]
        for (kind, name, prefixed), rights in _by_resource(role):
            operations = " ".join(f"--operation {operation}" for operation in sorted({right.operation.value for right in rights}))
            pattern = "prefixed" if prefixed else "literal"
            lines.append(
                f"kafka-acls.sh {_TOOL} --add --allow-principal {shlex.quote(f'User:{role.principal}')} {operations} "
                f"--{kind} {shlex.quote(name)} --resource-pattern-type {pattern}"
            )
        if role.quota is not None:
            lines.append(_quota_command(role, role.quota.values()))
    return lines


def _user_command(role: Role, passwords: Path) -> str:
    path = shlex.quote(str(passwords / role.principal))
    return (
        f"kafka-configs.sh {_TOOL} --alter --entity-type users --entity-name {role.principal} "
        f'--add-config "SCRAM-SHA-512=[iterations=8192,password=$(cat {path})]"'
    )


def _quota_command(role: Role, values: Mapping[str, float]) -> str:
    assert role.quota is not None
    clients = " --entity-type clients --entity-default" if role.quota.per_client else ""
    settings = ",".join(f"{name}={value:.0f}" for name, value in sorted(values.items()))
    return f"kafka-configs.sh {_TOOL} --alter --entity-type users --entity-name {role.principal}{clients} --add-config {settings}"
