"""Taking a partition over: announce, recover, verify, republish. Only then may anything be stepped.

Order matters: the status producer is fenced first (a paused rival can publish no status any more), OwnerStarted second (its journal records are void from
here on), and the state is folded through that very record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .codec import InputSpan, OwnerStarted, encode_record
from .contradictions import Inputs, input_contradictions, journal_contradiction
from .core.policy import CORE_VERSION
from .errors import RefusedError, SupersededError
from .journal import Journal
from .log import Log
from .recovery import Fold, find_replay_from, recover

__all__ = ["Ownership", "take_over", "verify_inputs"]


@dataclass(frozen=True, slots=True)
class Ownership:
    journal: Journal
    fold: Fold


async def take_over(
    log: Log, inputs: Inputs, topics: tuple[str, ...], *, partition: int, worker: str, boot_id: str, fence: Callable[[], Awaitable[None]],
    on_progress: Callable[[], None] = lambda: None,
) -> Ownership:  # fmt: skip
    """Become the owner. Raises RefusedError when the logs contradict each other, SupersededError when another worker was faster."""
    await fence()
    on_progress()
    found = await find_replay_from(log)
    if lost := await journal_contradiction(log, inputs, topics, found):
        raise RefusedError(f"{lost}. {_remedy(partition)}")
    started = OwnerStarted(worker=worker, boot_id=boot_id, core_version=CORE_VERSION, replay_from=found.replay_from)
    epoch = await log.append(encode_record(started))
    fold = await recover(log, found.replay_from, epoch + 1, on_progress)
    if fold.owner_epoch != epoch:
        raise SupersededError(f"a newer owner started at journal offset {fold.owner_epoch}")
    await verify_inputs(inputs, fold.positions, partition)
    journal = Journal(
        log,
        fold.state,
        owner_epoch=epoch,
        replay_from=fold.replay_from,
        published_fast=fold.published_fast,
        published_status=fold.published_status,
        swept=fold.swept,
    )
    return Ownership(journal, fold)


async def verify_inputs(inputs: Inputs, positions: dict[str, InputSpan], partition: int) -> None:
    """The journal and the input topics must tell the same history at the last input of each."""
    if found := await input_contradictions(inputs, positions):
        raise RefusedError(f"{'; '.join(each.text for each in found)}. {_remedy(partition)}")


def _remedy(partition: int) -> str:
    return (
        "Restore what was lost, or decide what to go on with: `opentinker scheduler adopt --partition "
        f"{partition}` shows what that costs (docs/operations.md)"
    )
