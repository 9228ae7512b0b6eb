"""Whose turn it is among the namespaces of a pool, and how much each may have. Pure functions of the state.

A namespace may have what is nominally its own, and above it what it may borrow; others may have what it lends and does not use. Among those that wait, one that
would use only its own comes first; then the one whose share would be the smallest. A share is the largest part that it has of any resource (dominant resource
fairness, Ghodsi et al., NSDI 2011), its next gang counted in, divided by its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opentinker.schemas.quantities import format_bytes, format_cpu

from .entities import Amounts, Limits, NamespaceLimits, Requirement
from .state import State, limits_id

__all__ = ["Shortage", "limits_of", "most_replicas", "precedence"]

_PPM = 1_000_000
_NOTHING = Limits(gpus=0, cpu_millis=0, memory_bytes=0)
Shortage = str  # which limit holds a gang back, in words


def limits_of(state: State, pool: str, namespace: str) -> NamespaceLimits:
    """What is set for the namespace, or what holds where nothing is."""
    return state.limits.get(limits_id(pool, namespace)) or NamespaceLimits(pool=pool, namespace=namespace)


def precedence(state: State, pool: str, namespace: str, needs: Requirement) -> tuple[bool, int]:
    """The lower, the sooner: whether it would have more than its own, and its share in parts of a million, both with the gang at its smallest."""
    limits = limits_of(state, pool, namespace)
    wanted, capacity = state.used(pool, namespace) + needs.each * needs.at_least, state.capacity(pool)
    share = max((resource.of(wanted) * _PPM // whole for resource in _RESOURCES if (whole := resource.of(capacity)) > 0), default=0)
    return _exceeds(wanted, limits.nominal or _NOTHING), share * 1000 // max(1, limits.weight_milli)


def most_replicas(state: State, pool: str, namespace: str, needs: Requirement) -> tuple[int, Shortage]:
    """How many replicas of the gang the namespace may have now, at most as many as are wanted; and what allows no more."""
    limits = limits_of(state, pool, namespace)
    if limits.running_max is not None and state.placed.get((pool, namespace), 0) >= limits.running_max:
        return 0, f"namespace {namespace} may have {limits.running_max} jobs running at once"
    used, spare = state.used(pool, namespace), _spare(state, pool, namespace)
    most, shortage = needs.replicas, ""
    for resource in _RESOURCES:
        each = resource.of(needs.each)
        if not each:
            continue
        own, above = resource.limit(limits.nominal), resource.limit(limits.borrowing)
        if own is not None and above is not None and (fits := (own + above - resource.of(used)) // each) < most:
            most, shortage = (
                max(0, fits),
                f"namespace {namespace} has {resource.say(resource.of(used))} of {resource.say(own + above)} that it may have",
            )
        if spare is not None and (fits := resource.of(spare) // each) < most:
            most, shortage = max(0, fits), f"{resource.say(resource.of(spare))} of pool {pool} are not kept for namespaces that do not lend them"
    return most, shortage


def _spare(state: State, pool: str, namespace: str) -> Amounts | None:
    """What nobody uses and nobody else keeps for itself; None: nobody keeps anything."""
    keepers = [
        each for each in state.limits.values() if each.pool == pool and each.namespace != namespace and each.nominal and each.lending != Limits()
    ]
    if not keepers:
        return None
    spare = state.capacity(pool)
    for used in state.users(pool).values():
        spare -= used
    for keeper in keepers:
        used = state.used(pool, keeper.namespace)
        kept = [
            max(0, (resource.limit(keeper.nominal) or 0) - lent - resource.of(used)) if (lent := resource.limit(keeper.lending)) is not None else 0
            for resource in _RESOURCES
        ]
        spare -= Amounts(*kept)
    return spare


@dataclass(frozen=True, slots=True)
class _Resource:
    """One field of amounts and limits, and how it is said."""

    field: str
    say: Callable[[int], str]

    def of(self, amounts: Amounts) -> int:
        found: int = getattr(amounts, self.field)
        return found

    def limit(self, limits: Limits | None) -> int | None:
        return None if limits is None else getattr(limits, self.field)


_RESOURCES = (
    _Resource("gpus", lambda count: f"{count} GPUs"),
    _Resource("cpu_millis", format_cpu),
    _Resource("memory_bytes", lambda amount: f"{format_bytes(amount)} of memory"),
)


def _exceeds(amounts: Amounts, limits: Limits) -> bool:
    return any((limit := resource.limit(limits)) is not None and resource.of(amounts) > limit for resource in _RESOURCES)
