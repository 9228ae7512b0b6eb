"""Commands of administrators: they write `scheduler.admin`, which Kafka's access control keeps for them."""

from __future__ import annotations

import asyncio
import getpass
import time
import uuid
from typing import Any

import click
from opentinker.compose.runtime import kafka
from opentinker.schemas.errors import nearest, shorten
from opentinker.schemas.messages import AcknowledgeBrake, CordonNode, SetNamespaceLimits, UncordonNode
from opentinker.schemas.records import Message, encode
from opentinker.schemas.topics import ADMIN, partition_of
from pydantic import ValidationError

from ..client import Client
from ..client.errors import NotFoundError, OpenTinkerError
from .connect import configured, gateway
from .output import format_option, print_data, print_table

__all__ = ["brake", "cordon", "limits", "uncordon"]

pool_option = click.option("--pool", default="default", show_default=True, help="The pool the node is in.")


@click.command()
@click.argument("node")
@pool_option
def cordon(node: str, pool: str) -> None:
    """Place nothing new on NODE; what runs there goes on."""
    _tell(CordonNode, pool, node=node)
    click.echo(f"node {node} is cordoned; opentinker uncordon {node} takes it back")


@click.command()
@click.argument("node")
@pool_option
def uncordon(node: str, pool: str) -> None:
    """Let NODE take work again."""
    _tell(UncordonNode, pool, node=node)
    click.echo(f"node {node} takes work again")


@click.group()
def brake() -> None:
    """The brake that holds back mass evictions."""


@brake.command()
@pool_option
def acknowledge(pool: str) -> None:
    """Say that the losses are real: what the brake holds back is evicted and stopped."""
    _pool_must_exist(pool)
    _tell(AcknowledgeBrake, pool)
    click.echo(f"the brake of pool {pool} lets go if it is engaged")


@click.group()
def limits() -> None:
    """What a namespace may have in a pool."""


in_pool_option = click.option("--pool", default="default", show_default=True, help="The pool that the limit is for.")


@limits.command("set")
@click.argument("namespace")
@click.option("--queued-max", type=click.IntRange(0, 2**53 - 1), required=True, help="Jobs that may wait at once; 0 takes no new ones.")
@in_pool_option
def set_limits(namespace: str, queued_max: int, pool: str) -> None:
    """Say how many jobs of NAMESPACE may wait. What waits already goes on waiting."""
    _tell(SetNamespaceLimits, pool, namespace=namespace, queued_max=queued_max)
    click.echo(f"namespace {namespace} may have {queued_max:,} jobs waiting in pool {pool}")


@limits.command()
@click.argument("namespace")
@in_pool_option
def clear(namespace: str, pool: str) -> None:
    """Let the usual limits hold for NAMESPACE again."""
    _tell(SetNamespaceLimits, pool, namespace=namespace)
    click.echo(f"the usual limits hold for namespace {namespace} in pool {pool}")


@limits.command("list")
@format_option
def list_limits(output: str) -> None:
    """List namespaces that have jobs waiting or limits of their own."""
    with gateway() as client:
        rows = client.limits()
    if output in ("json", "yaml"):
        print_data(rows, output)
        return
    shown = [(row["namespace"], row["pool"], f"{row['queued']:,}", f"{row['queuedMax']:,}{' (usual)' if row['usual'] else ''}") for row in rows]
    if output == "name":
        for row in rows:
            click.echo(row["namespace"])
    else:
        print_table(("NAMESPACE", "POOL", "WAITING", "MAY WAIT"), shown, "no jobs wait, and no namespace has limits of its own")


def _nodes() -> list[dict[str, Any]] | None:
    """None: without a gateway or a key, which an administrator of Kafka need not have, nothing is known of nodes."""
    try:
        with Client(timeout_s=5.0, attempts=1) as client:
            return client.nodes()
    except OpenTinkerError:
        return None


def _pool_must_exist(pool: str) -> None:
    """A slip of the pen is told."""
    nodes = _nodes()
    pools = sorted({str(item.get("pool")) for item in nodes or ()})
    if nodes is not None and pool not in pools:
        guess = nearest(pool, pools)
        raise NotFoundError(f"no node is in a pool {shorten(pool)}; {f'did you mean {guess}?' if guess else 'see opentinker get nodes'}", 404)


def _must_exist(node: str, pool: str) -> None:
    nodes = _nodes()
    if nodes is None:
        return
    names = [str(item["node"]) for item in nodes if item.get("pool") == pool]
    if node not in names:
        guess = nearest(node, names)
        raise NotFoundError(f"pool {pool} has no node {shorten(node)}; {f'did you mean {guess}?' if guess else 'see opentinker get nodes'}", 404)


def _tell(kind: type[Message], pool: str, **fields: str | int) -> None:
    try:
        message = kind.model_validate({"pool": pool, "requested_by": f"cli:{getpass.getuser()}", **fields})
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise click.UsageError(f"{field}: {fields.get(field, pool)!r} is not a name; use a-z, 0-9, '-' and '.'") from None
    if "node" in fields:
        _must_exist(str(fields["node"]), pool)
    asyncio.run(_send(message, pool))


async def _send(message: Message, pool: str) -> None:
    settings = configured().kafka
    value, headers = encode(message, id=uuid.uuid4().hex, source="opentinker/cli", time_ms=int(time.time() * 1000))
    async with kafka.started(kafka.producer(settings, "opentinker-cli")) as sender:
        await sender.send_and_wait(ADMIN, value, key=pool.encode(), partition=partition_of(pool, settings.partitions), headers=list(headers))
