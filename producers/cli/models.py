"""Models as the command line shows them: all of a namespace, the versions of one, the files of one version."""

from __future__ import annotations

import re
from typing import Any

import click
from opentinker.schemas.errors import shorten
from opentinker.schemas.quantities import format_bytes

from ..client import Client
from .output import cell, print_data, print_rows, safe

__all__ = ["get_models"]

_VERSION = re.compile(r"(?P<name>[^:]+):v?(?P<version>[0-9]{1,9})")


def get_models(client: Client, wanted: str | None, namespace: str, form: str) -> None:
    """Print them. `wanted`: NAME or NAME:VERSION; None: all models."""
    if wanted is None:
        columns = {"NAMESPACE": "namespace", "NAME": "name", "LATEST VERSION": "latestVersion", "CREATED": "createdAt"}
        _print(client.models(namespace), columns, form)
    elif ":" in wanted:
        _print_version(client, wanted, namespace, form)
    else:
        columns = {
            "VERSION": "version",
            "JOB": "jobUid",
            "STEPS": "globalStep",
            "MEAN RETURN": "meanReturn",
            "ENDED BY": "stopReason",
            "CREATED": "createdAt",
        }
        rows = [row | {"meanReturn": (row.get("metrics") or {}).get("mean_return")} for row in client.model_versions(wanted, namespace)]
        _print(rows, columns, form)


def _print(rows: list[dict[str, Any]], columns: dict[str, str], form: str) -> None:
    if form == "name":
        for row in rows:
            click.echo(f"{row['name']}:{row['version']}" if "version" in row else row["name"])
    else:
        print_rows(rows, columns, form, "no models yet: a job that completes registers one")


def _print_version(client: Client, wanted: str, namespace: str, form: str) -> None:
    found = _VERSION.fullmatch(wanted)
    if found is None:
        raise click.UsageError(f"{shorten(wanted)} is no version of a model; write NAME:VERSION, for example cartpole-v1:1")
    version = client.model_version(found["name"], int(found["version"]), namespace)
    if form in ("json", "yaml"):
        print_data(version, form)
        return
    lineage, metrics = version.get("lineage") or {}, version.get("metrics") or {}
    click.echo(
        f"Model:     {version['namespace']}/{version['name']} version {version['version']}, {format_bytes(version['sizeBytes'])}, {version['digest']}"
    )
    click.echo(
        f"Job:       {version['jobUid']} attempt {version['attempt']}, {version['globalStep']:,} steps, ended by {safe(version['stopReason'])}"
    )
    for name, values in (("Metrics", metrics), ("Lineage", lineage)):
        if told := ", ".join(f"{key} {safe(cell(value))}" for key, value in sorted(values.items()) if not isinstance(value, dict | list)):
            click.echo(f"{name + ':':<10} {told}")
    click.echo("Files, whose addresses need no key and hold for some hours:")
    for file in version["files"]:
        click.echo(f"  {safe(file['name'])}  {format_bytes(file['size'])}  sha256:{file['sha256']}\n    {file.get('url', '')}")
