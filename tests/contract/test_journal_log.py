"""One contract for the journal's log, in memory and on the real broker: what the crash protocol is tested against must be what Kafka does."""

from __future__ import annotations

import asyncio

import pytest
from journal_fixtures import journal_log, journal_place
from journal_logs import JournalLog
from opentinker.scheduler_stream.errors import RecordTooLargeError, TruncatedError
from opentinker.scheduler_stream.log import RECORD_BYTES_MAX, LogEntry

__all__ = ["journal_log", "journal_place"]


async def test_appends_of_one_writer_have_consecutive_offsets_and_are_read_back(journal_log: JournalLog) -> None:
    log = journal_log.log
    assert await log.bounds() == (0, 0)
    assert [await log.append(value) for value in (b"a", b"b", b"")] == [0, 1, 2]
    assert await log.bounds() == (0, 3)
    assert await log.read(0, 3) == [LogEntry(0, b"a"), LogEntry(1, b"b"), LogEntry(2, b"")]
    assert await log.read(1, 2) == [LogEntry(1, b"b")]
    assert await log.read(2, 2) == []


async def test_a_rival_s_append_shows_as_a_jump_of_the_own_offset(journal_log: JournalLog) -> None:
    log = journal_log.log
    assert await log.append(b"mine") == 0
    assert await journal_log.rival(b"theirs") == 1
    assert await log.append(b"mine again") == 2
    assert await log.read(1, 2) == [LogEntry(1, b"theirs")]


async def test_an_aborted_transaction_leaves_a_hole_that_holds_nothing(journal_log: JournalLog) -> None:
    log = journal_log.log
    await log.append(b"a")
    hole = await journal_log.leave_hole()
    assert await log.append(b"b") == 1 + hole
    assert await log.read(1, 1 + hole) == []
    assert await log.read(0, 2 + hole) == [LogEntry(0, b"a"), LogEntry(1 + hole, b"b")]


async def test_a_log_that_ends_in_a_hole_is_read_to_its_end(journal_log: JournalLog) -> None:
    log = journal_log.log
    await log.append(b"a")
    hole = await journal_log.leave_hole()
    assert await log.bounds() == (0, 1 + hole)
    assert await log.read(0, 1 + hole) == [LogEntry(0, b"a")]


async def test_the_marker_of_a_committed_transaction_is_an_offset_without_a_record(journal_log: JournalLog) -> None:
    log = journal_log.log
    await log.append(b"a")
    assert await journal_log.marker(b"theirs") == 1
    assert await log.append(b"b") == 3
    assert await log.read(0, 4) == [LogEntry(0, b"a"), LogEntry(1, b"theirs"), LogEntry(3, b"b")]


async def test_an_append_whose_answer_is_lost_has_taken_effect_once(journal_log: JournalLog) -> None:
    await journal_log.log.append(b"a")
    await journal_log.lose_answers()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(journal_log.log.append(b"b"), 0.5)
    await journal_log.new_writer()
    log = journal_log.log
    assert await log.append(b"c") == 2
    assert await log.read(0, 3) == [LogEntry(0, b"a"), LogEntry(1, b"b"), LogEntry(2, b"c")]


async def test_trimming_gives_up_what_is_both_behind_an_offset_and_old(journal_log: JournalLog) -> None:
    log = journal_log.log
    for value in (b"a", b"b", b"c", b"d"):
        await log.append(value)
        await journal_log.pass_time()
    stamps = [await journal_log.stamp(offset) for offset in range(4)]
    await log.trim(3, stamps[1])  # by age: b is not older than itself
    assert await log.bounds() == (1, 4)
    await log.trim(2, stamps[3] + 60_000)  # by offset: all are old enough
    assert await log.bounds() == (2, 4)
    await log.trim(1, stamps[3] + 60_000)  # gone already
    assert await log.bounds() == (2, 4)
    assert await log.read(0, 4) == [LogEntry(2, b"c"), LogEntry(3, b"d")]
    assert await log.append(b"e") == 4


async def test_trimming_beyond_the_end_empties_the_log_and_offsets_go_on(journal_log: JournalLog) -> None:
    log = journal_log.log
    await log.append(b"a")
    await log.trim(99, await journal_log.stamp(0) + 60_000)
    assert await log.bounds() == (1, 1)
    assert await log.read(0, 1) == []
    assert await log.append(b"b") == 1


async def test_the_largest_record_is_kept_and_a_larger_one_is_refused_whole(journal_log: JournalLog) -> None:
    log = journal_log.log
    largest = b"x" * RECORD_BYTES_MAX
    assert await log.append(largest) == 0
    with pytest.raises(RecordTooLargeError, match=f"{RECORD_BYTES_MAX} are allowed"):
        await log.append(largest + b"x")
    assert await log.append(b"after") == 1
    entries = await log.read(0, 2)
    assert [entry.offset for entry in entries] == [0, 1]
    assert entries[0].value == largest
    assert entries[1].value == b"after"


async def test_a_tail_that_is_gone_is_an_error_and_no_short_answer(journal_log: JournalLog) -> None:
    for value in (b"a", b"b", b"c"):
        await journal_log.log.append(value)
    await journal_log.cut(1)
    log = journal_log.log
    assert await log.bounds() == (0, 1)
    with pytest.raises(TruncatedError, match="ends at offset 1, yet 2 was written"):
        await log.read(0, 3)
    assert await log.append(b"d") == 1
    assert await log.read(0, 2) == [LogEntry(0, b"a"), LogEntry(1, b"d")]
