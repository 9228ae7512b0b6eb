"""`opentinker limits`: what a namespace may have in a pool."""

from __future__ import annotations

from typing import Any

import click
from opentinker.schemas.errors import nearest
from opentinker.schemas.messages import ResourceLimits, SetNamespaceLimits
from opentinker.schemas.quantities import cpu_millis, format_bytes, format_cpu, memory_bytes

from .admin import tell
from .connect import gateway
from .output import format_option, print_data, print_table

__all__ = ["limits"]

_RESOURCES = ("gpu", "cpu", "memory")
in_pool_option = click.option("--pool", default="default", show_default=True, help="The pool that the limits are for.")


class _Resources(click.ParamType):
    """`gpu=4,cpu=16,memory=64Gi`; what is left out is not limited."""

    name = "RESOURCES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ResourceLimits:
        if isinstance(value, ResourceLimits):
            return value
        found: dict[str, int] = {}
        for item in str(value).split(","):
            name, equals, amount = item.strip().partition("=")
            if name not in _RESOURCES or not equals:
                guess = nearest(name, _RESOURCES)
                self.fail(
                    f"{item!r} is no amount; {f'did you mean {guess}=N?' if guess else 'write for example gpu=4,cpu=16,memory=64Gi'}", param, ctx
                )
            try:
                if name == "gpu":
                    found["gpus"] = _whole(amount)
                elif name == "cpu":
                    found["cpu_millis"] = 0 if amount == "0" else cpu_millis(amount)
                else:
                    found["memory_bytes"] = 0 if amount == "0" else memory_bytes(amount)
            except ValueError as error:
                self.fail(f"{name}: {error}", param, ctx)
        return ResourceLimits(**found)


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{text[:20]!r} is no whole number; write 0, 1, 2, …")
    return int(text)


@click.group()
def limits() -> None:
    """What a namespace may have in a pool: jobs, a share, resources of its own."""


@limits.command("set")
@click.argument("namespace")
@click.option("--queued-max", type=click.IntRange(0, 2**53 - 1), default=None, help="Jobs that may wait at once; 0 takes no new ones.")
@click.option("--running-max", type=click.IntRange(0, 2**53 - 1), default=None, help="Jobs that may be placed at once; others wait.")
@click.option("--weight", type=click.FloatRange(0.001, 1_000_000), default=1.0, show_default=True, help="Its part of what namespaces share.")
@click.option("--own", type=_Resources(), default=None, help="What is its own, for example gpu=4,cpu=16,memory=64Gi.")
@click.option("--borrow", type=_Resources(), default=None, help="How much more it may have while nobody else uses it; default: all there is.")
@click.option("--lend", type=_Resources(), default=None, help="How much of its own others may have while it does not use it; default: all.")
@in_pool_option
def set_limits(
    namespace: str, queued_max: int | None, running_max: int | None, weight: float, own: ResourceLimits | None, borrow: ResourceLimits | None,
    lend: ResourceLimits | None, pool: str,
) -> None:  # fmt: skip
    """Say what NAMESPACE may have; what is left out is as usual. What waits goes on waiting, what runs goes on running."""
    if own is None and (borrow is not None or lend is not None):
        raise click.UsageError("--borrow and --lend are about what is a namespace's own: give --own, for example --own gpu=4")
    fields = {
        "queued_max": queued_max,
        "running_max": running_max,
        "weight_milli": round(weight * 1000),
        "nominal": own,
        "borrowing": borrow,
        "lending": lend,
    }
    if (
        all(value is None for value in fields.values() if not isinstance(value, int))
        and fields["weight_milli"] == 1000
        and queued_max is running_max is None
    ):
        raise click.UsageError(
            "say what it may have, for example --running-max 4, --weight 2 or --own gpu=4; opentinker limits clear takes limits back"
        )
    tell(SetNamespaceLimits, pool, namespace=namespace, **fields)
    click.echo(f"namespace {namespace} in pool {pool}: {_said(fields)}")


def _said(fields: dict[str, Any]) -> str:
    parts = []
    if fields["queued_max"] is not None:
        parts.append(f"{fields['queued_max']:,} jobs may wait")
    if fields["running_max"] is not None:
        parts.append(f"{fields['running_max']:,} jobs may be placed")
    if fields["weight_milli"] != 1000:
        parts.append(f"weight {fields['weight_milli'] / 1000:g}")
    for name, words in (("nominal", "its own"), ("borrowing", "at most borrowed"), ("lending", "at most lent")):
        if fields[name] is not None:
            parts.append(f"{_amounts(fields[name].model_dump())} {words}")
    return ", ".join(parts)


def _amounts(resources: dict[str, int | None]) -> str:
    says = (("gpus", lambda count: f"{count} GPU"), ("cpu_millis", format_cpu), ("memory_bytes", format_bytes))
    return " ".join(say(amount) for field, say in says if (amount := resources.get(field)) is not None)


@limits.command()
@click.argument("namespace")
@in_pool_option
def clear(namespace: str, pool: str) -> None:
    """Let the usual limits hold for NAMESPACE again."""
    tell(SetNamespaceLimits, pool, namespace=namespace)
    click.echo(f"the usual limits hold for namespace {namespace} in pool {pool}")


@limits.command("list")
@format_option
def list_limits(output: str) -> None:
    """List namespaces that have jobs, or limits of their own: what they hold, and what they may have."""
    with gateway() as client:
        rows = client.limits()
    if output in ("json", "yaml"):
        print_data(rows, output)
    elif output == "name":
        for row in rows:
            click.echo(row["namespace"])
    else:
        header = ("NAMESPACE", "POOL", "WAITING", "MAY WAIT", "PLACED", "HOLDS", "WEIGHT", "OWN", "MAY BORROW", "LENDS")
        print_table(header, [_row(row) for row in rows], "no jobs wait, and no namespace has limits of its own")


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    placed = f"{row.get('placed', 0):,}" + (f"/{row['runningMax']:,}" if row.get("runningMax") is not None else "")
    own = row.get("nominal")
    return (
        row["namespace"],
        row["pool"],
        f"{row['queued']:,}",
        f"{row['queuedMax']:,}{' (usual)' if row['usual'] else ''}",
        placed,
        _resources(row.get("holds")),
        f"{row.get('weightMilli', 1000) / 1000:g}",
        _resources(own) if own else "",
        (_resources(row.get("borrowing")) or "all") if own else "",
        (_resources(row.get("lending")) or "all") if own else "",
    )


def _resources(found: dict[str, int | None] | None) -> str:
    """Of an answer of the gateway."""
    given = found or {}
    return _amounts({"gpus": given.get("gpus"), "cpu_millis": given.get("cpuMillis"), "memory_bytes": given.get("memoryBytes")})
