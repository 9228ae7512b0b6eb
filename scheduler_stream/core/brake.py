"""The brake: no mass eviction and no mass stop without a person.

Many nodes that fall silent at once, or many attempts that nobody knows, are more likely a broken network, a wrong restore or a defect of ours than so many real
losses. Beyond a share and a count within half a minute, evictions and stops freeze and an alert goes out; placement on healthy nodes goes on. The brake lets go
when enough nodes are back, or when an administrator says that it is real.
"""

from __future__ import annotations

from dataclasses import replace

from opentinker.schemas.messages import alerts

from .effects import Effects
from .entities import Brake, Node
from .policy import (
    BRAKE_ATTEMPTS_SHARE_PERCENT,
    BRAKE_COUNT_MIN,
    BRAKE_KEPT_MAX,
    BRAKE_NODES_SHARE_PERCENT,
    BRAKE_WINDOW_MS,
)

__all__ = ["acknowledge", "may_evict", "may_stop_unknown", "node_returned"]


def may_evict(effects: Effects, pool: str, node_name: str) -> bool:
    """Note that a node fell silent; whether what it held may be given up."""
    brake = _brake(effects, pool)
    seen = _note(brake.silent, node_name, effects.now)
    brake = replace(brake, silent=seen)
    known = len(_expected(effects, pool))
    if not brake.engaged and effects.now >= brake.acknowledged_until and _beyond(len(seen), known, BRAKE_NODES_SHARE_PERCENT):
        reason = f"{len(seen)} of {known} nodes fell silent within {BRAKE_WINDOW_MS // 1000} s"
        brake = _engage(effects, brake, reason)
    effects.state.put(brake)
    return not brake.engaged


def may_stop_unknown(effects: Effects, pool: str, job_uid: str) -> bool:
    """Note that an agent runs what this state does not have; whether it may be stopped."""
    brake = _brake(effects, pool)
    seen = _note(brake.unknown, job_uid, effects.now)
    brake = replace(brake, unknown=seen)
    live = sum(1 for attempt in effects.state.attempts.values() if attempt.pool == pool)
    if not brake.engaged and effects.now >= brake.acknowledged_until and _beyond(len(seen), live, BRAKE_ATTEMPTS_SHARE_PERCENT):
        reason = f"{len(seen)} attempts run that the scheduler does not know, beside {live} that it does"
        brake = _engage(effects, brake, reason)
    effects.state.put(brake)
    return not brake.engaged


def node_returned(effects: Effects, pool: str, node_name: str) -> None:
    """A silent node is heard of again: with enough of them back, the brake lets go and the rest is given up as usual."""
    brake = effects.state.brakes.get(pool)
    if brake is None:
        return
    silent = tuple(item for item in brake.silent if item[0] != node_name)
    brake = replace(brake, silent=silent)
    effects.state.put(brake)
    expected = _expected(effects, pool)
    still = sum(not node.alive for node in expected)
    recovered = not _beyond(still, len(expected), BRAKE_NODES_SHARE_PERCENT)
    if brake.engaged and not brake.unknown and recovered:
        _release(effects, brake, "enough nodes are back", spare_the_rest=True)


def acknowledge(effects: Effects, pool: str, requested_by: str) -> None:
    """An administrator says that the losses are real."""
    brake = effects.state.brakes.get(pool)
    if brake is not None and brake.engaged:
        _release(effects, brake, f"acknowledged by {requested_by}", spare_the_rest=False)


def _engage(effects: Effects, brake: Brake, reason: str) -> Brake:
    message = alerts.BrakeEngaged(
        pool=brake.pool,
        reason=f"{reason}; evictions and stops are held back until they are back or AcknowledgeBrake",
        nodes=tuple(name for name, _ in brake.silent),
        attempts=tuple(uid for uid, _ in brake.unknown),
        time_ms=effects.broker_ms,
    )
    effects.alert(brake.pool, message)
    return replace(brake, engaged=True, reason=reason)


def _release(effects: Effects, brake: Brake, reason: str, *, spare_the_rest: bool) -> None:
    """Let go: silent nodes are due again, after one more lease if others have just come back. For one window nothing engages the brake anew."""
    effects.alert(brake.pool, alerts.BrakeReleased(pool=brake.pool, reason=reason, time_ms=effects.broker_ms))
    effects.state.put(replace(brake, engaged=False, reason="", silent=(), unknown=(), acknowledged_until=effects.now + BRAKE_WINDOW_MS))
    for name in sorted(effects.state.pools.get(brake.pool, ())):
        node = effects.state.nodes[name]
        if not node.alive:
            effects.state.timer(effects.now + (node.lease_timeout_ms if spare_the_rest else 0), "lease", name)


def _expected(effects: Effects, pool: str) -> list[Node]:
    """The pool's nodes but for those that were told to end: their silence is no sign of anything."""
    return [node for name in effects.state.pools.get(pool, ()) if not (node := effects.state.nodes[name]).stopping]


def _beyond(count: int, total: int, share_percent: int) -> bool:
    return count >= BRAKE_COUNT_MIN and count * 100 > total * share_percent


def _note(seen: tuple[tuple[str, int], ...], key: str, now: int) -> tuple[tuple[str, int], ...]:
    """Keep what happened within the window, each key once, bounded."""
    kept = tuple(item for item in seen if item[0] != key and now - item[1] < BRAKE_WINDOW_MS)
    return (*kept, (key, now))[-BRAKE_KEPT_MAX:]


def _brake(effects: Effects, pool: str) -> Brake:
    return effects.state.brakes.get(pool) or Brake(pool=pool)
