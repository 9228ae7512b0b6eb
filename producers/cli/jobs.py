"""Commands about jobs, by way of the gateway."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from opentinker.schemas.errors import nearest, shorten

from ..client import JobFailedError, JobView, WaitTimeoutError
from ..client.errors import NotFoundError
from .connect import gateway
from .models import get_models
from .output import age, format_option, print_data, print_rows, print_table, safe
from .watching import watch_job

__all__ = ["cancel", "describe", "explain", "get", "logs", "submit", "watch"]

_MANIFEST_BYTES_MAX = 4 * 2**20  # the gateway's own limit is lower and says so; this only bounds what is read here

namespace_option = click.option("-n", "--namespace", default="default", show_default=True, envvar="OPENTINKER_NAMESPACE", help="Namespace.")


@click.command()
@click.argument("manifest", metavar="[FILE|-]", required=False)
@click.option("-f", "--file", "source", metavar="FILE|-", help="Manifest in JSON or YAML; - reads standard input. Or give it without -f.")
@click.option("--wait", is_flag=True, help="Follow the job; exit 10 if it does not complete.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=None, help="Seconds to wait at most (exit 6).")
@click.option("--dry-run", is_flag=True, help="Show every effective value with its source; submit nothing.")
@click.option("--idempotency-key", default=None, help="The same key is the same job, however often it is sent.")
@format_option
def submit(
    manifest: str | None, source: str | None, wait: bool, timeout_s: float | None, dry_run: bool, idempotency_key: str | None, output: str
) -> None:
    """Submit a training job from a manifest."""
    if (manifest is None) == (source is None):
        raise click.UsageError("name one manifest, for example: opentinker submit -f examples/cartpole-v1.json")
    document = _read(source or manifest or "-")
    with gateway() as client:
        if dry_run:
            _print_dry_run(client.dry_run(document), output)
            return
        view = client.submit(document, idempotency_key=idempotency_key)
        if not wait:
            _print_submitted(view, output)
            return
        click.echo(f"job {view.metadata.name} accepted, uid {view.metadata.uid}", err=True)
        view = watch_job(client, view.metadata.uid, view.metadata.namespace, timeout_s)
    _print_submitted(view, output)
    _raise_unless_completed(view)


def _read(source: str) -> bytes:
    try:
        data = sys.stdin.buffer.read(_MANIFEST_BYTES_MAX + 1) if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise click.UsageError(f"cannot read {source}: {error.strerror}; name a manifest, for example examples/cartpole-v1.json") from None
    if not data.strip():
        raise click.UsageError(f"{'standard input' if source == '-' else source} is empty; give a TrainingJob manifest")
    if len(data) > _MANIFEST_BYTES_MAX:
        raise click.UsageError(f"{source} is larger than {_MANIFEST_BYTES_MAX // 2**20} MiB; a manifest is a few kilobytes")
    return data


def _print_submitted(view: JobView, form: str) -> None:
    if form in ("json", "yaml"):
        print_data(view.model_dump(by_alias=True, mode="json"), form)
    elif form == "name":
        click.echo(view.metadata.uid)
    else:
        model = f", model {view.status.model.name} version {view.status.model.version}" if view.status.model else ""
        click.echo(f"job {view.metadata.namespace}/{view.metadata.name} {view.metadata.uid}: {view.status.phase}{model}")


def _print_dry_run(answer: dict[str, Any], form: str) -> None:
    if form in ("json", "yaml"):
        print_data(answer, form)
        return
    rows = next((value for value in answer.values() if isinstance(value, list)), [])
    print_table(("FIELD", "VALUE", "SOURCE"), [(row["field"], _value(row["value"]), row["source"]) for row in rows], "nothing to show")


def _value(value: Any) -> str:
    """As a manifest would say it."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _raise_unless_completed(view: JobView) -> None:
    if not view.status.terminal:
        raise WaitTimeoutError(f"job {view.metadata.name} is still {view.status.phase}; it goes on: opentinker watch {view.metadata.uid}")
    if view.status.phase != "Completed":
        raise JobFailedError(view)


@click.command()
@click.argument("kind", type=click.Choice(["jobs", "job", "nodes", "node", "models", "model", "algorithms", "algorithm"]))
@click.argument("name", required=False)
@namespace_option
@click.option("-A", "--all-namespaces", is_flag=True, help="Jobs of every namespace.")
@click.option("--phase", default=None, help="Only jobs in this phase, for example Running.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml", "name", "manifest"]),
    default="table",
    show_default=True,
    help="Form; manifest is what submit takes.",
)
def get(kind: str, name: str | None, namespace: str, all_namespaces: bool, phase: str | None, output: str) -> None:
    """List jobs, nodes, models or algorithms, or show one by NAME (a job also by uid, or the first eight characters of it).

    A model is NAME, which lists its versions, or NAME:VERSION, which lists its files with an address for each.
    """
    if name is None and not kind.endswith("s"):
        raise click.UsageError(f"name the {kind}, or list them with: opentinker get {kind}s")
    if output == "manifest" and (kind not in ("job", "jobs") or name is None):
        raise click.UsageError("-o manifest is for one job: opentinker get job NAME -o manifest")
    with gateway() as client:
        if kind in ("job", "jobs"):
            if name is not None:
                _print_jobs([client.job(name, namespace)], output, single=True)
            else:
                _print_jobs(list(client.jobs(namespace=None if all_namespaces else namespace, phase=phase)), output)
        elif kind in ("node", "nodes"):
            _print_nodes(_named(client.nodes(), "node", name, "node"), output)
        elif kind in ("model", "models"):
            get_models(client, name, namespace, output)
        else:
            print_rows(
                _named(client.algorithms(), "name", name, "algorithm"), {"NAME": "name", "DESCRIPTION": "description"}, output, "no algorithms"
            )


def _named(rows: list[dict[str, Any]], field: str, name: str | None, what: str) -> list[dict[str, Any]]:
    """All of them, or the one of that name. Raises NotFoundError."""
    if name is None:
        return rows
    found = [row for row in rows if row.get(field) == name]
    if not found:
        guess = nearest(name, [str(row.get(field)) for row in rows])
        raise NotFoundError(f"there is no {what} {shorten(name)}; {f'did you mean {guess}?' if guess else 'leave the name out to list them'}", 404)
    return found


def _print_jobs(views: list[JobView], form: str, single: bool = False) -> None:
    if form == "manifest":
        print_data(manifest_of(views[0]), "yaml")
        return
    if form in ("json", "yaml"):
        data = [view.model_dump(by_alias=True, mode="json") for view in views]
        print_data(data[0] if single else data, form)
        return
    if form == "name":
        for view in views:
            click.echo(view.metadata.uid)
        return
    rows = []
    for view in views:
        status, progress = view.status, view.status.progress
        rows.append(
            (
                view.metadata.namespace,
                view.metadata.name,
                status.phase,
                status.reason if status.phase in ("Pending", "Failed") else "",
                "-" if status.terminal else f"{status.replicas_running}/{status.replicas}",
                f"{progress.global_step:,}",
                "" if progress.mean_return is None else f"{progress.mean_return:.1f}",
                f"{status.model.name}:{status.model.version}" if status.model else "",
                age(status.submitted_at),
                view.metadata.uid,
            )
        )
    columns = ("NAMESPACE", "NAME", "PHASE", "REASON", "READY", "STEPS", "RETURN", "MODEL", "AGE", "UID")
    print_table(columns, rows, "no jobs; submit one with: opentinker submit -f examples/cartpole-v1.json")


def _print_nodes(nodes: list[dict[str, Any]], form: str) -> None:
    if form in ("json", "yaml"):
        print_data(nodes, form)
        return
    rows = []
    for node in nodes:
        devices = node.get("devices", [])
        free = sum(1 for device in devices if not device.get("jobUid"))
        simulated = " (simulated)" if any(device.get("simulated") for device in devices) else ""
        cpu, free_cpu = node.get("cpuMillis", 0), node.get("freeCpuMillis", 0)
        rows.append(
            (
                node.get("node"),
                node.get("pool"),
                node.get("state"),
                f"{free}/{len(devices)}{simulated}",
                f"{free_cpu / 1000:g}/{cpu / 1000:g}",
                len(node.get("jobs", [])),
            )
        )
    print_table(("NODE", "POOL", "STATE", "GPUS FREE", "CPU FREE", "JOBS"), rows, "no nodes; start an agent: python -m opentinker.trainer_agent")


@click.command()
@click.argument("job")
@namespace_option
@format_option
def describe(job: str, namespace: str, output: str) -> None:
    """Everything about one job: settings, progress, why it waits, events."""
    with gateway() as client:
        view, events = client.job(job, namespace), client.events(job, namespace)
        explained = client.explain(view.metadata.uid, namespace) if not view.status.terminal else {}
        effective = client.dry_run(manifest_of(view))
    for row in effective.get("effective", ()):
        if row["field"] == "spec.seed":
            row["value"] = view.status.seed  # drawn when it was submitted
    data = view.model_dump(by_alias=True, mode="json") | {"explain": explained, "effective": effective, "events": events}
    if output in ("json", "yaml"):
        print_data(data, output)
        return
    status, progress = view.status, view.status.progress
    click.echo(f"Name:        {view.metadata.namespace}/{view.metadata.name}\nUid:         {view.metadata.uid}\nPool:        {status.pool}")
    click.echo(f"Phase:       {status.phase}{f' ({safe(status.reason)})' if status.reason else ''}")
    if text := explained.get("text") or status.message:
        click.echo(f"Because:     {safe(str(text))}")
    where = f" on {', '.join(status.nodes)}" if status.nodes else ""
    click.echo(f"Attempt:     {status.attempt}{where}")
    mean = "none yet" if progress.mean_return is None else f"{progress.mean_return:.2f}"
    click.echo(f"Progress:    {progress.global_step:,} steps, {progress.episodes:,} episodes, mean return {mean}")
    if status.model:
        click.echo(f"Model:       {status.model.name} version {status.model.version}")
    click.echo("Settings:")
    _print_dry_run(effective, "table")
    click.echo("Events:")
    rows = [(event.get("time") or event.get("timeMs") or event.get("time_ms"), event.get("type"), _event_text(event)) for event in events]
    print_table(("TIME", "TYPE", "WHAT"), rows, "no events yet")


def _event_text(event: dict[str, Any]) -> str:
    data = event.get("data", event)
    nodes = f"on {', '.join(data['nodes'])}" if data.get("nodes") else ""
    return str(data.get("message") or data.get("reason") or nodes or data.get("stop_reason") or "")


def manifest_of(view: JobView) -> dict[str, Any]:
    """As it was asked for: what is at its default there does not count as given."""
    given = {"labels": view.metadata.labels, "namespace": "" if view.metadata.namespace == "default" else view.metadata.namespace}
    metadata = {"name": view.metadata.name} | {name: value for name, value in given.items() if value}
    return {"apiVersion": "opentinker.io/v1", "kind": "TrainingJob", "metadata": metadata, "spec": view.spec}


@click.command()
@click.argument("job")
@namespace_option
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=None, help="Seconds to watch at most (exit 6).")
def watch(job: str, namespace: str, timeout_s: float | None) -> None:
    """Follow a job's progress until it ends; exit 10 if it does not complete."""
    with gateway() as client:
        view = watch_job(client, job, namespace, timeout_s)
    _print_submitted(view, "table")
    _raise_unless_completed(view)


@click.command()
@click.argument("job")
@namespace_option
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until the job has ended.")
@click.option("--tail", default=200, show_default=True, type=click.IntRange(0, 10_000), help="Lines from the end.")
@click.option("--replica", type=click.IntRange(0), default=None, help="Only this replica.")
def logs(job: str, namespace: str, follow: bool, tail: int, replica: int | None) -> None:
    """Show or follow a job's output."""
    with gateway() as client:
        uid = client.job(job, namespace).metadata.uid
        if follow:
            for entry in client.follow_logs(uid, namespace, tail):
                _print_log(entry, replica)
            return
        answer = client.logs(uid, namespace, tail)
        entries = answer if isinstance(answer, list) else next((value for value in answer.values() if isinstance(value, list)), [])
        for entry in entries:
            _print_log(entry, replica)
        if not entries:
            click.echo("no output yet", err=True)


def _print_log(entry: dict[str, Any], replica: int | None) -> None:
    rank = entry.get("replicaRank", entry.get("replica_rank", entry.get("replica", 0)))
    if replica is not None and rank != replica:
        return
    lines = entry.get("lines") or [entry.get("line", entry.get("text", ""))]
    for line in lines:
        click.echo(f"[{rank}] {safe(str(line))}")


@click.command()
@click.argument("job")
@namespace_option
@format_option
def explain(job: str, namespace: str, output: str) -> None:
    """Say why a job stands where it stands, with numbers."""
    with gateway() as client:
        answer = client.explain(job, namespace)
    if output in ("json", "yaml"):
        print_data(answer, output)
        return
    phase, reason = str(answer.get("phase", "")), str(answer.get("reason", ""))
    click.echo(safe(f"{answer.get('name', job)}: {phase}{f', {reason}' if reason not in ('', phase) else ''}"))
    click.echo(safe(str(answer.get("text", ""))))
    if answer.get("position"):
        click.echo(f"position {answer['position']} in pool {answer.get('pool')}")


@click.command()
@click.argument("job")
@namespace_option
@click.option("--reason", default="", help="Goes into the job's history.")
def cancel(job: str, namespace: str, reason: str) -> None:
    """Cancel a job. A running one saves a checkpoint first."""
    with gateway() as client:
        view = client.cancel(job, namespace, reason)
    until = "" if view.status.terminal else f"; it is {view.status.phase} until the scheduler and its node have seen to it"
    click.echo(f"job {view.metadata.namespace}/{view.metadata.name}: cancel accepted{until}")
