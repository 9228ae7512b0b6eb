"""Plans of `find_plan` against brute force: whole or not at all, nothing given twice, never a fit overlooked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from opentinker.scheduler_stream.core.entities import DeviceSlot, Node, Requirement
from opentinker.scheduler_stream.core.fit import Plan, find_plan, slots
from opentinker.scheduler_stream.core.state import State

nodes = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 16), st.booleans(), st.booleans()), max_size=8)
needs = st.builds(
    Requirement,
    replicas=st.integers(1, 12),
    cpu_millis=st.integers(1, 4).map(lambda n: n * 1000),
    memory_bytes=st.just(2**30),
    gpus=st.integers(0, 3),
)


def state_of(shapes: list[tuple[int, int, bool, bool]]) -> State:
    state = State()
    for number, (gpus, cpu, alive, cordoned) in enumerate(shapes):
        state.put(
            Node(
                name=f"node-{number}", pool="default", incarnation="1", boot_id="b", cpu_millis=cpu * 1000, memory_bytes=8 * 2**30,
                devices=tuple(DeviceSlot(index=i, kind="gpu", simulated=True) for i in range(gpus)), address="127.0.0.1", port_low=1, port_high=9,
                lease_timeout_ms=10_000, alive=alive, cordoned=cordoned,
            )
        )  # fmt: skip
    return state


@settings(max_examples=300, deadline=None)
@given(nodes, needs)
def test_a_plan_is_whole_sound_and_found_whenever_there_is_one(shapes: list[tuple[int, int, bool, bool]], need: Requirement) -> None:
    state = state_of(shapes)
    usable = [name for name, node in state.nodes.items() if node.alive and not node.cordoned]
    room = {name: slots(state.free[name], need) for name in usable}
    plan = find_plan(state, "default", need)
    assert isinstance(plan, Plan) == (sum(room.values()) >= need.replicas)
    if not isinstance(plan, Plan):
        return
    assert [rank for share in plan.shares for rank in share.ranks] == list(range(need.replicas))
    assert len({share.node for share in plan.shares}) == len(plan.shares)
    for share in plan.shares:
        given_devices = [index for devices in share.devices for index in devices]
        assert len(share.ranks) <= room[share.node]
        assert len(given_devices) == len(set(given_devices)) == need.gpus * len(share.ranks)
    largest = sorted(room.values(), reverse=True)
    fewest = next(count for count in range(1, len(largest) + 1) if sum(largest[:count]) >= need.replicas)
    assert len(plan.shares) == fewest
