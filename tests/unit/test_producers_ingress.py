"""The ingress's handler with Kafka played: what one record may never do to the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest
from aiokafka import AIOKafkaProducer
from bad_manifests import good_manifest
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.producers.core.requests import Authority, Decision
from opentinker.producers.ingress import handler as subject
from opentinker.producers.limits import QueueLimits
from opentinker.producers.live import LiveFeed
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import ALERTS, COMMANDS, REPLIES, REQUESTS, dead_letter_topic


class Kafka:
    """Acks at once, and remembers."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []

    async def send(self, topic: str, value: bytes, **_: Any) -> asyncio.Future[None]:
        self.sent.append((topic, value))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def request(offset: int) -> InputRecord:
    headers = {"ce_id": str(offset), "ce_type": "io.opentinker.SubmitTrainingJob.v1", "ce_source": "there", "content-type": "application/json"}
    value = json.dumps(good_manifest(f"job-{offset}")).encode()
    said = tuple((name, text.encode()) for name, text in headers.items())
    return InputRecord(topic=REQUESTS, partition=0, offset=offset, append_time_ms=0, key=None, value=value, headers=said)


def cancellation(offset: int, append_time_ms: int) -> InputRecord:
    headers = {"ce_id": str(offset), "ce_type": "io.opentinker.CancelTrainingJob.v1", "ce_source": "there", "content-type": "application/json"}
    value = json.dumps({"job_uid": f"00000000-0000-0000-0000-{offset:012}"}).encode()
    said = tuple((name, text.encode()) for name, text in headers.items())
    return InputRecord(topic=REQUESTS, partition=0, offset=offset, append_time_ms=append_time_ms, key=None, value=value, headers=said)


def limits(queued_max: int | None = None) -> QueueLimits:
    """As the replica might have said."""
    made = QueueLimits(httpx.AsyncClient(), "http://127.0.0.1:1", "key")
    made._usual = queued_max
    return made


def test_what_a_full_queue_has_no_room_for_is_answered_and_not_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may wait: of four requests in one batch two are forwarded, and two are told why not; the first one again is still the same job."""

    async def run() -> list[tuple[str, bytes]]:
        kafka = Kafka()
        handler = subject.RequestHandler(
            partitions=4,
            authority=Authority(keys={}, trusted_namespaces=frozenset({"default"})),
            environments=frozenset({"CartPole-v1"}),
            feed=LiveFeed(KafkaSettings(), "test", tails=False),
            limits=limits(2),
            producer=cast("AIOKafkaProducer", kafka),
        )
        await handler.handle([request(number) for number in (0, 1, 2, 3)])
        await handler.handle([request(0)])
        return kafka.sent

    monkeypatch.setattr(subject, "_now_ms", lambda: 0)
    sent = asyncio.run(run())
    assert [topic for topic, _ in sent] == [COMMANDS] * 2 + [REPLIES] * 4 + [COMMANDS, REPLIES]
    for _, value in sent[4:6]:
        assert "default has 2 jobs waiting in pool default and may have 2" in json.loads(value)["errors"][0]["message"]


def test_a_cancellation_of_an_unknown_job_waits_for_it_only_while_it_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a tenant that cancels thousands of jobs which do not exist would hold up everybody else for a second each hundred."""
    waits: list[float] = []

    class Feed(LiveFeed):
        async def wait_for(self, known: Any, timeout_s: float) -> bool:
            waits.append(timeout_s)
            return bool(known())

    async def run() -> list[tuple[str, bytes]]:
        kafka = Kafka()
        authority = Authority(keys={}, trusted_namespaces=frozenset({"default"}))
        handler = subject.RequestHandler(
            partitions=4,
            authority=authority,
            environments=frozenset(),
            feed=Feed(KafkaSettings(), "test", tails=False),
            limits=limits(),
            producer=cast("AIOKafkaProducer", kafka),
        )
        await handler.handle([cancellation(0, 100_000), cancellation(1, 99_600), cancellation(2, 98_000), cancellation(3, 200_000)])
        return kafka.sent

    monkeypatch.setattr(subject, "_now_ms", lambda: 100_000)
    sent = asyncio.run(run())
    assert waits == pytest.approx([1.0, 0.6, 0.0, 1.0])
    assert [topic for topic, _ in sent] == [REPLIES] * 4
    assert all(b"there is no job" in value for _, value in sent)


def test_a_record_that_breaks_the_judge_is_answered_and_kept_and_the_next_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = subject.decide

    def broken(record: InputRecord, **more: Any) -> Decision:
        if record.offset == 0:
            raise ValueError("Maximum serialization depth exceeded")
        return judge(record, **(more | {"now_ms": 0}))

    async def run() -> list[tuple[str, bytes]]:
        kafka = Kafka()
        feed = LiveFeed(KafkaSettings(), "test", tails=False)
        authority = Authority(keys={}, trusted_namespaces=frozenset({"default"}))
        handler = subject.RequestHandler(
            partitions=4,
            authority=authority,
            environments=frozenset({"CartPole-v1"}),
            feed=feed,
            limits=limits(),
            producer=cast("AIOKafkaProducer", kafka),
        )
        await handler.handle([request(0), request(1)])
        return kafka.sent

    monkeypatch.setattr(subject, "decide", broken)
    sent = asyncio.run(run())
    assert [topic for topic, _ in sent] == [COMMANDS, REPLIES, dead_letter_topic(REQUESTS), ALERTS, REPLIES]
    assert b"could not be judged" in sent[1][1]
