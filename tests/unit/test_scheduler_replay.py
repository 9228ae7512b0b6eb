"""Replays: of stories of the simulator, and of journals with all that can stand in one. A difference is found and named."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from opentinker.scheduler_stream.codec import InputSpan, OwnerStarted, ReplayFrom, decode_record, encode_record
from opentinker.scheduler_stream.core.state import Change, State
from opentinker.scheduler_stream.core.step import step
from opentinker.scheduler_stream.interpret import encode_outputs, interpret
from opentinker.scheduler_stream.journal import Journal
from opentinker.scheduler_stream.log import MemoryLog
from opentinker.scheduler_stream.recorded_log import Entry, RecordedLogError, read_journal, step_order
from opentinker.scheduler_stream.recovery import Fold
from opentinker.scheduler_stream.replay import Outcome, Recorded, Recovered, Replay, differences
from opentinker.scheduler_stream.simulator import run as simulator
from opentinker.schemas.records import InputRecord, Message, encode
from opentinker.schemas.topics import ADMIN, COMMANDS, INPUT_TOPICS, REPORTS
from recorded_logs import Recorder, record
from scheduler_world import World


def replayed(entries: list[Entry]) -> Outcome:
    replay = Replay(partitions=1)
    for entry in entries:
        if replay.feed(entry) is not None:
            break
    return replay.end()


class RecordingStory(simulator._Story):
    """The simulator's story with its inputs as bytes, and what a journal would hold of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.recorder = Recorder(self.state)

    def append(self, topic: str, message: Message) -> None:
        before = len(self.recorder.entries)
        result = self.recorder.put(topic, message, self.now)
        assert len(self.recorder.entries) >= before
        self.report.steps += 1
        for output in result.outputs:
            if output.topic.startswith("opentinker.placements"):
                self.deliver(output.message)

    def restart(self) -> None:
        super().restart()
        self.recorder.recovered(self.state)


@pytest.mark.parametrize("seed", range(12))
def test_a_story_with_faults_and_restarts_is_decided_the_same_again(seed: int) -> None:
    story = RecordingStory(seed)
    for agent in story.agents:
        story.append(REPORTS, agent.started(story.now))
    for _ in range(150):
        if story.broker_up and story.random.random() < 0.1:
            story.submit()
        if story.random.random() < 0.08:
            story.fault()
        story.heal()
        story.advance()
    story.recorder.cut()
    outcome = replayed(story.recorder.entries)
    assert outcome.difference is None, outcome.difference.text()
    assert outcome.hash == story.state.hash()
    assert outcome.records > 20


def altered(entries: list[Entry], change: Callable[[Recorded], Recorded], at: int) -> list[Entry]:
    numbers = [number for number, entry in enumerate(entries) if isinstance(entry, Recorded)]
    found = entries[numbers[at]]
    assert isinstance(found, Recorded)
    return [*entries[: numbers[at]], change(found), *entries[numbers[at] + 1 :]]


def test_the_first_difference_names_offset_input_entity_and_field() -> None:
    entries = record("plain")

    def other_cpu(entry: Recorded) -> Recorded:
        changes = list(entry.changes)
        [number] = [i for i, (kind, id, _) in enumerate(changes) if (kind, id) == ("node", "node-1")]
        node = msgspec.msgpack.decode(changes[number][2] or b"")
        node["cpu_millis"] += 1
        changes[number] = ("node", "node-1", msgspec.msgpack.encode(node))
        return msgspec.structs.replace(entry, changes=tuple(changes))

    difference = replayed(altered(entries, other_cpu, 0)).difference
    assert difference is not None
    assert difference.lines == ("node node-1", "  cpu_millis: 5001 → 5000")
    assert (difference.offset, difference.place) == (1, f"{REPORTS}:0:1")


def test_outputs_that_differ_are_shown() -> None:
    entries = record("plain")

    def without_last(entry: Recorded) -> Recorded:
        return msgspec.structs.replace(entry, outputs=entry.outputs[:-1])

    def other_value(entry: Recorded) -> Recorded:
        first = dataclasses.replace(entry.outputs[0], value=entry.outputs[0].value.replace(b'"default"', b'"other"', 1))
        return msgspec.structs.replace(entry, outputs=(first, *entry.outputs[1:]))

    missing = replayed(altered(entries, without_last, 1)).difference
    assert missing is not None
    assert missing.lines[1] == "recorded: none"
    assert missing.lines[2].startswith("now:      JobStatus.v1 to opentinker.jobs.status.v1, key ")
    wrong = replayed(altered(entries, other_value, 1)).difference
    assert wrong is not None
    assert wrong.lines[3:] == ("value.namespace: 'other' → 'default'",)


def test_a_change_that_no_input_explains_is_found_by_the_states_hash() -> None:
    entries = record("plain")
    first = entries[0]
    loads = tuple(change for entry in record("faults")[1:2] if isinstance(entry, Recorded) for change in entry.changes if change[1] == "node-0")
    assert loads
    recovered = next(number for number, entry in enumerate(entries) if isinstance(entry, Recovered) and number)
    again = entries[recovered]
    assert isinstance(again, Recovered)
    outcome = replayed([first, *entries[1:recovered], msgspec.structs.replace(again, loads=(*again.loads, *loads))])
    assert outcome.difference is not None
    assert "a worker took over and recovered another state" in outcome.difference.place
    assert outcome.difference.lines[0] in ("node node-0", "lease node-0")


def test_what_may_come_from_a_start_in_the_middle_is_said() -> None:
    entries = record("plain")
    [first] = [entry for entry in entries[:1] if isinstance(entry, Recovered)]
    lost = altered([msgspec.structs.replace(first, exact=False), *entries[1:]], lambda entry: msgspec.structs.replace(entry, outputs=()), 1)
    difference = replayed(lost).difference
    assert difference is not None
    assert "begin where a worker took over" in difference.text()
    unordered = altered(entries, lambda entry: msgspec.structs.replace(entry, outputs=(), ordered=False), 1)
    assert "does not say in which order" in str(replayed(unordered).difference)


def test_differences_of_plain_values() -> None:
    assert list(differences({"a": [1, {"b": 2}], "c": 3}, {"a": [1, {"b": 4}], "d": 5})) == ["a[1].b: 2 → 4", "c: 3 → not there", "d: not there → 5"]
    assert list(differences([1, 2], [1])) == [": [1, 2] → [1]"]


# From a journal


class MemoryInputs:
    """Input topics in memory."""

    def __init__(self) -> None:
        self.records: dict[str, list[InputRecord]] = {topic: [] for topic in INPUT_TOPICS}
        self.begin = dict.fromkeys(INPUT_TOPICS, 0)

    async def first(self, topic: str) -> int:
        return self.begin[topic]

    async def read(self, topic: str, start: int, end: int) -> list[InputRecord]:
        return [record for record in self.records[topic] if start <= record.offset < end]

    async def at(self, topic: str, offset: int) -> InputRecord:
        return next(record for record in self.records[topic] if record.offset == offset)


class Scheduler(World):
    """A worker over a journal in memory: one record an input, or several when told to hold back."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.inputs = MemoryLog(), MemoryInputs()
        self.positions: dict[str, InputSpan] = {}
        self.journal: Journal
        self.generation = 0
        self._changes: dict[tuple[str, str], Change] = {}
        self._outputs: list[Any] = []

    async def own(self, replay_from: ReplayFrom) -> None:
        """Take over as a worker does: announce, fold, go on."""
        epoch = await self.log.append(encode_record(OwnerStarted(worker="w", boot_id="b", core_version=1, replay_from=replay_from)))
        fold = Fold(owner_epoch=replay_from.owner_epoch, replay_from=replay_from)
        for entry in await self.log.read(replay_from.offset, epoch + 1):
            fold.apply(entry)
        self.state, self.positions = fold.state, dict(fold.positions)
        self.journal = Journal(self.log, fold.state, owner_epoch=epoch, replay_from=fold.replay_from, published_fast=-1, published_status=-1)

    def put(self, message: Message, after_ms: int = 0) -> Any:
        self.now += after_ms
        self.offset += 1
        topic = COMMANDS if type(message).__module__.endswith(".commands") else ADMIN if type(message).__module__.endswith(".admin") else REPORTS
        records = self.inputs.records[topic]
        offset = records[-1].offset + 1 if records else 0
        value, headers = encode(message, id=f"{topic}-{offset}", source="t", time_ms=self.now)
        item = InputRecord(topic=topic, partition=0, offset=offset, append_time_ms=self.now, key=None, value=value, headers=headers)
        records.append(item)
        understood = interpret(item, 1)
        result = step(self.state, understood.item)
        self._changes.update(((change.kind, change.id), change) for change in result.changes)
        self._outputs += [*understood.letters, *encode_outputs(understood.item, result.outputs, self.generation)]
        self.positions[topic] = InputSpan(offset, offset, zlib.crc32(value), self.now, self.generation)
        self.outputs.extend(result.outputs)
        return result

    async def write(self, order: tuple[tuple[int, int], ...] = ()) -> int:
        offset = await self.journal.append(self.positions, list(self._changes.values()), self._outputs, order)
        self._changes, self._outputs = {}, []
        return offset

    async def busy(self, rounds: int, name: str) -> None:
        for number in range(rounds):
            self.submit(f"{name}-{number}")
            await self.write()
            self.alive("n")
            await self.write()
            self.tick(1)
            await self.write()
            for uid in list(self.state.attempts):
                self.ended("n", uid)
                await self.write()


async def scheduler() -> Scheduler:
    made = Scheduler()
    await made.own(ReplayFrom())
    made.agent("n")
    await made.write()
    await made.busy(20, "first")
    return made


async def entries_of(made: Scheduler, start: int | None = None, end: int | None = None) -> list[Entry]:
    return [entry async for entry in read_journal(made.log, made.inputs, start, end)]


async def test_a_journal_replays_from_its_beginning_from_recoverys_start_and_from_any_record() -> None:
    made = await scheduler()
    begun = made.journal.replay_from
    assert begun.offset > 20
    await made.own(begun)  # a second worker
    await made.busy(10, "second")
    for start in (0, None, *range(1, made.log.end - 1, 7)):
        entries = await entries_of(made, start)
        outcome = replayed(entries)
        assert outcome.difference is None, outcome.difference.text()
        assert outcome.hash == made.state.hash()
        recoveries = [entry for entry in entries if isinstance(entry, Recovered)]
        assert recoveries[0].exact == (start == 0)
        assert all(each.exact for each in recoveries[1:])
    part = await entries_of(made, 0, 10)
    assert [entry.offset for entry in part if isinstance(entry, Recorded)] == list(range(1, 10))


async def test_void_records_and_holes_are_left_out() -> None:
    made = await scheduler()
    stale = decode_record(made.log.records[made.log.end - 1])
    await made.own(made.journal.replay_from)
    made.log.rival(encode_record(stale))  # of the worker before, which woke
    made.log.skip()
    made.journal.last = made.log.end - 1
    made.inputs.records[REPORTS][3:4] = []  # an offset without a record, as a transaction leaves one: it never was an input
    made.agent("m")
    await made.write()
    outcome = replayed(await entries_of(made, made.journal.owner_epoch))
    assert (outcome.difference, outcome.records, outcome.hash) == (None, 1, made.state.hash())


async def test_what_is_past_its_retention_is_told_and_the_first_possible_start_is_found() -> None:
    made = await scheduler()
    await made.busy(20, "more")
    middle = made.log.end // 2
    made.inputs.begin[REPORTS] = made.inputs.records[REPORTS][len(made.inputs.records[REPORTS]) * 9 // 10].offset
    with pytest.raises(RecordedLogError, match="are needed, the topic begins at"):
        await entries_of(made, middle)
    outcome = replayed(await entries_of(made))
    assert (outcome.difference, outcome.hash) == (None, made.state.hash())
    await made.log.trim(middle, 2**62)
    with pytest.raises(RecordedLogError, match="the journal holds offsets"):
        await entries_of(made, middle - 1)
    with pytest.raises(RecordedLogError, match="needs the journal from"):
        await entries_of(made, middle)
    assert replayed(await entries_of(made)).difference is None
    made.inputs.begin[REPORTS] = 10**6
    with pytest.raises(RecordedLogError, match="no record of that range has all of its inputs left"):
        await entries_of(made)


async def test_inputs_that_are_not_those_that_were_folded_are_told() -> None:
    made = await scheduler()
    wrong = made.inputs.records[COMMANDS][5]
    made.inputs.records[COMMANDS][5] = dataclasses.replace(wrong, value=(wrong.value or b"") + b" ")
    with pytest.raises(RecordedLogError, match="is not the record that the journal folded"):
        await entries_of(made, 0)


def test_the_order_within_a_record() -> None:
    def records(topic: str, *offsets: int) -> list[InputRecord]:
        return [InputRecord(topic=topic, partition=0, offset=at, append_time_ms=1, key=None, value=b"", headers=()) for at in offsets]

    inputs = {REPORTS: records(REPORTS, 4, 5, 7), COMMANDS: records(COMMANDS, 1, 2, 3)}
    order = ((1, 5), (-1, 3), (-1, 9), (0, 1), (1, 7), (0, 3))
    early = {(COMMANDS, at): records(COMMANDS, at)[0] for at in (3, 9)}
    assert [(each.topic, each.offset) for each in step_order(inputs, order, early, {REPORTS: (4, 8)})] == [
        (REPORTS, 5), (COMMANDS, 3), (COMMANDS, 9), (COMMANDS, 1), (REPORTS, 7), (COMMANDS, 2),
    ]  # fmt: skip


async def test_the_order_of_a_journal_is_followed_and_without_it_the_doubt_is_said() -> None:
    """Commands that wait while heartbeats are held back; a cancellation that is stepped ahead of them."""
    made = await scheduler()
    for ordered in (True, False):
        start = made.log.end
        made.alive("n", after_ms=4000)
        first, second = made.submit(f"a-{start}"), made.submit(f"b-{start}")
        made.tick(5)
        made.cancel(first)
        made.alive("n", after_ms=3000)
        commands, reports = made.inputs.records[COMMANDS], made.inputs.records[REPORTS]
        cancel, beats = commands[-1].offset, [record.offset for record in reports[-5:]]
        # As if the cancellation stood behind another submission, and had been taken early.
        order = ((1, beats[0]), (0, cancel - 1), (1, beats[3]), (-1, cancel), (1, beats[4]))
        span = made.positions[COMMANDS]
        before = commands[cancel - 1]
        made.positions[COMMANDS] = InputSpan(cancel - 1, cancel - 1, zlib.crc32(before.value or b""), before.append_time_ms, early=(cancel,))
        await made.write(order if ordered else ())
        made.positions[COMMANDS] = span
        made.cancel(second)  # in its order, behind the one that came early
        await made.write(((0, cancel + 1),))
        outcome = replayed(await entries_of(made, start))
        if ordered:
            assert outcome.difference is None, outcome.difference.text()
            assert outcome.hash == made.state.hash()
        else:
            assert outcome.difference is not None
            assert "does not say in which order they were stepped" in outcome.difference.text()


async def test_outputs_of_an_adopted_topic_have_ids_of_their_generation() -> None:
    made = await scheduler()
    start = made.log.end
    made.generation = 2
    made.submit("adopted")
    await made.write()
    outcome = replayed(await entries_of(made, start))
    assert (outcome.difference, outcome.outputs > 0) == (None, True)


def test_a_state_rebuilt_has_the_same_hash() -> None:
    world = World()
    world.agent("a")
    fresh = State()
    for kind, id in world.state.entity_keys():
        fresh.load(kind, id, world.state.get(kind, id))
    assert fresh.hash() == world.state.hash()
