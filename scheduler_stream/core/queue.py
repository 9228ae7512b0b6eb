"""Who waits in a pool: one line a namespace, in the order in which its jobs have their turn.

Jobs of a line that need the same are one class: they fit, or do not fit, together, and only their first is looked at. A class that is known not to fit steps aside
until capacity is freed. The work of one look is bounded, however many classes there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice

from opentinker.schemas.messages.jobs import UnschedulableReason

from .entities import Requirement

__all__ = ["Class", "Queue", "Turn"]

Turn = tuple[int, int, str]  # when it has its turn (lower is sooner), number of its submission, uid
Class = tuple[str, Requirement]  # namespace, what its jobs need
_RETURNING_MAX = 64  # classes that step back into their line at one look


class _Line:
    """One namespace's. `ready`: the first of every class that may be looked at; an entry may be out of date. `aside`, `returning`: classes, first come first."""

    __slots__ = ("aside", "classes", "ready", "returning")

    def __init__(self) -> None:
        self.classes: dict[Requirement, list[Turn]] = {}
        self.ready: list[tuple[int, int, Requirement]] = []
        self.aside: dict[Requirement, None] = {}
        self.returning: dict[Requirement, None] = {}

    def step_up(self, needs: Requirement) -> None:
        heapq.heappush(self.ready, (*self.classes[needs][0][:2], needs))

    def let_back(self) -> None:
        for needs in list(islice(self.returning, _RETURNING_MAX)):
            del self.returning[needs]
            if needs in self.classes:
                self.step_up(needs)


class Queue:
    """Pending jobs of one pool.

    `blocked`: what is known not to fit until capacity is freed, and why. `withheld`: classes whose namespace may have no more at present. `told`: the
    reason that a class's jobs show, or are about to. `untold`: jobs of a class that may show another one, the one whose turn is next last.
    """

    __slots__ = ("_lines", "blocked", "told", "untold", "withheld")

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self.blocked: dict[Requirement, UnschedulableReason] = {}
        self.withheld: set[Class] = set()
        self.told: dict[Class, UnschedulableReason] = {}
        self.untold: dict[Class, list[str]] = {}

    def add(self, namespace: str, needs: Requirement, turn: Turn) -> None:
        line = self._lines.get(namespace) or self._lines.setdefault(namespace, _Line())
        waiting = line.classes.setdefault(needs, [])
        heapq.heappush(waiting, turn)
        if waiting[0] is turn and needs not in line.aside and needs not in line.returning:
            line.step_up(needs)
        self.untold.setdefault((namespace, needs), []).append(turn[2])

    def namespaces(self) -> list[str]:
        """Those that have jobs waiting, by name."""
        return sorted(self._lines)

    def first(self, namespace: str, waits: Callable[[str], bool]) -> tuple[Turn, Requirement] | None:
        """Whose turn it is in a line: the first job that waits and is not known to be in vain; with what it needs."""
        line = self._lines.get(namespace)
        if line is None:
            return None
        line.let_back()
        while line.ready:
            when, order, needs = line.ready[0]
            waiting = line.classes.get(needs)
            if waiting is None or waiting[0][:2] != (when, order):
                heapq.heappop(line.ready)  # another entry stands for the class, or it is gone
            elif not waits(waiting[0][2]):
                heapq.heappop(line.ready)
                heapq.heappop(waiting)
                self._go_on(namespace, line, needs)
            elif needs in self.blocked or (namespace, needs) in self.withheld:
                heapq.heappop(line.ready)
                line.aside[needs] = None
            else:
                return waiting[0], needs
        if not line.classes:
            del self._lines[namespace]
        return None

    def _go_on(self, namespace: str, line: _Line, needs: Requirement) -> None:
        """The class's first is gone: the next one steps up, or nobody needs that any more."""
        if line.classes[needs]:
            line.step_up(needs)
            return
        del line.classes[needs]
        self.told.pop((namespace, needs), None)
        self.untold.pop((namespace, needs), None)

    def block(self, needs: Requirement, reason: UnschedulableReason) -> None:
        """That does not fit, for whoever needs it."""
        self.blocked[needs] = reason
        for namespace, line in self._lines.items():
            if needs in line.classes:
                self._tell(namespace, needs)

    def withhold(self, namespace: str, needs: Requirement) -> None:
        """The namespace may not have that at present."""
        self.withheld.add((namespace, needs))
        self._tell(namespace, needs)

    def _tell(self, namespace: str, needs: Requirement) -> None:
        reason = self.reason_of((namespace, needs))
        if reason is not None and self.told.get((namespace, needs)) is not reason:
            self.told[namespace, needs] = reason
            self.untold[namespace, needs] = [uid for _, _, uid in sorted(self._lines[namespace].classes[needs], reverse=True)]

    def reason_of(self, class_: Class) -> UnschedulableReason | None:
        """Why the class waits, as far as it is known: that it would not fit even if nobody held anything goes before that its namespace has too much."""
        blocked = self.blocked.get(class_[1])
        if class_ in self.withheld and blocked in (None, UnschedulableReason.INSUFFICIENT_CAPACITY):
            return UnschedulableReason.QUOTA_EXCEEDED
        return blocked

    def freed(self) -> None:
        """Something that was in vain may not be any more."""
        self.blocked.clear()
        self.withheld.clear()
        for line in self._lines.values():
            if line.aside:
                line.returning.update(line.aside)
                line.aside = {}
