"""Plans of `find_plan` against brute force: whole or not at all, nothing given twice, never a fit overlooked, on the fewest nodes."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from opentinker.scheduler_stream.core.entities import DeviceSlot, Node, Requirement, Taint, Toleration
from opentinker.scheduler_stream.core.fit import Plan, find_plan
from opentinker.scheduler_stream.core.state import State

TYPES = ("a100", "h100")
shapes = st.lists(
    st.fixed_dictionaries(
        {
            "gpus": st.lists(st.sampled_from(TYPES), max_size=6),
            "cpu": st.integers(1, 16),
            "alive": st.booleans() | st.just(True),
            "cordoned": st.just(False) | st.booleans(),
            "labels": st.fixed_dictionaries(
                {}, optional={"rack": st.sampled_from("rs"), "zone": st.sampled_from("xy"), "disk": st.sampled_from(("ssd", "hdd"))}
            ),
            "taints": st.lists(st.builds(Taint, st.sampled_from(("spot", "team")), st.sampled_from(("", "a"))), max_size=1),
        }
    ),
    max_size=7,
)
needs = st.builds(
    Requirement,
    replicas=st.integers(1, 8),
    replicas_min=st.integers(0, 2),
    cpu_millis=st.integers(1, 4).map(lambda n: n * 1000),
    memory_bytes=st.just(2**30),
    gpus=st.integers(0, 2),
    gpu_types=st.lists(st.sampled_from(TYPES), max_size=1).map(tuple),
    selector=st.sampled_from(((), (("disk", ("ssd",)),), (("disk", ("hdd", "ssd")),))),
    tolerations=st.lists(st.builds(Toleration, st.sampled_from(("spot", "team")), st.sampled_from((None, "", "a"))), max_size=2).map(tuple),
    same=st.sampled_from(("", "", "rack", "zone")),
    spread=st.booleans(),
)


def state_of(nodes: list[dict[str, object]]) -> State:
    state = State()
    for number, shape in enumerate(nodes):
        state.put(
            Node(
                name=f"node-{number}", pool="default", incarnation="1", boot_id="b", cpu_millis=shape["cpu"] * 1000, memory_bytes=8 * 2**30,
                devices=tuple(DeviceSlot(index=i, kind=kind, simulated=True) for i, kind in enumerate(shape["gpus"])), address="127.0.0.1",
                port_low=1, port_high=9, lease_timeout_ms=10_000, alive=shape["alive"], cordoned=shape["cordoned"], labels=shape["labels"],
                taints=tuple(shape["taints"]),
            )  # type: ignore[arg-type, operator]
        )  # fmt: skip
    return state


def fits_on(node: Node, need: Requirement) -> int:
    """How many replicas, counted one at a time."""
    if not node.alive or node.cordoned or any(node.labels.get(key) not in values for key, values in need.selector):
        return 0
    for taint in node.taints:
        if not any(each.key == taint.key and each.value in (None, taint.value) for each in need.tolerations):
            return 0
    count = min(node.cpu_millis // need.cpu_millis, node.memory_bytes // need.memory_bytes)
    if need.gpus:
        by_type = [sum(device.kind == kind for device in node.devices) for kind in TYPES if not need.gpu_types or kind in need.gpu_types]
        count = min(count, sum(devices // need.gpus for devices in by_type))
    return count


def domains(state: State, need: Requirement) -> list[list[Node]]:
    nodes = list(state.nodes.values())
    if not need.same:
        return [nodes]
    values = {node.labels[need.same] for node in nodes if need.same in node.labels}
    return [[node for node in nodes if node.labels.get(need.same) == value] for value in sorted(values)]


@settings(max_examples=600, deadline=None)
@given(shapes, needs)
def test_a_plan_is_whole_sound_and_found_whenever_there_is_one(nodes: list[dict[str, object]], need: Requirement) -> None:
    if need.replicas_min > need.replicas:
        return
    state = state_of(nodes)
    room = {name: fits_on(node, need) for name, node in state.nodes.items()}
    best = max((min(need.replicas, sum(room[node.name] for node in domain)) for domain in domains(state, need)), default=0)
    plan = find_plan(state, "default", need)
    assert isinstance(plan, Plan) == (best >= need.at_least)
    if not isinstance(plan, Plan):
        return
    size = sum(len(share.ranks) for share in plan.shares)
    assert size == best, "as many as there can be"
    assert [rank for share in plan.shares for rank in share.ranks] == list(range(size))
    used = [share.node for share in plan.shares]
    assert len(set(used)) == len(used)
    if need.same:
        assert len({state.nodes[name].labels[need.same] for name in used}) == 1
    for share in plan.shares:
        assert len(share.ranks) <= room[share.node]
        types = {device.index: device.kind for device in state.nodes[share.node].devices}
        given_devices = [index for devices in share.devices for index in devices]
        assert len(given_devices) == len(set(given_devices)) == need.gpus * len(share.ranks)
        assert all(len({types[index] for index in devices}) <= 1 for devices in share.devices)
        assert not need.gpu_types or all(types[index] in need.gpu_types for index in given_devices)
    allowed = [domain for domain in domains(state, need) if sum(room[node.name] for node in domain) >= size]
    if need.spread:
        counts = sorted(len(share.ranks) for share in plan.shares)
        most = max(sum(room[node.name] > 0 for node in domain) for domain in allowed)
        assert len(used) == min(size, most) or need.same
        # Nobody has two more than a node that could take one.
        assert all(max(counts) - len(share.ranks) <= 1 or room[share.node] == len(share.ranks) for share in plan.shares)
        return
    fewest = min(
        next(n for n in range(1, len(domain) + 1) if sum(sorted((room[node.name] for node in domain), reverse=True)[:n]) >= size)
        for domain in allowed
    )
    if fewest == 1 and not need.same:
        assert len(used) == 1
        assert room[used[0]] == min(count for count in room.values() if count >= size), "the tightest"
    for label in ("rack", "zone"):
        if fewest > 1 and not need.same and any(_holds(state, room, label, value, size) for value in "rsxy"):
            assert len({state.nodes[name].labels.get(label) for name in used}) == 1
            break
    else:
        if not need.same:
            assert len(used) == fewest
        assert any(set(used) <= {node.name for node in domain} for domain in allowed)
    assert not any(sum(room[name] for name in some) >= size for n in range(1, len(used)) for some in combinations(sorted(used), n)), "none too many"


def _holds(state: State, room: dict[str, int], label: str, value: str, size: int) -> bool:
    return sum(room[name] for name, node in state.nodes.items() if node.labels.get(label) == value) >= size


@settings(max_examples=100, deadline=None)
@given(shapes, st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=10), needs)
def test_a_plan_does_not_depend_on_how_the_state_came_about(
    nodes: list[dict[str, object]], changes: list[tuple[int, bool]], need: Requirement
) -> None:
    state = state_of(nodes)
    straight = find_plan(state, "default", need)
    originals = dict(state.nodes)
    for number, gone in changes:
        name = f"node-{number}"
        if gone and name in state.nodes:
            state.remove("node", name)
        elif name in originals:
            state.put(originals[name])
    for name in sorted(originals, reverse=True):
        if name in state.nodes:
            state.remove("node", name)
        state.put(originals[name])
    assert find_plan(state, "default", need) == straight
