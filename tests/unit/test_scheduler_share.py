"""Whose turn it is: priority within a namespace, shares among them, and what each may have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from opentinker.scheduler_stream.codec import decode_change, encode_change
from opentinker.scheduler_stream.core.entities import Amounts
from opentinker.scheduler_stream.core.explain import explain_job
from opentinker.scheduler_stream.core.state import Change, State
from opentinker.schemas.messages import JobPhase, ResourceLimits, SetNamespaceLimits, UnschedulableReason
from scheduler_world import World


@pytest.fixture
def world() -> World:
    return World()


def limits(world: World, namespace: str, **fields: Any) -> None:
    world.put(SetNamespaceLimits(pool="default", namespace=namespace, requested_by="t", **fields))


def placed(world: World, uids: list[str]) -> list[str]:
    """In the order in which they were placed."""
    starts: list[str] = []
    for output in world.outputs:
        uid = getattr(output.message, "job_uid", None)
        if type(output.message).__name__ == "AttemptPlaced" and uid in uids:
            starts.append(uid)
    return starts


def finish_all(world: World, node: str = "node-1") -> None:
    """Run what is placed to its end, again and again, until nothing is."""
    while world.state.attempts:
        for uid in sorted(world.state.attempts):
            world.run_all(uid)
            world.ended(node, uid)


class TestPriority:
    def test_the_higher_goes_first_and_equals_in_the_order_of_their_coming(self, world: World) -> None:
        uids = [world.submit(f"job-{number}", priority=priority) for number, priority in enumerate((0, 5, -5, 5, 0))]
        world.agent("node-1")
        finish_all(world)
        assert placed(world, uids) == [uids[each] for each in (1, 3, 0, 4, 2)]

    def test_waiting_makes_up_for_priority_so_that_nothing_waits_for_ever(self, world: World) -> None:
        low = world.submit("low")
        world.tick(1_250)  # more than two points of priority
        later = [world.submit(f"later-{number}", priority=2) for number in range(3)]
        urgent = world.submit("urgent", priority=3)
        world.agent("node-1")
        finish_all(world)
        assert placed(world, [low, urgent, *later]) == [urgent, low, *later]

    def test_position_counts_the_namespaces_own_line(self, world: World) -> None:
        for namespace in ("a", "a", "b"):
            world.submit(f"job-{world.offset}", namespace=namespace)
        answer = explain_job(world.state, world.submit("first", namespace="a", priority=1))
        assert answer is not None
        assert answer["position"] == 1


class TestShares:
    def test_namespaces_take_turns_whatever_they_have_queued(self, world: World) -> None:
        many = [world.submit(f"many-{number}", namespace="many") for number in range(20)]
        few = [world.submit(f"few-{number}", namespace="few") for number in range(3)]
        world.agent("node-1", gpus=8, cpu=16)
        assert Counter(world.job(uid).namespace for uid in world.state.attempts) == {"many": 5, "few": 3}
        assert world.job(many[-1]).phase is JobPhase.PENDING
        assert all(world.job(uid).phase is JobPhase.STARTING for uid in few)

    def test_a_weight_is_a_part_of_what_is_shared(self, world: World) -> None:
        limits(world, "a", weight_milli=3000)
        for number in range(12):
            for namespace in ("a", "b"):
                world.submit(f"job-{number}", namespace=namespace)
        world.agent("node-1", gpus=12, cpu=24)
        assert Counter(world.job(uid).namespace for uid in world.state.attempts) == {"a": 9, "b": 3}

    def test_the_share_is_of_the_resource_that_one_has_most_of(self, world: World) -> None:
        """16 GPUs and 64 cores: one namespace wants GPUs, the other cores; each gets the same part of what it wants most."""
        for number in range(40):
            world.submit(f"gpu-{number}", namespace="gpus", gpu=1, cpu=1)
            world.submit(f"cpu-{number}", namespace="cores", gpu=0, cpu=4)
        world.agent("node-1", gpus=16, cpu=64)
        used = world.state.users("default")
        assert used["gpus"].gpus / 16 == pytest.approx(used["cores"].cpu_millis / 64_000, abs=0.07)

    def test_a_gang_counts_before_it_is_placed(self, world: World) -> None:
        gang = world.submit("gang", namespace="a", replicas=4)
        singles = [world.submit(f"single-{number}", namespace="b") for number in range(3)]
        world.agent("node-1", gpus=4, cpu=8)
        assert world.job(gang).phase is JobPhase.PENDING
        assert all(world.job(uid).phase is JobPhase.STARTING for uid in singles)


class TestQuota:
    def test_above_its_own_and_what_it_may_borrow_a_namespace_waits_and_is_told_the_numbers(self, world: World) -> None:
        limits(world, "a", nominal=ResourceLimits(gpus=2), borrowing=ResourceLimits(gpus=1))
        world.agent("node-1", gpus=8, cpu=16)
        uids = [world.submit(f"job-{number}", namespace="a") for number in range(5)]
        assert [world.job(uid).phase for uid in uids] == [JobPhase.STARTING] * 3 + [JobPhase.PENDING] * 2
        assert world.job(uids[3]).unschedulable is UnschedulableReason.QUOTA_EXCEEDED
        assert world.job(uids[3]).message == "needs 1 × (1 GPU, 1 CPU, 1 GiB); namespace a has 3 GPUs of 3 GPUs that it may have"
        answer = explain_job(world.state, uids[4])
        assert answer is not None
        assert (answer["reason"], answer["position"]) == ("QuotaExceeded", 2)
        world.run_all(uids[0])
        world.ended("node-1", uids[0])
        assert world.job(uids[3]).phase is JobPhase.STARTING
        limits(world, "a", nominal=ResourceLimits(gpus=8))
        assert world.job(uids[4]).phase is JobPhase.STARTING

    def test_who_would_use_only_its_own_comes_before_who_borrows(self, world: World) -> None:
        limits(world, "owner", nominal=ResourceLimits(gpus=4))
        limits(world, "guest", nominal=ResourceLimits(gpus=0), weight_milli=100_000)
        for number in range(4):
            world.submit(f"job-{number}", namespace="guest")
        owned = [world.submit(f"job-{number}", namespace="owner") for number in range(4)]
        world.agent("node-1", gpus=5, cpu=10)
        assert all(world.job(uid).phase is JobPhase.STARTING for uid in owned)
        assert Counter(world.job(uid).namespace for uid in world.state.attempts) == {"owner": 4, "guest": 1}

    def test_what_is_not_lent_stays_free(self, world: World) -> None:
        limits(world, "owner", nominal=ResourceLimits(gpus=4), lending=ResourceLimits(gpus=1))
        world.agent("node-1", gpus=8, cpu=16)
        guests = [world.submit(f"job-{number}", namespace="guest") for number in range(8)]
        assert sum(world.job(uid).phase is JobPhase.STARTING for uid in guests) == 5
        assert world.job(guests[5]).message.endswith("0 GPUs of pool default are not kept for namespaces that do not lend them")
        assert world.job(world.submit("mine", namespace="owner", replicas=3)).phase is JobPhase.STARTING
        assert world.job(guests[5]).phase is JobPhase.PENDING

    def test_a_gang_that_may_start_smaller_takes_what_its_namespace_may_have(self, world: World) -> None:
        limits(world, "a", nominal=ResourceLimits(gpus=3), borrowing=ResourceLimits(gpus=0))
        world.agent("node-1", gpus=8, cpu=16)
        uid = world.submit("elastic", namespace="a", replicas=6, minReplicas=2)
        assert world.state.attempts[uid].size == 3

    def test_jobs_of_a_namespace_may_be_counted(self, world: World) -> None:
        limits(world, "a", running_max=1)
        world.agent("node-1", gpus=8, cpu=16)
        first, second = (world.submit(f"job-{number}", namespace="a") for number in range(2))
        assert world.job(second).message.endswith("namespace a may have 1 jobs running at once")
        assert world.job(first).phase is JobPhase.STARTING

    def test_what_is_held_is_counted_once_and_survives_a_takeover(self, world: World) -> None:
        world.agent("node-1", gpus=4, cpu=8)
        uid = world.submit("job", namespace="a", replicas=3)
        fresh = State()
        for kind, id in world.state.entity_keys():
            fresh.load(*decode_change(encode_change(Change(kind, id, world.state.get(kind, id)))))
        for state in (world.state, fresh):
            assert state.used("default", "a") == Amounts(3, 3000, 3 * 2**30)
            assert state.capacity("default") == Amounts(4, 8000, 4 * 2**30)
        world.run_all(uid)
        world.ended("node-1", uid)
        assert world.state.used("default", "a") == Amounts()
