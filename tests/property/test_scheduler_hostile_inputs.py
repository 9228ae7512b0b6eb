"""Whatever a record on an input topic holds: it is refused by field or folded, and what was folded can be written down, published and read again.

A record that broke any of these would stop its partition for ever, since it is read again after every restart.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hostile import HOSTILE
from opentinker.scheduler_stream.codec import decode_change, encode_change
from opentinker.scheduler_stream.core.step import StepInput, step
from opentinker.scheduler_stream.interpret import encode_outputs, interpret
from opentinker.schemas.messages import (
    AcknowledgeBrake,
    AgentStarted,
    AttemptEnded,
    AttemptOutcome,
    AttemptPhase,
    CancelJob,
    CordonNode,
    Device,
    Heartbeat,
    ModelReference,
    NodeCapacity,
    SetNamespaceLimits,
    SubmitJob,
    Tick,
    UncordonNode,
)
from opentinker.schemas.records import InputRecord, Message, encode
from opentinker.schemas.topics import ADMIN, COMMANDS, REPORTS, partition_of
from scheduler_world import World

PARTITION = partition_of("default", 4)


def world() -> tuple[World, str]:
    """A node, and a job that runs on it."""
    world = World()
    world.agent("node-1")
    uid = world.submit("job", environment={"id": "CartPole-v1", "kwargs": {"a": 1}}, stop={"totalSteps": 10}, seed=3)
    world.run_all(uid)
    return world, uid


def messages() -> dict[str, tuple[str, Message]]:
    made, uid = world()
    job = made.job(uid)
    progress = made.progress(
        uid, AttemptPhase.RUNNING, global_step=5, env_steps_per_s=2.5, mean_return=1.5, checkpoint_step=4, checkpoint_id="c", episodes=2
    )
    model = ModelReference(name="m", version=1)
    capacity = NodeCapacity(cpu_millis=2000, memory_bytes=2**32, devices=(Device(index=0, simulated=True),))
    report = {"node": "node-1", "incarnation": "1", "pool": "default"}
    return {
        "AgentStarted": (REPORTS, AgentStarted(
            **report, boot_id="b", agent_version="0", capacity=capacity, address="127.0.0.1", port_low=29500, port_high=29600, labels={"a": "b"},
            attempts=(progress,),
        )),
        "Heartbeat": (REPORTS, Heartbeat(**report, sequence=3, applied_seq=1, attempts=(progress,))),
        "AttemptEnded": (REPORTS, AttemptEnded(
            **report, job_uid=uid, attempt_number=job.attempt_number, lease_epoch=job.lease_epoch, ranks=(0,), outcome=AttemptOutcome.SUCCEEDED,
            exit_codes={0: 0}, model=model,
        )),
        "Tick": (REPORTS, Tick(partition=PARTITION, worker="w", sequence=1, sent_ms=5)),
        "SubmitJob": (COMMANDS, SubmitJob(
            job_uid=uid.replace(uid[0], "f"), namespace="default", name="other", pool="default", spec=made.job(uid).spec, spec_digest=job.spec_digest,
            submitted_by="me", labels={"a": "b"},
        )),
        "CancelJob": (COMMANDS, CancelJob(job_uid=uid, namespace="default", pool="default", requested_by="me", reason="r")),
        "CordonNode": (ADMIN, CordonNode(pool="default", node="node-1", requested_by="me")),
        "UncordonNode": (ADMIN, UncordonNode(pool="default", node="node-1", requested_by="me")),
        "AcknowledgeBrake": (ADMIN, AcknowledgeBrake(pool="default", requested_by="me")),
        "SetNamespaceLimits": (ADMIN, SetNamespaceLimits(pool="default", namespace="default", queued_max=1, requested_by="me")),
    }  # fmt: skip


def mutations(value: Any) -> Iterator[Any]:
    """The value with each of its parts replaced, one at a time."""
    for path in _paths(value):
        for hostile in HOSTILE:
            changed = copy.deepcopy(value)
            place = changed
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = hostile
            yield changed


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for part in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, part)
        yield from _paths(value[part], (*before, part))


def fold(world: World, item: StepInput) -> None:
    """Step it; its changes and outputs stand the way to the journal and back."""
    result = step(world.state, item)
    for change in result.changes:
        assert decode_change(encode_change(change)) == (change.kind, change.id, change.value)
    encode_outputs(item, result.outputs)


@pytest.mark.parametrize("name", messages())
def test_no_record_can_stop_the_fold(name: str) -> None:
    topic, message = messages()[name]
    value, headers = encode(message, id="1", source="s", time_ms=1_800_000_000_000)
    refused = folded = 0
    for changed in mutations(json.loads(value)):
        made, _ = world()
        record = InputRecord(
            topic=topic,
            partition=PARTITION,
            offset=made.offset,
            append_time_ms=made.now + 1,
            key=None,
            value=json.dumps(changed).encode(),
            headers=headers,
        )
        understood = interpret(record, 4)
        fold(made, understood.item)
        for number in range(1, 8):  # past the lease: what was folded is taken up again by the timers
            tick = Tick(partition=PARTITION, worker="w", sequence=number, sent_ms=1)
            now_ms, offset = record.append_time_ms + 2000 * number, record.offset + number
            fold(made, StepInput(topic=REPORTS, partition=PARTITION, offset=offset, append_time_ms=now_ms, message=tick))
        refused, folded = refused + bool(understood.letters), folded + (not understood.letters)
    assert refused
    assert folded
