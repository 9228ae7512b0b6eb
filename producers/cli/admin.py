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
from opentinker.schemas.messages import AcknowledgeBrake, CordonNode, UncordonNode
from opentinker.schemas.records import Message, encode
from opentinker.schemas.topics import ADMIN, partition_of
from pydantic import ValidationError

from ..client import Client
from ..client.errors import NotFoundError, OpenTinkerError
from .connect import configured

__all__ = ["brake", "cordon", "tell", "uncordon"]

pool_option = click.option("--pool", default="default", show_default=True, help="The pool the node is in.")


@click.command()
@click.argument("node")
@pool_option
def cordon(node: str, pool: str) -> None:
    """Place nothing new on NODE; what runs there goes on."""
    tell(CordonNode, pool, node=node)
    click.echo(f"node {node} is cordoned; opentinker uncordon {node} takes it back")


@click.command()
@click.argument("node")
@pool_option
def uncordon(node: str, pool: str) -> None:
    """Let NODE take work again."""
    tell(UncordonNode, pool, node=node)
    click.echo(f"node {node} takes work again")


@click.group()
def brake() -> None:
    """The brake that holds back mass evictions."""


@brake.command()
@pool_option
def acknowledge(pool: str) -> None:
    """Say that the losses are real: what the brake holds back is evicted and stopped."""
    _pool_must_exist(pool)
    tell(AcknowledgeBrake, pool)
    click.echo(f"the brake of pool {pool} lets go if it is engaged")


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


def tell(kind: type[Message], pool: str, **fields: Any) -> None:
    """Write one message of an administrator. Names that are none are told."""
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
