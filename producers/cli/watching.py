"""A job's progress in the terminal until it ends: one live line on a terminal, one line per change otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from opentinker.schemas.quantities import format_duration

from ..client import Client, JobView, UnreachableError
from .output import console, safe

__all__ = ["line_of", "watch_job"]

_POLL_S = 0.5
_UNREACHABLE_S = 120.0  # how long a gateway may be away before watching gives up


def line_of(view: JobView, elapsed_s: float) -> str:
    """`Running 3/4 │ 81,920 steps │ 5,120 steps/s │ return 187.3 │ ETA 40 s │ 12 s`."""
    status, progress = view.status, view.status.progress
    parts = [f"{status.phase:<9}"]
    if status.phase in ("Starting", "Running", "Stopping"):
        parts.append(f"{status.replicas_running}/{status.replicas} replicas")
    if progress.global_step:
        total = f" of {progress.total_steps:,}" if progress.total_steps else ""
        parts.append(f"{progress.global_step:,} steps{total}")
        if not status.terminal:
            parts.append(f"{progress.env_steps_per_s:,.0f} steps/s")
    if progress.mean_return is not None:
        parts.append(f"mean return {progress.mean_return:.1f}")
    if progress.eta_s is not None and not status.terminal:
        parts.append(f"ETA {format_duration(progress.eta_s)}")
    if status.attempt > 1:
        parts.append(f"attempt {status.attempt}")
    if status.phase in ("Pending", "Failed", "Cancelled") and (status.message or status.reason):
        parts.append(safe(status.message or status.reason))
    return " │ ".join([*parts, format_duration(elapsed_s)])


def watch_job(client: Client, job: str, namespace: str, timeout_s: float | None = None) -> JobView:
    """Show progress on standard error until the job has ended; returns its last view. Survives a gateway that restarts."""
    out = console(stderr=True)
    began = heard = time.monotonic()
    last, view = "", None
    live: Any = None
    if sys.stderr.isatty():
        from rich.live import Live
        from rich.text import Text

        live = Live(Text(""), console=out, refresh_per_second=4, transient=False)
        live.start()
    try:
        while True:
            now = time.monotonic()
            try:
                view, heard = client.job(job, namespace), now
                text = line_of(view, now - began)
            except UnreachableError as error:
                if now - heard > _UNREACHABLE_S:
                    raise
                text = f"lost contact, the job goes on: {error}"
            if live is not None:
                from rich.text import Text

                live.update(Text(text))
            elif (shown := text.rsplit(" │ ", 1)[0]) != last:
                click.echo(text, err=True)
                last = shown
            if view is not None and view.status.terminal:
                return view
            if timeout_s is not None and now - began > timeout_s and view is not None:
                return view
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        if live is not None:
            live.stop()
        name = view.metadata.uid if view is not None else job
        click.echo(f"\nthe job goes on; follow it: opentinker watch {name}   end it: opentinker cancel {name}", err=True)
        raise
    finally:
        if live is not None:
            live.stop()
