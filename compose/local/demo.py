"""`make demo`: start everything, train CartPole with a gang of four through the gateway, and show that it reached its goal.

Exit code 0 only if the job completed, its last 100 episodes returned 475 or more on average, and a model version was registered. Works again and again;
each run registers the next version. `--down` stops the stack at the end, whatever came of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from opentinker.producers.client import Client, JobView

__all__ = ["demo"]

_MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "cartpole-v1.json"
_GOAL_RETURN = 475.0
_TIMEOUT_S = 900.0


@click.command()
@click.option("--down", "stop", is_flag=True, help="Stop the stack at the end.")
def demo(stop: bool) -> None:
    """Train CartPole-v1 with four replicas, end to end."""
    from opentinker.compose.runtime.settings import home_directory

    from .errors import StackError
    from .home import Home
    from .layout import UpOptions
    from .progress import progress_for_output
    from .stack import down, up

    home, progress, began = Home(home_directory(dict(os.environ))), progress_for_output(), time.monotonic()
    try:
        layout = up(home, UpOptions(), progress)
        reached = _train()
        click.echo(f"\n{'done' if reached else 'the goal was missed'} in {time.monotonic() - began:.0f} s, start-up included")
        if not stop:
            _say_how_to_go_on(layout.ports, home.secrets / "api-key")
    except StackError as error:
        click.echo(f"make demo: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("\nmake demo: interrupted; what runs goes on until `make down`", err=True)
        sys.exit(130)
    finally:
        if stop:
            down(home, progress)
            click.echo("stopped; data and keys stay, the next `make demo` registers the next version")
    sys.exit(0 if reached else 1)


def _train() -> bool:
    """Submit, follow, judge."""
    from opentinker.producers.cli.watching import watch_job
    from opentinker.producers.client import Client, OpenTinkerError

    try:
        with Client() as client:
            job = _submit(client)
            click.echo(f"\n  job {job.metadata.namespace}/{job.metadata.name}, uid {job.metadata.uid}")
            view = watch_job(client, job.metadata.uid, job.metadata.namespace, _TIMEOUT_S)
            return _judge(view)
    except OpenTinkerError as error:
        click.echo(f"make demo: {error}", err=True)
        return False


def _submit(client: Client) -> JobView:
    """The example as it stands; if an interrupted demo left it running, that job."""
    from opentinker.producers.client import ConflictError

    try:
        return client.submit(_MANIFEST.read_bytes())
    except ConflictError:
        click.echo("  cartpole-v1 is running already; following it")
        return client.job("cartpole-v1")


def _judge(view: JobView) -> bool:
    status, progress = view.status, view.status.progress
    checks = [
        ("job completed", status.phase == "Completed", status.message or status.phase),
        (
            f"mean return of the last 100 episodes at least {_GOAL_RETURN:g}",
            (progress.mean_return or 0.0) >= _GOAL_RETURN,
            "none" if progress.mean_return is None else f"{progress.mean_return:.1f}",
        ),
        ("model version registered", status.model is not None, f"{status.model.name} version {status.model.version}" if status.model else "none"),
    ]
    for name, good, value in checks:
        click.echo(f"  {'ok    ' if good else 'FAILED'}  {name}: {value}")
    return all(good for _, good, _ in checks)


def _say_how_to_go_on(ports: Mapping[str, int], key: Path) -> None:
    gateway, kafka = f"http://127.0.0.1:{ports['gateway']}", f"127.0.0.1:{ports['kafka']}"
    program = Path(sys.executable).parent / "opentinker"
    click.echo(
        f"""
The stack goes on running.
  page      {gateway}/    the key it asks for is in {key}
  API       curl -H "Authorization: Bearer $(cat {key})" {gateway}/v1/jobs
  jobs      {program} get jobs
  metrics   {program} metrics tail
  topics    {program} topics list        Kafka is at {kafka}
  stop      make down                    data stays; make demo DOWN=1 stops at the end"""
    )


if __name__ == "__main__":
    demo()
