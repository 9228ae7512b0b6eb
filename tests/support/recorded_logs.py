"""The recorded logs of tests/contract/recorded: stories told to the real core, written down as a worker's journal would hold them.

`python tests/support/recorded_logs.py tests/contract/recorded` records them anew. Do so only when decisions are meant to change, together with a new
CORE_VERSION in scheduler_stream/core/policy.py; the same core and the same story give the same file, byte for byte.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentinker.scheduler_stream.codec import JournalOutput, encode_change
from opentinker.scheduler_stream.core.policy import CORE_VERSION
from opentinker.scheduler_stream.core.state import Change, State
from opentinker.scheduler_stream.core.step import StepResult, step
from opentinker.scheduler_stream.interpret import encode_outputs, interpret
from opentinker.scheduler_stream.recorded_log import Entry, Header, LogFile
from opentinker.scheduler_stream.replay import Recorded, RecordedInput, Recovered
from opentinker.schemas.messages import (
    AcknowledgeBrake,
    AttemptOutcome,
    AttemptPhase,
    AttemptProgress,
    CancelJob,
    CordonNode,
    FailureClass,
    ModelReference,
    StopAttempt,
    SubmitJob,
    UncordonNode,
)
from opentinker.schemas.records import InputRecord, Message, encode
from opentinker.schemas.topics import ADMIN, COMMANDS, REPORTS
from scheduler_world import World

__all__ = ["STORIES", "Recorder", "record"]

PARTITIONS = 1
_BATCH = 5  # inputs of one journal record


class Recorder:
    """Steps inputs as a worker does, and keeps what its journal would say."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.entries: list[Entry] = []
        self._offsets: Counter[str] = Counter()
        self._inputs: list[RecordedInput] = []
        self._changes: dict[tuple[str, str], Change] = {}
        self._outputs: list[JournalOutput] = []
        self.recovered(state)

    def recovered(self, state: State) -> None:
        """A worker takes over here, with a state made of the entities alone."""
        self.cut()
        self.state = state
        loads = tuple(encode_change(Change(kind, id, state.get(kind, id))) for kind, id in state.entity_keys())
        self.entries.append(Recovered(offset=len(self.entries), loads=loads, exact=True))

    def put(self, topic: str, message: Message, now_ms: int) -> StepResult:
        value, headers = encode(message, id=f"{topic}-{self._offsets[topic]}", source="story", time_ms=now_ms)
        return self.raw(topic, value, headers, now_ms)

    def raw(self, topic: str, value: bytes | None, headers: tuple[tuple[str, bytes], ...], now_ms: int) -> StepResult:
        record = InputRecord(
            topic=topic, partition=0, offset=self._offsets[topic], append_time_ms=now_ms, key=b"default", value=value, headers=headers
        )  # fmt: skip
        self._offsets[topic] += 1
        understood = interpret(record, PARTITIONS)
        result = step(self.state, understood.item)
        self._inputs.append(RecordedInput.of(record))
        self._changes.update(((change.kind, change.id), change) for change in result.changes)
        self._outputs += [*understood.letters, *encode_outputs(understood.item, result.outputs)]
        if len(self._inputs) >= _BATCH:
            self.cut()
        return result

    def last_value(self, topic: str, kind: type[Message]) -> bytes:
        """The bytes of the newest message of that kind."""
        inputs = [each for entry in self.entries if isinstance(entry, Recorded) for each in entry.inputs] + self._inputs
        wanted = ("ce_type", kind.ce_type().encode())
        return next(each.value or b"" for each in reversed(inputs) if each.topic == topic and wanted in each.headers and len(each.value or b"") > 9)

    def cut(self) -> None:
        """End the journal record in hand."""
        if not self._inputs:
            return
        record = Recorded(
            offset=len(self.entries), core_version=CORE_VERSION, inputs=tuple(self._inputs), outputs=tuple(self._outputs), ordered=True,
            changes=tuple(encode_change(change) for change in self._changes.values()),
        )  # fmt: skip
        self.entries.append(record)
        self._inputs, self._changes, self._outputs = [], {}, []


class RecordedWorld(World):
    """A World whose inputs go through their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder(self.state)

    def put(self, message: Message, after_ms: int = 0) -> StepResult:
        self.now += after_ms
        self.offset += 1
        topic = COMMANDS if isinstance(message, SubmitJob | CancelJob) else ADMIN if type(message).__module__.endswith(".admin") else REPORTS
        result = self.recorder.put(topic, message, self.now)
        assert not result.violations, result.violations
        self.outputs.extend(result.outputs)
        return result

    def raw(self, topic: str, value: bytes | None, **headers: str) -> None:
        self.recorder.raw(topic, value, tuple((name, text.encode()) for name, text in headers.items()), self.now)

    def take_over(self) -> None:
        """Another worker goes on from what the journal holds."""
        self.recorder.cut()
        fresh = State()
        for kind, id in self.state.entity_keys():
            fresh.load(kind, id, self.state.get(kind, id))
        self.state = fresh
        self.recorder.recovered(fresh)

    def end_parts(self, uid: str, outcome: AttemptOutcome = AttemptOutcome.SUCCEEDED, failure: FailureClass | None = None, **fields: Any) -> None:
        """Every node of the live attempt reports its part's end."""
        for node in self.nodes_of(uid):
            if uid in self.state.attempts:
                self.ended(node, uid, outcome, failure, **fields)

    def fail_if_live(self, uid: str, failure: FailureClass) -> None:
        if uid in self.state.attempts:
            self.end_parts(uid, AttemptOutcome.FAILED, failure, message="it broke", exit_codes={0: 1})

    def obey_stops(self, uid: str) -> None:
        """Every node that was told to stop the job's live attempt says that it has."""
        if uid not in self.state.attempts:
            return
        told = {(stop.node, stop.attempt_number) for stop in self.sent(StopAttempt) if stop.job_uid == uid}
        for node in self.nodes_of(uid):
            if uid in self.state.attempts and (node, self.job(uid).attempt_number) in told:
                self.ended(node, uid, AttemptOutcome.STOPPED)


def plain() -> RecordedWorld:
    """Gangs are submitted, wait, run with progress and complete, in turns; a worker takes over in the middle."""
    world = RecordedWorld()
    for number in range(3):
        world.agent(f"node-{number}", gpus=2 + number, cpu=4 + number)
    uids = [world.submit(f"job-{number}", replicas=1 + number % 4, gpu=number % 2, seed=number) for number in range(12)]
    world.submit("too-large", replicas=16)
    for turn in range(40):
        for node in list(world.state.nodes):
            world.alive(node, after_ms=700)
        if turn == 9:
            world.take_over()
        live = [uid for uid in uids if uid in world.state.attempts]
        for uid in live[: 1 + turn % 3]:
            done = {"stop_reason": "TotalSteps", "global_step": 4096 * (turn + 1), "episodes": turn, "mean_return": turn + 0.125}
            world.end_parts(uid, checkpoint_id=f"c-{turn}", checkpoint_step=4096, model=ModelReference(name=world.job(uid).name, version=1), **done)
        world.tick(1)
    return world


def faults() -> RecordedWorld:
    """Nodes are lost and come back, attempts fail for both reasons, never start, run too long; jobs are cancelled, a name is taken; one
    node is told to end, and another's name is wanted by a second agent."""
    world = RecordedWorld()
    for number in range(4):
        world.agent(f"node-{number}", gpus=2)
    retry = {"infrastructure": 2, "userError": 1}
    failing, wrong, silent = (world.submit(name, replicas=2, retry=retry) for name in ("failing", "wrong", "never-starts"))
    long, waiting = world.submit("too-long", maxRuntime="30s"), world.submit("waits", replicas=8)
    world.submit("failing")  # the name of a live job
    world.cancel(waiting)
    for turn in range(90):
        for node in ("node-0", "node-1", "node-2", "node-3"):
            if not (node == "node-1" and 20 <= turn < 45):  # its lease runs out
                world.beat(node, *_progress(world, node, silent), after_ms=1000)
        if turn % 8 == 3:
            world.fail_if_live(failing, FailureClass.INFRASTRUCTURE)
            world.fail_if_live(wrong, FailureClass.USER_ERROR)
        if turn == 45:
            world.agent("node-1", gpus=2, incarnation="2")
        if turn == 60:
            world.take_over()
        if turn == 55:
            world.agent("node-2", gpus=2, incarnation="9", previous_incarnation=None)
        for uid in (silent, long):
            world.obey_stops(uid)
    late = world.submit("cancelled-late", replicas=2)
    world.run_all(late)
    world.cancel(late)
    world.obey_stops(late)
    moves = world.submit("moves")
    world.run_all(moves)
    world.beat(world.nodes_of(moves)[0], world.progress(moves), stopping=True)
    world.obey_stops(moves)
    world.tick(15)
    return world


def brake() -> RecordedWorld:
    """Most nodes fall silent at once, twice: once they come back, once somebody says that they will not. Between them what cannot be read."""
    world = RecordedWorld()
    names = [f"node-{number}" for number in range(12)]
    for name in names:
        world.agent(name)
    for number in range(10):
        world.submit(f"job-{number}")
    for _ in range(3):
        for name in names:
            world.alive(name, after_ms=150)
    _poison(world)
    for _ in range(8):
        for name in names[:4]:
            world.alive(name, after_ms=500)
    for name in names:
        world.alive(name, after_ms=100)
    world.put(CordonNode(node="node-0", pool="default", requested_by="story"))
    for _ in range(10):
        for name in names[:4]:
            world.alive(name, after_ms=500)
    world.put(AcknowledgeBrake(pool="default", requested_by="story"))
    world.take_over()
    _poison(world)
    world.put(UncordonNode(node="node-0", pool="default", requested_by="story"))
    for _ in range(10):
        for name in names[:4]:
            world.alive(name, after_ms=500)
    return world


def _poison(world: RecordedWorld) -> None:
    good = {"ce_specversion": "1.0", "ce_id": "p", "ce_source": "story", "content-type": "application/json", "ce_time": "2027-01-15T08:00:00Z"}
    submit = good | {"ce_type": SubmitJob.ce_type()}
    world.raw(COMMANDS, b"{", **submit)
    world.raw(COMMANDS, None, **submit)
    world.raw(COMMANDS, b"\xff\xfe\x00", **submit)
    world.raw(COMMANDS, b"{}", **good, ce_type="io.opentinker.SubmitJbo.v1")
    world.raw(REPORTS, b"[[[[[[", **good, ce_type="io.opentinker.Heartbeat.v1")
    world.raw(REPORTS, b"", nothing="at all")
    world.raw(ADMIN, b'{"pool": "default", "node": "Not A Node", "requested_by": "x"}', **good, ce_type=CordonNode.ce_type())
    stale = submit | {"ce_time": "2020-01-01T00:00:00Z"}
    world.raw(COMMANDS, world.recorder.last_value(COMMANDS, SubmitJob), **stale)


def _progress(world: RecordedWorld, node: str, silent: str) -> list[AttemptProgress]:
    """What a node says of the parts it has; those of `silent` never come to run."""
    held = [(uid, part) for uid, attempt in world.state.attempts.items() for part in attempt.parts if part.node == node]
    return [
        world.progress(uid, AttemptPhase.PREPARING, running=0) if uid == silent else world.progress(uid, running=len(part.ranks))
        for uid, part in held
    ]


STORIES: dict[str, Callable[[], RecordedWorld]] = {"plain": plain, "faults": faults, "brake": brake}


def record(name: str) -> list[Entry]:
    """One story's log."""
    world = STORIES[name]()
    world.recorder.cut()
    return world.recorder.entries


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, story in STORIES.items():
        path = directory / f"{name}.v{CORE_VERSION}.log.gz"
        with LogFile(path, Header(partition=0, partitions=PARTITIONS, note=(story.__doc__ or "").strip())) as file:
            for entry in record(name):
                file.add(entry)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
