"""All jobs as `jobs.status` tells them: by uid, by name, and newest first by page. One writer; readers get values.

Rules: a status applies only if it is newer than what is known, by revision, then by broker time (progress rises within one revision), so replays and
late copies change nothing. A provisional entry (revision 0)
stands for a submission that Kafka has taken and the scheduler has not told of yet.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from opentinker.schemas.errors import FieldError, InvalidMessage
from opentinker.schemas.messages import JobPhase, JobStatus, SubmitJob

from .submission import Known

__all__ = ["JobsView", "Page", "provisional_status"]

_TERMINAL_KEPT = 100_000  # newest finished jobs in memory, about 3 kB each; older ones are in the registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    items: list[JobStatus]
    cursor: str | None  # None: the last page


def provisional_status(command: SubmitJob, now_ms: int) -> JobStatus:
    """What is said of a job between Kafka's ack and the scheduler's first word."""
    return JobStatus.model_construct(
        job_uid=command.job_uid,
        namespace=command.namespace,
        name=command.name,
        pool=command.pool,
        revision=0,
        phase=JobPhase.PENDING,
        reason="Submitted",
        message="accepted; the scheduler has not looked at it yet",
        labels=command.labels,
        spec=command.spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
        spec_digest=command.spec_digest,
        submitted_by=command.submitted_by,
        replicas=command.spec.replicas,
        submitted_ms=now_ms,
        updated_ms=now_ms,
    )


class JobsView:
    """Mutable, with indexes; not for more than one writer."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobStatus] = {}
        self._by_name: dict[tuple[str, str], list[tuple[int, str]]] = {}
        self._order: list[tuple[int, str]] = []  # (submitted_ms, uid), rising
        self._finished: list[tuple[int, str]] = []
        self._phases: dict[JobPhase, int] = dict.fromkeys(JobPhase, 0)
        self._waiting: Counter[tuple[str, str]] = Counter()  # (pool, namespace) → pending jobs

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def phases(self) -> dict[JobPhase, int]:
        """How many jobs are in each phase."""
        return dict(self._phases)

    def waiting(self, pool: str, namespace: str) -> int:
        """How many jobs of the namespace wait in the pool."""
        return self._waiting[pool, namespace]

    def apply(self, status: JobStatus) -> bool:
        """Take a status in; returns whether it was news."""
        known = self._jobs.get(status.job_uid)
        if known is not None and (known.revision, known.updated_ms) >= (status.revision, status.updated_ms):
            return False
        if known is not None:
            self.remove(status.job_uid)
        self._jobs[status.job_uid] = status
        self._phases[status.phase] += 1
        if status.phase is JobPhase.PENDING:
            self._waiting[status.pool, status.namespace] += 1
        place = (status.submitted_ms, status.job_uid)
        insort(self._order, place)
        insort(self._by_name.setdefault((status.namespace, status.name), []), place)
        if status.phase.terminal:
            insort(self._finished, place)
            if len(self._finished) > _TERMINAL_KEPT:
                self.remove(self._finished[0][1])
        return True

    def remove(self, job_uid: str) -> None:
        """Forget a job: a tombstone, a submission that did not reach Kafka, or the oldest of too many."""
        status = self._jobs.pop(job_uid, None)
        if status is None:
            return
        self._phases[status.phase] -= 1
        if status.phase is JobPhase.PENDING:
            self._waiting[status.pool, status.namespace] -= 1
            if not self._waiting[status.pool, status.namespace]:
                del self._waiting[status.pool, status.namespace]
        place = (status.submitted_ms, job_uid)
        _take_out(self._order, place)
        if status.phase.terminal:
            _take_out(self._finished, place)
        names = self._by_name[(status.namespace, status.name)]
        _take_out(names, place)
        if not names:
            del self._by_name[(status.namespace, status.name)]

    def get(self, job_uid: str) -> JobStatus | None:
        return self._jobs.get(job_uid)

    def beginning(self, text: str, limit: int) -> list[JobStatus]:
        """Jobs whose uid begins so, newest first."""
        places = (uid for _, uid in reversed(self._order) if uid.startswith(text))
        return [self._jobs[uid] for uid in islice(places, limit)]

    def named(self, namespace: str, name: str) -> JobStatus | None:
        """The newest job of that name."""
        found = self._by_name.get((namespace, name))
        return self._jobs[found[-1][1]] if found else None

    def known(self, job_uid: str) -> Known | None:
        return _known(self.get(job_uid))

    def known_name(self, namespace: str, name: str) -> Known | None:
        """A live job of that name if there is one, else the newest."""
        places = self._by_name.get((namespace, name), [])
        live = next((self._jobs[uid] for _, uid in reversed(places) if not self._jobs[uid].phase.terminal), None)
        return _known(live or self.named(namespace, name))

    def page(self, *, phases: Collection[JobPhase] = (), namespace: str | None = None, cursor: str | None = None, limit: int = 100) -> Page:
        """Jobs that match, newest first. `cursor`: that of the page before. Raises InvalidMessage for a cursor that is none."""
        end = len(self._order) if cursor is None else bisect_left(self._order, _place(cursor))
        items: list[JobStatus] = []
        for status in self._before(end):
            if (phases and status.phase not in phases) or (namespace is not None and status.namespace != namespace):
                continue
            if len(items) == limit:  # there is one more
                return Page(items=items, cursor=_cursor(items[-1]))
            items.append(status)
        return Page(items=items, cursor=None)

    def _before(self, end: int) -> Iterator[JobStatus]:
        for position in range(end - 1, -1, -1):
            yield self._jobs[self._order[position][1]]


def _known(status: JobStatus | None) -> Known | None:
    if status is None:
        return None
    return Known(job_uid=status.job_uid, spec_digest=status.spec_digest, terminal=status.phase.terminal)


def _take_out(places: list[tuple[int, str]], place: tuple[int, str]) -> None:
    position = bisect_left(places, place)
    assert places[position] == place, "an index lost a job"
    del places[position]


def _cursor(status: JobStatus) -> str:
    return base64.urlsafe_b64encode(f"{status.submitted_ms}/{status.job_uid}".encode()).decode()


def _place(cursor: str) -> tuple[int, str]:
    try:
        moment, _, uid = base64.urlsafe_b64decode(cursor.encode()).decode().partition("/")
        return int(moment), uid
    except (binascii.Error, ValueError):
        raise InvalidMessage([FieldError(field="cursor", message="is not a cursor of this API", remedy="leave it out to start anew")]) from None
