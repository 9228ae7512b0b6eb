"""An administrator's decision, over the log in memory and on the real broker: what it costs is shown, it takes effect whole, once, and is told."""

from __future__ import annotations

from typing import Any

import pytest
from journal_fixtures import journal_log, journal_place
from journal_logs import JournalLog
from memory_inputs import MemoryInputs
from opentinker.scheduler_stream.adopt import BEGINNING, END, Case, adopt, examine
from opentinker.scheduler_stream.contradictions import span_of
from opentinker.scheduler_stream.errors import RefusedError, SchedulerError
from opentinker.scheduler_stream.interpret import encode_outputs, interpret
from opentinker.scheduler_stream.log import Log
from opentinker.scheduler_stream.owner import Ownership, take_over
from opentinker.schemas.messages import JobFailed, JobPhase, JobStatus, JournalAdopted
from opentinker.schemas.records import Message, decode
from opentinker.schemas.topics import ALERTS, COMMANDS, EVENTS, INPUT_TOPICS, REPORTS, STATUS, accepted_types
from scheduler_world import World

__all__ = ["journal_log", "journal_place"]

NOW = 1_800_000_000_000


async def own(log: Log, inputs: MemoryInputs) -> Ownership:
    async def fence() -> None:
        pass

    return await take_over(log, inputs, INPUT_TOPICS, partition=0, worker="w", boot_id="b", fence=fence)


async def worked(log: Log, commands: int = 3) -> MemoryInputs:
    """Some inputs that the journal has folded."""
    inputs = MemoryInputs()
    records = [inputs.append(COMMANDS, f"command {number}".encode()) for number in range(commands)]
    report = inputs.append(REPORTS, b"report")
    owned = await own(log, inputs)
    inputs.group = {COMMANDS: commands, REPORTS: 1}
    await owned.journal.append({COMMANDS: span_of(records[-1], 0), REPORTS: span_of(report, 0)}, [], [])
    return inputs


async def case_of(log: Log, inputs: MemoryInputs, statuses: tuple[JobStatus, ...] = ()) -> Case:
    found = await examine(log, inputs, INPUT_TOPICS, 0, statuses)
    assert found is not None
    return found


async def decide(log: Log, inputs: MemoryInputs, case: Case, start: str) -> int:
    return await adopt(log, inputs, case, start=start, adopted_by="ops@desk", reason="the topic was deleted by mistake", now_ms=NOW)


def published(owned: Ownership, topic: str) -> list[Any]:
    """What the next owner publishes first, decoded."""
    outputs = [output for _, outputs in owned.fold.to_publish() for output in outputs if output.topic == topic]
    messages: list[Message] = [decode(output.headers, output.value, accepted_types(topic)).message for output in outputs]
    return messages


def made_anew(inputs: MemoryInputs) -> MemoryInputs:
    fresh = MemoryInputs()
    fresh.records[REPORTS], fresh.group = inputs.records[REPORTS], inputs.group
    return fresh


async def test_logs_that_agree_have_nothing_to_adopt(journal_log: JournalLog) -> None:
    log = journal_log.log
    assert await examine(log, MemoryInputs(), INPUT_TOPICS, 0, ()) is None
    inputs = await worked(log)
    _, end = await log.bounds()
    assert await examine(log, inputs, INPUT_TOPICS, 0, ()) is None
    assert await log.bounds() == (0, end)


async def test_a_topic_made_anew_is_read_from_its_beginning_and_the_rest_goes_on(journal_log: JournalLog) -> None:
    log = journal_log.log
    inputs = made_anew(await worked(log))
    inputs.append(COMMANDS, b"new")
    with pytest.raises(RefusedError, match="opentinker scheduler adopt --partition 0"):
        await own(log, inputs)
    case = await case_of(log, inputs)
    assert list(case.holdings) == [COMMANDS]
    assert case.holdings[COMMANDS].offsets == 1
    await decide(log, inputs, case, BEGINNING)
    owned = await own(log, inputs)
    assert owned.fold.positions[COMMANDS].through == -1
    assert owned.fold.positions[REPORTS] == span_of(inputs.records[REPORTS][0], 0)
    [alert] = published(owned, ALERTS)
    assert isinstance(alert, JournalAdopted)
    assert (alert.adopted_by, alert.start, alert.positions) == ("ops@desk", "beginning", {COMMANDS: 0})
    assert "was made anew" in alert.contradictions[0]
    assert await examine(log, inputs, INPUT_TOPICS, 0, ()) is None


async def test_from_the_end_what_the_topic_holds_is_skipped_and_recognised_later(journal_log: JournalLog) -> None:
    log = journal_log.log
    inputs = made_anew(await worked(log))
    for value in (b"x", b"y"):
        inputs.append(COMMANDS, value)
    await decide(log, inputs, await case_of(log, inputs), END)
    owned = await own(log, inputs)
    assert owned.fold.positions[COMMANDS] == span_of(inputs.records[COMMANDS][1], 1, NOW)
    again = made_anew(inputs)
    for value in (b"other", b"others"):
        again.append(COMMANDS, value)
    with pytest.raises(RefusedError, match="is not the record that the journal folded"):
        await own(log, again)


async def test_inputs_deleted_before_they_were_read_are_given_up(journal_log: JournalLog) -> None:
    log = journal_log.log
    inputs = await worked(log)
    for _ in range(6):
        inputs.append(COMMANDS, b"late")
    inputs.first[COMMANDS] = 7
    case = await case_of(log, inputs)
    assert "deleted before they were read" in case.contradictions[0]
    await decide(log, inputs, case, BEGINNING)
    assert (await own(log, inputs)).fold.positions[COMMANDS].through == 6


async def test_an_adopted_position_survives_sweeps_and_takes_effect_once(journal_log: JournalLog) -> None:
    log = journal_log.log
    inputs = made_anew(await worked(log))
    await decide(log, inputs, await case_of(log, inputs), BEGINNING)
    owned = await own(log, inputs)
    record = inputs.append(COMMANDS, b"read after it")
    positions = owned.fold.positions | {COMMANDS: span_of(record, 0, NOW)}
    for _ in range(50):
        await owned.journal.append(positions, [], [])
    assert (await own(log, inputs)).fold.positions == positions


async def test_a_decision_about_a_journal_that_has_moved_on_changes_nothing(journal_log: JournalLog) -> None:
    log = journal_log.log
    before = await worked(log)
    inputs = made_anew(before)
    case = await case_of(log, inputs)
    moved = await own(log, before)  # the topic came back, and a worker went on
    positions = {COMMANDS: span_of(before.append(COMMANDS, b"next"), 3)}
    await moved.journal.append(moved.fold.positions | positions, [], [])
    with pytest.raises(SchedulerError, match="nothing was adopted"):
        await decide(log, inputs, case, BEGINNING)
    assert (await own(log, before)).fold.positions[COMMANDS] == positions[COMMANDS]


def status_of(uid: str, world: World) -> JobStatus:
    return world.status(uid)


async def test_after_a_lost_journal_nothing_old_runs_and_what_was_live_ends_by_name(journal_log: JournalLog) -> None:
    inputs = await worked(journal_log.log)
    await journal_log.cut(0)
    log = journal_log.log
    world = World()
    live = world.submit("live")
    with pytest.raises(RefusedError, match=r"the journal was lost.*opentinker scheduler adopt --partition 0"):
        await own(log, inputs)
    case = await case_of(log, inputs, (status_of(live, world),))
    assert case.journal_lost
    await decide(log, inputs, case, END)
    owned = await own(log, inputs)
    assert owned.fold.state.jobs == {}
    assert {topic: span.through for topic, span in owned.fold.positions.items()} == {COMMANDS: 2, REPORTS: 0, INPUT_TOPICS[2]: -1}
    [status], [event], [alert] = published(owned, STATUS), published(owned, EVENTS), published(owned, ALERTS)
    assert (status.job_uid, status.phase, status.reason) == (live, JobPhase.FAILED, "JournalLost")
    assert isinstance(event, JobFailed)
    assert event.revision == status.revision == status_of(live, world).revision + 1
    assert "submit the job again" in status.message
    assert alert.jobs_ended == 1


async def test_after_a_lost_journal_inputs_may_be_read_again_and_then_nobody_is_ended(journal_log: JournalLog) -> None:
    inputs = await worked(journal_log.log)
    await journal_log.cut(0)
    log = journal_log.log
    world = World()
    await decide(log, inputs, await case_of(log, inputs, (status_of(world.submit("live"), world),)), BEGINNING)
    owned = await own(log, inputs)
    assert {span.through for span in owned.fold.positions.values()} == {-1}
    assert published(owned, STATUS) == []
    assert published(owned, ALERTS)[0].jobs_ended == 0


async def test_a_journal_without_its_beginning_can_be_begun_anew(journal_log: JournalLog) -> None:
    log = journal_log.log
    inputs = await worked(log)
    await log.trim(2, 2**62)
    with pytest.raises(RefusedError, match="holds no record"):
        await own(log, inputs)
    await decide(log, inputs, await case_of(log, inputs), END)
    owned = await own(log, inputs)
    await owned.journal.append(owned.fold.positions, [], [])
    assert (await own(log, inputs)).fold.positions == owned.fold.positions


def test_outputs_of_an_adopted_topic_have_ids_of_their_own() -> None:
    """Offsets begin anew with the topic; consumers tell events apart by id."""
    world = World()
    world.submit("job")
    record = MemoryInputs().append(COMMANDS, b"{}")
    item = interpret(record, 4).item
    before, after = (encode_outputs(item, tuple(world.outputs), generation) for generation in (0, NOW))
    ids = [{dict(output.headers)["ce_id"] for output in outputs} for outputs in (before, after)]
    assert ids[0]
    assert not ids[0] & ids[1]
