"""`opentinker scheduler`: what an administrator decides for a scheduler that refuses to guess. Speaks to Kafka alone, with the scheduler's own rights."""

from __future__ import annotations

import asyncio
import getpass
import platform
import time
from typing import TYPE_CHECKING

import click
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.access import SCHEDULER_GROUP
from opentinker.schemas.topics import INPUT_TOPICS

from .connect import configured

if TYPE_CHECKING:
    from opentinker.scheduler_stream.adopt import Case

__all__ = ["scheduler"]

_NAMED_MAX = 10  # jobs that are named one by one


@click.group()
def scheduler() -> None:
    """Decide what a scheduler that refuses to start shall go on with."""


@scheduler.command()
@click.option("--partition", type=click.IntRange(0), required=True, help="The partition that is refused.")
@click.option("--topic", type=click.Choice(INPUT_TOPICS), default=None, help="Adopt this input topic only.")
@click.option("--from", "start", type=click.Choice(["beginning", "end"]), default=None, help="Which inputs of the adopted topics to go on with.")
@click.option("--reason", default=None, help="Why; kept in the journal and in an alert.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def adopt(partition: int, topic: str | None, start: str | None, reason: str | None, yes: bool) -> None:
    """Go on with a journal or input topics that contradict each other.

    Without --from and --reason it shows what is wrong and what either decision costs, and changes nothing.
    """
    asyncio.run(_adopt(configured().kafka, partition, topic, start, (reason or "").strip(), yes))


async def _adopt(settings: KafkaSettings, partition: int, topic: str | None, start: str | None, reason: str, yes: bool) -> None:
    from opentinker.scheduler_stream.adopt import adopt as write_down
    from opentinker.scheduler_stream.adopt import examine, live_statuses
    from opentinker.scheduler_stream.errors import SchedulerError
    from opentinker.scheduler_stream.inputs import KafkaInputs
    from opentinker.scheduler_stream.log import KafkaLog

    if partition >= settings.partitions:
        raise click.UsageError(f"--partition: there are {settings.partitions}, so use 0 to {settings.partitions - 1}")
    producer = kafka.producer(settings, "opentinker-cli")
    inputs = KafkaInputs(settings, partition, SCHEDULER_GROUP)
    log = KafkaLog(settings, partition, producer)
    try:
        await asyncio.gather(producer.start(), inputs.start())
        case = await examine(log, inputs, INPUT_TOPICS, partition, await live_statuses(settings, partition), topic)
        if case is None:
            click.echo(f"partition {partition}: journal and inputs agree; there is nothing to adopt")
            return
        _show(case)
        if start is None or not reason:
            raise click.UsageError("nothing was changed; decide with --from beginning|end and --reason TEXT")
        if not yes:
            click.confirm(f"Go on from the {start}?", abort=True)
        who = f"{getpass.getuser()}@{platform.node()}"
        offset = await write_down(log, inputs, case, start=start, adopted_by=who, reason=reason[:1000], now_ms=int(time.time() * 1000))
    except SchedulerError as error:
        raise click.ClickException(str(error)) from None
    finally:
        await asyncio.gather(producer.stop(), inputs.stop())
    click.echo(f"adopted: journal offset {offset}. The next worker goes on from there; a worker that was refused starts again by itself")


def _show(case: Case) -> None:
    """What contradicts what, and what either decision means."""
    click.echo(f"Partition {case.partition}:")
    for text in case.contradictions:
        click.echo(f"  {text}")
    if case.journal_lost:
        click.echo(
            "The journal is lost: what the scheduler knew of nodes, cordons and jobs is gone. Nodes announce themselves again within a minute."
        )
        click.echo(f"Jobs that jobs.status shows as live: {len(case.orphans)}")
        for status in case.orphans[:_NAMED_MAX]:
            click.echo(f"  {status.namespace}/{status.name} {status.phase.value} {status.job_uid}")
        if len(case.orphans) > _NAMED_MAX:
            click.echo(f"  and {len(case.orphans) - _NAMED_MAX} more")
    else:
        click.echo(f"The journal is whole: {len(case.fold.state.jobs)} jobs, {case.live_jobs} of them live, go on as they are.")
    for topic, holding in case.holdings.items():
        what = f", {holding.submissions} of them job submissions" if holding.submissions else ""
        click.echo(
            f"{topic} holds offsets {holding.first} to {holding.end - 1}: {holding.offsets} inputs{what}" if holding.offsets else f"{topic} is empty"
        )
    click.echo("--from beginning: these inputs are read. Jobs among them that are unknown to the journal run, also if they ran before.")
    skipped = "are skipped: commands and reports among them are lost, and jobs submitted by them never run"
    ended = f"; {len(case.orphans)} live jobs end as Failed (JournalLost), and what agents still run of them is stopped" if case.journal_lost else ""
    click.echo(f"--from end: these inputs {skipped}{ended}.")
