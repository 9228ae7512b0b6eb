"""What must hold of the topics after a run, whatever happened during it. Reads them anew, from where the run began; trusts nothing that ran.

Claims: every accepted job ended in exactly one terminal state; its history has no gap and no second version; attempts never overlap, by lease epochs and
by what the nodes saw; everything the journal decided was published; nothing is held at the end; the state breaks no invariant.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from fleet import Run
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.scheduler_stream.codec import JournalRecord, OwnerStarted
from opentinker.scheduler_stream.core.invariants import violations
from opentinker.scheduler_stream.interpret import is_status
from opentinker.scheduler_stream.log import KafkaLog, LogEntry
from opentinker.scheduler_stream.recovery import Fold
from opentinker.schemas.messages import SubmitJob
from opentinker.schemas.records import InputRecord, header_text
from opentinker.schemas.topics import COMMANDS, EVENTS, JOURNAL, STATUS, dead_letter_topic, topic_table

__all__ = ["Checked", "Marks", "check", "kind_of", "marks", "records_since"]

_TERMINAL = ("JobCompleted", "JobFailed", "JobCancelled")
_PHASES = {"JobCompleted": "Completed", "JobFailed": "Failed", "JobCancelled": "Cancelled"}
Marks = dict[str, dict[int, int]]  # topic → partition → offset at which a run began


@dataclass
class Checked:
    """What was found. `problems` empty: every claim holds."""

    problems: list[str] = field(default_factory=list)
    accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    outputs: int = 0
    repeated: int = 0  # records that were published again under their id
    voids: int = 0
    owners: list[tuple[int, int, int, str]] = field(default_factory=list)  # (partition, journal offset, broker ms, worker) of every OwnerStarted
    first_records: dict[tuple[int, int], int] = field(default_factory=dict)  # (partition, owner epoch) → broker ms of that owner's first record

    def complain(self, text: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(text)


async def marks(settings: KafkaSettings) -> Marks:
    """Where every topic ends now."""
    table = topic_table(settings.partitions)
    found = await asyncio.gather(*(kafka.end_offsets(settings, name, range(count)) for name, (count, _) in table.items()))
    return dict(zip(table, found, strict=True))


async def records_since(settings: KafkaSettings, topic: str, since: Marks) -> list[InputRecord]:
    """Everything on a topic since the marks, committed, a partition at a time."""
    ends = await kafka.end_offsets(settings, topic, list(since[topic]))
    ranges = [await kafka.read_range(settings, topic, number, start, ends[number], timeout_s=120) for number, start in since[topic].items()]
    return list(itertools.chain.from_iterable(ranges))


def _header(record: InputRecord, name: str) -> str:
    return header_text(record.headers, name) or ""


def kind_of(record: InputRecord) -> str:
    """The name of its message."""
    return _header(record, "ce_type").removeprefix("io.opentinker.").rpartition(".")[0]


async def check(settings: KafkaSettings, since: Marks, pools: Collection[str], runs: Sequence[Run], *, drained: bool = True) -> Checked:
    """Read the topics since `since` and judge what happened to `pools`. `drained`: everything must be over."""
    result = Checked()
    accepted = await _accepted(settings, since, pools, result)
    published = await _journal(settings, since, pools, result, drained=drained)
    await _outputs(settings, since, published, result)
    await _histories(settings, since, accepted, result, drained=drained)
    _overlaps(runs, result)
    return result


async def _accepted(settings: KafkaSettings, since: Marks, pools: Collection[str], result: Checked) -> set[str]:
    """Every job whose submission is on the topic and was not dead-lettered."""
    dead = {
        (int(_header(record, "ot-original-partition")), int(_header(record, "ot-original-offset")))
        for record in await records_since(settings, dead_letter_topic(COMMANDS), since)
    }
    found = set()
    for record in await records_since(settings, COMMANDS, since):
        if (record.partition, record.offset) not in dead and _header(record, "ce_type") == SubmitJob.ce_type():
            command = orjson.loads(record.value)
            if command["pool"] in pools:
                found.add(command["job_uid"])
    result.accepted = len(found)
    return found


async def _journal(
    settings: KafkaSettings, since: Marks, pools: Collection[str], result: Checked, *, drained: bool
) -> dict[tuple[str, str], int]:  # fmt: skip
    """Fold every partition's journal from its beginning; returns what its valid records since the marks wanted published: (topic, id) → CRC-32 of the value."""
    wanted: dict[tuple[str, str], int] = {}
    for partition in range(settings.partitions):
        start, end = await KafkaLog(settings, partition, None).bounds()
        began = since[JOURNAL][partition]
        fold = Fold(owner_epoch=-1)  # from the first record on every owner is met on the way
        async for each in _in_chunks(settings, JOURNAL, partition, start, end):
            record = fold.apply(LogEntry(each.offset, each.value or b""))
            if each.offset < began:
                continue
            if isinstance(record, OwnerStarted):
                result.owners.append((partition, each.offset, each.append_time_ms, record.worker))
            elif isinstance(record, JournalRecord):
                result.first_records.setdefault((partition, record.owner_epoch), each.append_time_ms)
            else:
                result.voids += 1
                continue
            wanted.update({(output.topic, _id(output)): zlib.crc32(output.value) for output in record.outputs if not is_status(output)})
        held = [(node.name, each.job_uid) for node in fold.state.nodes.values() if node.pool in pools for each in node.allocations]
        if held and drained:
            result.complain(f"partition {partition}: still held at the end: {held[:5]}")
        for problem in violations(fold.state)[:5]:
            result.complain(f"partition {partition}: {problem}")
    return wanted


async def _in_chunks(settings: KafkaSettings, topic: str, partition: int, start: int, end: int) -> AsyncIterator[InputRecord]:
    for first in range(start, end, 2_000):
        for record in await kafka.read_range(settings, topic, partition, first, min(end, first + 2_000)):
            yield record


def _id(output: Any) -> str:
    return next((value.decode() for name, value in output.headers if name == "ce_id"), f"letter:{output.key}")


async def _outputs(settings: KafkaSettings, since: Marks, wanted: dict[tuple[str, str], int], result: Checked) -> None:
    """Everything decided is out, with the bytes that were recorded; nothing else from the scheduler is."""
    result.outputs = len(wanted)
    missing = set(wanted)
    for topic in sorted({topic for topic, _ in wanted}):
        seen: Counter[str] = Counter()
        for record in await records_since(settings, topic, since):
            identifier = _header(record, "ce_id")
            if _header(record, "ce_source") != "opentinker/scheduler":
                continue
            seen[identifier] += 1
            key = (topic, identifier)
            if key not in wanted:
                result.complain(f"{topic}:{record.partition}:{record.offset} ({identifier}) was published and stands in no valid journal record")
            elif wanted[key] != zlib.crc32(record.value or b""):
                result.complain(f"{topic}:{record.partition}:{record.offset} ({identifier}) is not what the journal recorded")
            missing.discard(key)
        result.repeated += sum(count - 1 for count in seen.values())
    missing = {key for key in missing if not key[1].startswith("letter:")}
    if missing:
        result.complain(f"{len(missing)} outputs were never published, for example {sorted(missing)[:3]}")


async def _histories(settings: KafkaSettings, since: Marks, accepted: set[str], result: Checked, *, drained: bool) -> None:
    """Each job's events by revision: one version, no gap, epochs rise, one end; and its newest status says the same."""
    events: dict[str, dict[int, tuple[str, dict[str, Any]]]] = defaultdict(dict)
    for record in await records_since(settings, EVENTS, since):
        event = orjson.loads(record.value)
        told = (kind_of(record), event)
        before = events[event["job_uid"]].setdefault(event["revision"], told)
        if before != told:
            result.complain(f"job {event['job_uid']} revision {event['revision']}: two stories, {before[0]} and {told[0]}")
    statuses: dict[str, dict[str, Any]] = {}
    for record in await records_since(settings, STATUS, since):
        status = orjson.loads(record.value)
        if status["revision"] < statuses.get(status["job_uid"], status)["revision"]:
            result.complain(f"job {status['job_uid']}: its status went back to revision {status['revision']}")
        statuses[status["job_uid"]] = status
    for uid in accepted:
        history = events.get(uid, {})
        if not history:
            result.complain(f"job {uid}: accepted, and never heard of")
            continue
        _one_history(uid, history, statuses.get(uid), result, drained=drained)


def _one_history(
    uid: str, history: dict[int, tuple[str, dict[str, Any]]], status: dict[str, Any] | None, result: Checked, *, drained: bool
) -> None:  # fmt: skip
    revisions = sorted(history)
    if revisions != list(range(1, len(revisions) + 1)):
        result.complain(f"job {uid}: revisions {revisions} have a gap")
    kinds = [history[revision][0] for revision in revisions]
    epochs = [history[revision][1]["lease_epoch"] for revision in revisions if history[revision][0] == "AttemptPlaced"]
    result.attempts += len(epochs)
    if epochs != sorted(set(epochs)):
        result.complain(f"job {uid}: lease epochs {epochs}")
    if kinds.count("AttemptFinished") != len(epochs) and drained:
        result.complain(f"job {uid}: {len(epochs)} attempts placed, {kinds.count('AttemptFinished')} finished")
    live = 0
    for kind in kinds:
        live += {"AttemptPlaced": 1, "AttemptFinished": -1}.get(kind, 0)
        if live not in (0, 1):
            result.complain(f"job {uid}: {live} attempts live at once: {kinds}")
    ends = [kind for kind in kinds if kind in _TERMINAL]
    result.ended.update(ends)
    if len(ends) > 1 or (ends and kinds[-1] != ends[0]) or (drained and not ends):
        result.complain(f"job {uid}: ends {ends} of {kinds}")
    if drained and ends and (status is None or status["phase"] != _PHASES[ends[0]]):
        result.complain(f"job {uid}: its history ends {ends[0]}, its status says {status and status['phase']}")


def _overlaps(runs: Iterable[Run], result: Checked) -> None:
    """What nodes saw: never two attempts of a job at once, never one part twice."""
    by_job: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_job[run.job_uid].append(run)
    for uid, found in by_job.items():
        parts = Counter((run.attempt_number, run.node) for run in found)
        if any(count > 1 for count in parts.values()):
            result.complain(f"job {uid}: a node ran one attempt twice: {parts}")
        found.sort(key=lambda run: run.lease_epoch)
        for earlier, later in itertools.pairwise(found):
            if later.lease_epoch != earlier.lease_epoch and (not earlier.ended or later.began < earlier.ended):
                result.complain(f"job {uid}: epoch {later.lease_epoch} began on {later.node} while {earlier.lease_epoch} ran on {earlier.node}")
