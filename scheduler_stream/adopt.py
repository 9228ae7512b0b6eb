"""An administrator decides to go on although journal and input topics contradict each other: what is wrong, what it costs, and the decision in the journal.

Whoever decides is the partition's owner for one record, an `OwnerStarted` that carries the new positions, the reason, and outputs that the next worker
publishes: an alert, and the end of jobs that nobody knows any more. One append, so it is decided whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.messages.alerts import JournalAdopted
from opentinker.schemas.messages.commands import SubmitJob
from opentinker.schemas.messages.jobs import Cause, JobFailed, JobPhase, JobStatus
from opentinker.schemas.records import InputRecord, Message, decode, encode
from opentinker.schemas.topics import ALERTS, COMMANDS, EVENTS, JOURNAL, STATUS, TOPICS, accepted_types, partition_of

from .codec import Adoption, InputSpan, JournalOutput, OwnerStarted, ReplayFrom, encode_record
from .contradictions import Inputs, input_contradictions, journal_contradiction, span_of
from .core.policy import CORE_VERSION
from .errors import SchedulerError
from .interpret import SOURCE
from .log import Log
from .recovery import Fold, find_replay_from, recover

__all__ = ["BEGINNING", "END", "Case", "Holding", "adopt", "examine", "live_statuses"]

BEGINNING: Final = "beginning"
END: Final = "end"
_CHUNK = 2_000  # offsets read at a time
_SUBMISSIONS_READ_MAX = 200_000  # offsets looked through to count submissions; beyond it the count is "at least"
_ORPHANS_MAX = 10_000  # jobs that one adoption can end: 2 records of a few kB each, in one journal record


@dataclass(frozen=True, slots=True)
class Holding:
    """What an input topic holds that is not folded yet, or not known to be."""

    first: int
    end: int
    submissions: int  # SubmitJob records among them

    @property
    def offsets(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What contradicts what, and what there is to lose."""

    partition: int
    contradictions: tuple[str, ...]
    journal_lost: bool
    holdings: dict[str, Holding]  # by topic to adopt
    fold: Fold  # what the journal still says; nothing if it is lost
    replay_from: ReplayFrom
    journal_end: int
    orphans: tuple[JobStatus, ...]  # live by jobs.status, and unknown to a journal that is lost

    @property
    def live_jobs(self) -> int:
        return sum(not job.phase.terminal for job in self.fold.state.jobs.values())


async def examine(
    log: Log, inputs: Inputs, topics: tuple[str, ...], partition: int, statuses: Sequence[JobStatus], only: str | None = None
) -> Case | None:
    """What a worker would refuse to start with; None: nothing. Writes nothing."""
    found = await find_replay_from(log)
    _, end = await log.bounds()
    lost = await journal_contradiction(log, inputs, topics, found)
    contradictions: tuple[str, ...]
    if lost is not None:
        contradictions, adopted = (lost,), topics
        replay_from, fold = ReplayFrom(end, -1), Fold(owner_epoch=-1)
    else:
        fold = await recover(log, found.replay_from, end)
        wrong = [each for each in await input_contradictions(inputs, fold.positions) if only in (None, each.topic)]
        contradictions, adopted = tuple(each.text for each in wrong), tuple(each.topic for each in wrong)
        replay_from = found.replay_from
    if not contradictions:
        return None
    return Case(
        partition=partition,
        contradictions=contradictions,
        journal_lost=lost is not None,
        holdings={topic: await _holding(inputs, topic) for topic in adopted},
        fold=fold,
        replay_from=replay_from,
        journal_end=end,
        orphans=tuple(statuses) if lost is not None else (),
    )


async def _holding(inputs: Inputs, topic: str) -> Holding:
    first, end = await inputs.bounds(topic)
    submissions = 0
    if topic == COMMANDS:
        kind = SubmitJob.ce_type().encode()
        for start in range(max(first, end - _SUBMISSIONS_READ_MAX), end, _CHUNK):
            records = await inputs.read(topic, start, min(end, start + _CHUNK))
            submissions += sum(("ce_type", kind) in record.headers for record in records)
    return Holding(first, end, submissions)


async def adopt(log: Log, inputs: Inputs, case: Case, *, start: str, adopted_by: str, reason: str, now_ms: int) -> int:
    """Write the decision down; returns its journal offset. Raises SchedulerError if the journal has moved on since the case was examined."""
    positions = {topic: await _position(inputs, topic, holding, start, now_ms) for topic, holding in case.holdings.items()}
    adoption = Adoption(
        adopted_by=adopted_by,
        reason=reason,
        time_ms=now_ms,
        start=start,
        contradictions=case.contradictions,
        instead_of={topic: case.fold.positions.get(topic) for topic in positions},
    )
    ended = case.orphans[:_ORPHANS_MAX] if start == END else ()  # from the beginning they may run again
    record = OwnerStarted(
        worker=adopted_by,
        boot_id="adopt",
        core_version=CORE_VERSION,
        replay_from=case.replay_from,
        adopted=positions,
        adoption=adoption,
        outputs=(_alert(case, adoption, positions, len(ended)), *(output for status in ended for output in _end(case, status, adoption))),
    )
    offset = await log.append(encode_record(record))
    fold = await recover(log, case.replay_from, offset + 1)
    if fold.owner_epoch != offset or any(fold.positions.get(topic) != span for topic, span in positions.items()):
        raise SchedulerError("the journal has moved on while this was decided, so nothing was adopted; look at it again")
    return offset


async def _position(inputs: Inputs, topic: str, holding: Holding, start: str, generation: int) -> InputSpan:
    """Where reading goes on: before the first record there is, or behind the last."""
    if start == END:
        for stop in range(holding.end, holding.first, -_CHUNK):
            records = await inputs.read(topic, max(holding.first, stop - _CHUNK), stop)
            if records:
                return span_of(records[-1], records[-1].offset, generation)
    through = holding.end - 1 if start == END else holding.first - 1
    # The topic holds no record up to there, so there is none to recognise it by.
    return InputSpan(through, holding.first - 1, 0, 0, generation)


def _alert(case: Case, adoption: Adoption, positions: dict[str, InputSpan], jobs_ended: int) -> JournalOutput:
    alert = JournalAdopted(
        partition=case.partition,
        adopted_by=adoption.adopted_by,
        reason=adoption.reason,
        contradictions=adoption.contradictions,
        start=adoption.start,
        positions={topic: span.through + 1 for topic, span in positions.items()},
        jobs_ended=jobs_ended,
        time_ms=adoption.time_ms,
    )
    return _output(case, ALERTS, f"partition-{case.partition}", alert, "alert", adoption.time_ms)


def _end(case: Case, status: JobStatus, adoption: Adoption) -> tuple[JournalOutput, JournalOutput]:
    """The last event and status of a job that no journal knows any more."""
    message = (
        f"the scheduler's journal was lost and {adoption.adopted_by} began a new one: {adoption.reason}; submit the job again if it is still wanted"
    )
    cause = Cause(topic=JOURNAL, partition=case.partition, offset=case.journal_end, append_time_ms=adoption.time_ms)
    event = JobFailed(
        job_uid=status.job_uid, namespace=status.namespace, name=status.name, pool=status.pool, revision=status.revision + 1,
        time_ms=adoption.time_ms, cause=cause, reason="JournalLost", message=message, attempt_number=status.attempt_number,
    )  # fmt: skip
    over = status.model_copy(
        update={
            "revision": status.revision + 1, "phase": JobPhase.FAILED, "reason": "JournalLost", "message": message, "replicas_running": 0,
            "finished_ms": adoption.time_ms, "updated_ms": adoption.time_ms,
        }
    )  # fmt: skip
    return (
        _output(case, EVENTS, status.job_uid, event, f"event-{status.job_uid}", adoption.time_ms),
        _output(case, STATUS, status.job_uid, over, f"status-{status.job_uid}", adoption.time_ms),
    )


def _output(case: Case, topic: str, key: str, message: Message, what: str, time_ms: int) -> JournalOutput:
    value, headers = encode(message, id=f"adopt-{case.partition}-{time_ms}-{what}", source=SOURCE, subject=key, time_ms=time_ms)
    return JournalOutput(topic, key, value, headers)


async def live_statuses(settings: KafkaSettings, partition: int) -> tuple[JobStatus, ...]:
    """The jobs of one scheduler partition that are not over, as jobs.status shows them."""
    newest: dict[str, JobStatus] = {}
    places = TOPICS[STATUS].partitions
    assert isinstance(places, int)
    for place in range(places):
        end = (await kafka.end_offsets(settings, STATUS, [place]))[place]
        for start in range(0, end, _CHUNK):
            for record in await kafka.read_range(settings, STATUS, place, start, min(end, start + _CHUNK)):
                _follow(newest, record, partition, settings.partitions)
    return tuple(newest[uid] for uid in sorted(newest))


def _follow(newest: dict[str, JobStatus], record: InputRecord, partition: int, partitions: int) -> None:
    if record.value is None:
        newest.pop((record.key or b"").decode(), None)
        return
    status = decode(record.headers, record.value, accepted_types(STATUS)).message
    assert isinstance(status, JobStatus)
    if status.phase.terminal:
        newest.pop(status.job_uid, None)
    elif partition_of(status.pool, partitions) == partition:
        newest[status.job_uid] = status
