"""`opentinker simulate`: one seeded story of the real scheduler core, as failing tests print it."""

from __future__ import annotations

import click

__all__ = ["simulate"]


@click.command()
@click.option("--seed", type=click.IntRange(0), required=True, help="Which story.")
def simulate(seed: int) -> None:
    """Run the scheduler's simulator on one seed and check every safety property after every step."""
    from opentinker.scheduler_stream.simulator.run import SimulationFailedError
    from opentinker.scheduler_stream.simulator.run import simulate as run

    try:
        report = run(seed)
    except SimulationFailedError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"seed {seed}: {report.steps} steps, every property held")
    click.echo("faults  " + ", ".join(f"{name} {count}" for name, count in sorted(report.faults.items())))
    click.echo("jobs    " + ", ".join(f"{name} {count}" for name, count in sorted(report.phases.items())))
