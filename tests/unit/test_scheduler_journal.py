"""The crash protocol, over the log in memory and on the real broker: takeover, void records, rivals, holes, lost acks, the rolling sweep, refusal to
start. The contract of the log itself is in `tests/contract/test_journal_log.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from journal_fixtures import journal_log, journal_place
from journal_logs import JournalLog
from memory_inputs import MemoryInputs
from opentinker.scheduler_stream import journal as journal_module
from opentinker.scheduler_stream import recovery as recovery_module
from opentinker.scheduler_stream.codec import (
    InputSpan,
    JournalOutput,
    JournalRecord,
    OwnerStarted,
    ReplayFrom,
    decode_record,
    encode_change,
    encode_record,
)
from opentinker.scheduler_stream.contradictions import span_of
from opentinker.scheduler_stream.core.policy import CORE_VERSION
from opentinker.scheduler_stream.core.state import Change
from opentinker.scheduler_stream.errors import AppendTimeoutError, RefusedError, SupersededError, TruncatedError
from opentinker.scheduler_stream.log import Log
from opentinker.scheduler_stream.owner import Ownership, take_over
from opentinker.scheduler_stream.recovery import find_replay_from
from opentinker.schemas.topics import COMMANDS, INPUT_TOPICS, REPORTS
from scheduler_world import World

__all__ = ["journal_log", "journal_place"]

STATUS_OUTPUT = JournalOutput("opentinker.jobs.status.v1", "k", b"s", ())
FAST_OUTPUT = JournalOutput("opentinker.jobs.events.v1", "k", b"e", ())


async def own(log: Log, inputs: MemoryInputs | None = None, worker: str = "w") -> Ownership:
    async def fence() -> None:
        fenced.append(worker)

    fenced: list[str] = []
    owned = await take_over(log, inputs or MemoryInputs(), INPUT_TOPICS, partition=0, worker=worker, boot_id="b", fence=fence)
    assert fenced == [worker]
    return owned


def world_with_jobs(count: int) -> World:
    world = World()
    for number in range(4):
        world.agent(f"node-{number}")
    for number in range(count):
        world.submit(f"job-{number}")
    return world


async def write_all(owned: Ownership, world: World) -> int:
    """Journal every entity of a world in small records; returns how many."""
    keys = world.state.entity_keys()
    for kind, id in keys:
        value = world.state.get(kind, id)
        owned.fold.state.load(kind, id, value)
        await owned.journal.append({}, [Change(kind, id, value)], [])
    return len(keys)


async def test_a_first_start_owns_an_empty_partition(journal_log: JournalLog) -> None:
    log = journal_log.log
    owned = await own(log)
    assert owned.journal.owner_epoch == 0
    [entry] = await log.read(0, 1)
    assert isinstance(decode_record(entry.value), OwnerStarted)


async def test_what_was_journaled_is_recovered_to_the_same_hash(journal_log: JournalLog) -> None:
    log, world = journal_log.log, world_with_jobs(30)
    await write_all(await own(log), world)
    assert (await own(log, worker="next")).fold.state.hash() == world.state.hash()


async def test_the_rolling_sweep_bounds_what_recovery_reads(journal_log: JournalLog) -> None:
    log, world = journal_log.log, world_with_jobs(100)
    owned = await own(log)
    entities = await write_all(owned, world)
    clock = world.state.get("clock", "clock")
    for _ in range(400):
        last = await owned.journal.append({}, [Change("clock", "clock", clock)], [])
    found = await find_replay_from(log)
    assert found.replay_from.offset > last - entities
    again = await own(log, worker="next")
    assert again.fold.state.hash() == world.state.hash()
    assert again.fold.records < 3 * entities


async def test_a_sweep_is_gone_on_with_by_the_next_owner_however_often_owners_change(journal_log: JournalLog) -> None:
    """Otherwise a partition whose owners die faster than a sweep takes would read more at every takeover, and take longer each time."""
    log, world = journal_log.log, world_with_jobs(100)
    entities = await write_all(await own(log), world)
    before = (await find_replay_from(log)).replay_from.offset
    read = []
    for number in range(60):
        owned = await own(log, worker=f"w{number}")
        read.append(owned.fold.records)
        for _ in range(3):  # 24 entities of a sweep at most, then it dies
            await owned.journal.append({}, [Change("clock", "clock", owned.fold.state.clock)], [])
    found = await find_replay_from(log)
    assert found.replay_from.offset > before
    assert max(read[30:]) < entities
    assert (await own(log, worker="last")).fold.state.hash() == world.state.hash()


async def test_recovery_piece_by_piece_gives_the_same_state_and_tells_of_its_headway(
    journal_log: JournalLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, told = world_with_jobs(10), []
    entities = await write_all(await own(journal_log.log), world)
    monkeypatch.setattr(recovery_module, "_READ_RECORDS", 4)

    async def fence() -> None:
        pass

    owned = await take_over(
        journal_log.log, MemoryInputs(), INPUT_TOPICS, partition=0, worker="next", boot_id="b", fence=fence, on_progress=lambda: told.append(1)
    )
    assert owned.fold.state.hash() == world.state.hash()
    assert len(told) > (owned.fold.records + 2) // 4 >= 1
    assert entities >= owned.fold.records


async def test_removed_entities_stay_removed_across_sweeps(journal_log: JournalLog) -> None:
    log, world = journal_log.log, world_with_jobs(20)
    owned = await own(log)
    await write_all(owned, world)
    for kind, id in world.state.entity_keys():
        if kind == "job":
            owned.fold.state.load(kind, id, None)
            world.state.load(kind, id, None)
            await owned.journal.append({}, [Change(kind, id, None)], [])
    for _ in range(50):
        await owned.journal.append({}, [], [])
    assert (await own(log, worker="next")).fold.state.hash() == world.state.hash()


async def test_an_owner_that_wakes_behind_a_newer_one_is_superseded_and_its_record_is_void(journal_log: JournalLog) -> None:
    log, world = journal_log.log, world_with_jobs(3)
    old = await own(log)
    await write_all(old, world)
    new = await own(log, worker="new")
    changed = Change("clock", "clock", world.state.clock)
    with pytest.raises(SupersededError):
        await old.journal.append({}, [changed, Change("job", "x", None)], [FAST_OUTPUT])
    await new.journal.append({}, [], [])  # reads what lies between: void, so it goes on
    third = await own(log, worker="third")
    assert third.fold.state.hash() == world.state.hash()
    assert third.fold.voids == 1
    assert [outputs for _, outputs in third.fold.to_publish()] == []


async def test_a_hole_in_the_journal_is_no_rival(journal_log: JournalLog) -> None:
    log = journal_log.log
    owned = await own(log)
    hole = await journal_log.leave_hole()
    assert await owned.journal.append({}, [], []) == 1 + hole
    assert await owned.journal.append({}, [], []) == 2 + hole
    assert (await own(log, worker="next")).fold.records == 2


async def test_an_append_without_answer_ends_the_owner_and_the_record_still_counts(journal_log: JournalLog, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with_jobs(1)
    owned = await own(journal_log.log)
    await write_all(owned, world)
    await journal_log.lose_answers()
    monkeypatch.setattr(journal_module, "APPEND_TIMEOUT_S", 0.3)
    with pytest.raises(AppendTimeoutError):
        await owned.journal.append({}, [], [FAST_OUTPUT])
    await journal_log.new_writer()
    again = await own(journal_log.log, worker="next")
    assert [outputs for _, outputs in again.fold.to_publish()] == [[FAST_OUTPUT]]
    assert again.fold.state.hash() == world.state.hash()


async def test_a_record_of_nobody_we_know_in_between_is_refused_by_offset(journal_log: JournalLog) -> None:
    owned = await own(journal_log.log)
    assert await journal_log.marker(b"not a record") == 1
    with pytest.raises(RefusedError, match="journal offset 1 is no journal record"):
        await owned.journal.append({}, [], [])


async def test_a_void_record_in_a_transaction_is_void_all_the_same(journal_log: JournalLog) -> None:
    log, world = journal_log.log, world_with_jobs(2)
    owned = await own(log)
    await write_all(owned, world)
    stale = JournalRecord(
        owner_epoch=-7, core_version=1, inputs={}, changes=(("node", "node-0", None),), outputs=(FAST_OUTPUT,), replay_from=ReplayFrom(),
        published_fast=-1, published_status=-1,
    )  # fmt: skip
    await journal_log.marker(encode_record(stale))
    await owned.journal.append({}, [], [])
    again = await own(log, worker="next")
    assert (again.fold.voids, again.fold.state.hash()) == (1, world.state.hash())


async def test_a_journal_made_anew_under_its_owner_ends_it_and_starts_nobody(journal_log: JournalLog) -> None:
    owned = await own(journal_log.log)
    for _ in range(100):
        await owned.journal.append({}, [], [])
    owned.journal.replay_from = ReplayFrom(90, 0)
    await journal_log.cut(0)
    owned.journal._log = journal_log.log
    with pytest.raises(TruncatedError, match="went back from offset 100 to 0"):
        await owned.journal.append({}, [], [])
    inputs = MemoryInputs()
    inputs.group[COMMANDS] = 1
    with pytest.raises(RefusedError, match=r"the journal was lost.*opentinker scheduler adopt --partition 0"):
        await own(journal_log.log, inputs, worker="next")


async def test_a_journal_whose_tail_is_gone_is_an_earlier_state_and_its_inputs_come_again(journal_log: JournalLog) -> None:
    inputs = MemoryInputs()
    records = [inputs.append(COMMANDS, value) for value in (b"a", b"b")]
    owned = await own(journal_log.log, inputs)
    first = await owned.journal.append({COMMANDS: span_of(records[0], 0)}, [], [])
    await owned.journal.append({COMMANDS: span_of(records[1], 1)}, [], [])
    await journal_log.cut(first + 1)
    again = await own(journal_log.log, inputs, worker="next")
    assert again.fold.positions == {COMMANDS: span_of(records[0], 0)}  # the cycle reads on from there


async def test_a_journal_whose_beginning_was_deleted_too_far_is_refused(journal_log: JournalLog) -> None:
    log, world = journal_log.log, world_with_jobs(40)
    owned = await own(log)
    await write_all(owned, world)
    needed = (await find_replay_from(log)).replay_from.offset
    later = 2**62
    await log.trim(needed, later)  # what the scheduler itself gives up
    assert (await own(log, worker="fine")).fold.state.hash() == world.state.hash()
    needed = (await find_replay_from(log)).replay_from.offset
    await log.trim(needed + 1, later)
    with pytest.raises(RefusedError, match=f"recovery begins at {needed}: its beginning was deleted"):
        await own(log, worker="next")


async def test_only_outputs_that_no_mark_covers_are_published_again(journal_log: JournalLog) -> None:
    log = journal_log.log
    owned = await own(log)
    first = await owned.journal.append({}, [], [FAST_OUTPUT, STATUS_OUTPUT])
    owned.journal.published_fast = first
    second = await owned.journal.append({}, [], [FAST_OUTPUT, STATUS_OUTPUT])
    again = await own(log, worker="next")
    assert again.fold.to_publish() == [(first, [STATUS_OUTPUT]), (second, [FAST_OUTPUT, STATUS_OUTPUT])]


async def test_two_starting_at_once_leave_one_owner(journal_log: JournalLog) -> None:
    log = journal_log.log
    results = await asyncio.gather(*(own(log, worker=f"w{i}") for i in range(2)), return_exceptions=True)
    owners = sorted((result for result in results if isinstance(result, Ownership)), key=lambda each: each.journal.owner_epoch)
    for loser in owners[:-1]:
        with pytest.raises(SupersededError):
            await loser.journal.append({}, [], [])
    await owners[-1].journal.append({}, [], [])


async def test_an_empty_journal_beside_inputs_that_only_wait_is_a_first_start(journal_log: JournalLog) -> None:
    inputs = MemoryInputs()
    inputs.append(COMMANDS, b"x")
    assert (await own(journal_log.log, inputs)).journal.owner_epoch == 0


async def test_a_lost_journal_beside_inputs_that_were_read_is_refused(journal_log: JournalLog) -> None:
    inputs = MemoryInputs()
    inputs.append(COMMANDS, b"x")
    inputs.group[COMMANDS] = 1
    with pytest.raises(RefusedError, match="the journal was lost"):
        await own(journal_log.log, inputs)


@pytest.mark.parametrize("how", ["made anew", "shorter", "deleted"])
async def test_input_topics_that_contradict_the_journal_are_refused(journal_log: JournalLog, how: str) -> None:
    log, inputs = journal_log.log, MemoryInputs()
    records = [inputs.append(REPORTS, value) for value in (b"a", b"b", b"c")]
    owned = await own(log, inputs)
    await owned.journal.append({REPORTS: span_of(records[-1], 0)}, [], [])
    await own(log, inputs, worker="fine")
    fresh = MemoryInputs()
    if how == "made anew":
        for value in (b"x", b"y", b"z"):
            fresh.append(REPORTS, value)
    elif how == "deleted":
        fresh.records[REPORTS] = [*records, *[fresh.append(REPORTS, b"d")] * 9]
        fresh.first[REPORTS] = 7
    with pytest.raises(RefusedError, match=REPORTS.replace(".", r"\.")):
        await own(log, fresh, worker="next")


async def test_positions_of_quiet_topics_survive_the_sweep(journal_log: JournalLog) -> None:
    log, inputs = journal_log.log, MemoryInputs()
    record = inputs.append(COMMANDS, b"once")
    owned = await own(log, inputs)
    positions = {COMMANDS: span_of(record, 0)}
    for _ in range(300):
        await owned.journal.append(positions, [], [])
    assert (await own(log, inputs, worker="next")).fold.positions == positions


async def test_bytes_that_are_no_record_are_refused_by_offset(journal_log: JournalLog) -> None:
    log = journal_log.log
    await own(log)
    await journal_log.rival(b"{}")
    with pytest.raises(RefusedError, match="journal offset 1 is no journal record"):
        await own(log, worker="next")


async def newer(journal_log: JournalLog, changes: tuple[tuple[str, str, bytes | None], ...], **more: Any) -> None:
    """A record of the next core version, with fields that only it knows."""
    await own(journal_log.log)
    record = JournalRecord(
        owner_epoch=0, core_version=CORE_VERSION + 1, inputs={}, changes=changes, outputs=(), replay_from=ReplayFrom(), published_fast=-1, published_status=-1
    )  # fmt: skip
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record)) | more
    await journal_log.rival(msgspec.msgpack.encode(["record", fields]))


async def test_a_record_of_the_next_core_is_read_as_long_as_nothing_in_it_is_unknown(journal_log: JournalLog) -> None:
    world = world_with_jobs(2)
    changes = tuple(encode_change(Change(kind, id, world.state.get(kind, id))) for kind, id in world.state.entity_keys())
    await newer(journal_log, changes)
    assert (await own(journal_log.log, worker="older")).fold.state.hash() == world.state.hash()


@pytest.mark.parametrize("what", ["a field of an entity", "a field inside", "a value of an entity", "a kind of entity", "a field of the record"])
async def test_an_older_core_refuses_by_name_what_it_would_lose(journal_log: JournalLog, what: str) -> None:
    world = world_with_jobs(1)
    [job] = world.state.jobs.values()
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(job))
    changes: tuple[tuple[str, str, bytes | None], ...] = ()
    more = {}
    if what == "a field of an entity":
        changes, lost = (("job", job.uid, msgspec.msgpack.encode(fields | {"spot": True})),), "job.spot"
    elif what == "a field inside":
        changes, lost = (("job", job.uid, msgspec.msgpack.encode(fields | {"needs": fields["needs"] | {"rack": "r1"}})),), "job.needs.rack"
    elif what == "a value of an entity":
        changes, lost = (("job", job.uid, msgspec.msgpack.encode(fields | {"phase": "Dreaming"})),), "job: Invalid enum value 'Dreaming'.*"
    elif what == "a kind of entity":
        changes, lost = (("quota", "team-a", b"\x80"),), "quota"
    else:
        more, lost = {"reservations": [1]}, "reservations"
    await newer(journal_log, changes, **more)
    with pytest.raises(RefusedError, match=rf"would lose \({lost}\).*install the newer release"):
        await own(journal_log.log, worker="older")


async def test_a_record_of_the_core_before_is_read(journal_log: JournalLog) -> None:
    """Its entities lack what came later: the defaults hold."""
    world = world_with_jobs(1)
    [job] = world.state.jobs.values()
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(job))
    del fields["stop_reason"]
    await newer(journal_log, (("job", job.uid, msgspec.msgpack.encode(fields)),), core_version=CORE_VERSION - 1)
    assert (await own(journal_log.log, worker="newer")).fold.state.jobs == {job.uid: job}


async def test_a_record_of_a_much_newer_core_is_refused(journal_log: JournalLog) -> None:
    log = journal_log.log
    await journal_log.rival(encode_record(OwnerStarted(worker="w", boot_id="b", core_version=99, replay_from=ReplayFrom())))
    with pytest.raises(RefusedError, match="core version 99"):
        await own(log)


def test_a_record_survives_its_encoding() -> None:
    record = JournalRecord(
        owner_epoch=3, core_version=1, inputs={COMMANDS: InputSpan(0, 5, 77, 1000)}, changes=(("job", "u", None), ("node", "n", b"\x80")),
        outputs=(JournalOutput("t", "k", b"\xff\x00", (("h", b"\xfe"),), 5),), replay_from=ReplayFrom(1, 0), published_fast=2, published_status=-1,
    )  # fmt: skip
    assert decode_record(encode_record(record)) == record


async def test_large_entities_do_not_make_records_too_large_and_sweeps_still_end(journal_log: JournalLog) -> None:
    log, world = journal_log.log, World()
    owned = await own(log)
    for number in range(20):
        uid = world.submit(f"job-{number}", environment={"id": "CartPole-v1", "kwargs": {"padding": "x" * 60_000}})
        owned.fold.state.load("job", uid, world.job(uid))
        await owned.journal.append({}, [Change("job", uid, world.job(uid))], [])
    owned.fold.state.load("clock", "clock", world.state.clock)
    for _ in range(60):
        await owned.journal.append({}, [Change("clock", "clock", world.state.clock)], [])
    assert max(len(entry.value) for entry in await log.read(*await log.bounds())) < 2**20
    assert (await find_replay_from(log)).replay_from.offset > 20
    assert (await own(log, worker="next")).fold.state.hash() == world.state.hash()
