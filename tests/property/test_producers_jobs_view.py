"""The view of jobs under any order of news: it always shows the newest revision, and its indexes agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentinker.producers.core import jobs_view
from opentinker.producers.core.jobs_view import JobsView
from opentinker.schemas.messages import JobPhase, JobStatus

UIDS = [f"00000000-0000-4000-8000-{number:012d}" for number in range(6)]


def status(uid: int, revision: int, phase: JobPhase, submitted_ms: int) -> JobStatus:
    return JobStatus.model_construct(
        job_uid=UIDS[uid], namespace=f"ns-{uid % 2}", name=f"job-{uid % 3}", pool="p", revision=revision, phase=phase, spec={}, spec_digest="",
        replicas=1, submitted_ms=submitted_ms, updated_ms=0,
    )  # fmt: skip


NEWS = st.tuples(st.integers(0, 5), st.integers(0, 8), st.sampled_from(JobPhase), st.integers(0, 3), st.booleans())


@given(st.lists(NEWS, max_size=60), st.integers(1, 4))
def test_any_order_of_news_gives_the_newest_and_consistent_indexes(news: list[tuple[int, int, JobPhase, int, bool]], limit: int) -> None:
    view, newest = JobsView(), dict[str, JobStatus]()
    for uid, revision, phase, submitted, forget in news:
        if forget:
            view.remove(UIDS[uid])
            newest.pop(UIDS[uid], None)
            continue
        item = status(uid, revision, phase, submitted)
        known = newest.get(item.job_uid)
        news_to_us = known is None or known.revision < revision
        assert view.apply(item) is news_to_us
        if news_to_us:
            newest[item.job_uid] = item
    assert len(view) == len(newest)
    assert {uid: view.get(uid) for uid in newest} == newest
    ordered = sorted(newest.values(), key=lambda item: (item.submitted_ms, item.job_uid), reverse=True)
    assert _all_pages(view, limit) == ordered
    assert view.page(namespace="ns-1", limit=500).items == [item for item in ordered if item.namespace == "ns-1"]
    assert view.page(phases=[JobPhase.RUNNING], limit=500).items == [item for item in ordered if item.phase is JobPhase.RUNNING]
    for item in ordered:
        namesakes = [other for other in ordered if (other.namespace, other.name) == (item.namespace, item.name)]
        assert view.named(item.namespace, item.name) == namesakes[0]
        live = [other for other in namesakes if not other.phase.terminal]
        known_name = view.known_name(item.namespace, item.name)
        assert known_name is not None
        assert known_name.job_uid == (live or namesakes)[0].job_uid
    assert {phase: count for phase, count in view.phases.items() if count} == {
        phase: sum(1 for item in ordered if item.phase is phase) for phase in {item.phase for item in ordered}
    }


def _all_pages(view: JobsView, limit: int) -> list[JobStatus]:
    found, cursor = [], None
    while True:
        page = view.page(cursor=cursor, limit=limit)
        found += page.items
        assert len(page.items) <= limit
        if page.cursor is None:
            return found
        cursor = page.cursor


def test_only_so_many_finished_jobs_are_kept() -> None:
    before, jobs_view._TERMINAL_KEPT = jobs_view._TERMINAL_KEPT, 2
    try:
        view = JobsView()
        for uid in range(5):
            view.apply(status(uid, 1, JobPhase.COMPLETED, uid))
        view.apply(status(5, 1, JobPhase.RUNNING, 0))
        assert [item.job_uid for item in view.page().items] == [UIDS[4], UIDS[3], UIDS[5]]
    finally:
        jobs_view._TERMINAL_KEPT = before
