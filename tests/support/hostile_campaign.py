"""Hostile records on every topic that a service of ours reads: each is taken as valid or kept as a dead letter, and nobody falls over.

The broker says what was sent (by reading it back), the dead-letter topics what was refused, and the readers themselves how far they have come. Whether the right
ones were refused is judged by the readers' own pure functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx
from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError
from hostile import hostile_records, send_hostile_header
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.registry.core.projection import project
from opentinker.scheduler_stream.interpret import interpret
from opentinker.schemas.errors import InvalidMessage
from opentinker.schemas.records import InputRecord, header_text
from opentinker.schemas.topics import ADMIN, ALERTS, COMMANDS, EVENTS, LOGS, METRICS, REPLIES, REPORTS, REQUESTS, dead_letter_topic, topic_table
from secure_access import journal_positions

__all__ = ["TOPICS_UNDER_FIRE", "Outcome", "run_campaign", "totals"]

SCHEDULER_TOPICS, REGISTRY_TOPICS = (COMMANDS, REPORTS, ADMIN), (EVENTS, METRICS, LOGS, ALERTS)
TOPICS_UNDER_FIRE = (REQUESTS, *SCHEDULER_TOPICS, *REGISTRY_TOPICS)

Place = tuple[int, int]  # (partition, offset)
_IN_FLIGHT = 500
_READ_TIMEOUT_S = 480.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one topic's records. `wrong`: places at which the reader and its own judge disagree."""

    topic: str
    sent: int
    accepted: int
    dead: int
    wrong: tuple[Place, ...]


async def run_campaign(settings: KafkaSettings, http: dict[str, httpx.AsyncClient], *, count: int, seed: int) -> list[Outcome]:
    """`count` records on each topic, all at once. `settings`: of a super user; `http`: the running services."""
    starts = {topic: await _ends(settings, topic) for topic in (*TOPICS_UNDER_FIRE, *map(dead_letter_topic, TOPICS_UNDER_FIRE), REPLIES)}
    await asyncio.gather(*(_fire(settings, topic, count, seed) for topic in TOPICS_UNDER_FIRE))
    ends = {topic: await _ends(settings, topic) for topic in TOPICS_UNDER_FIRE}
    await _until(lambda: _scheduler_is_through(settings, ends), "the scheduler")
    await _until(lambda: _registry_is_through(settings, http["registry"], ends), "the registry")
    await _until(lambda: _ingress_is_through(settings, starts, ends), "the ingress")
    return [await _outcome(settings, topic, starts, ends[topic]) for topic in TOPICS_UNDER_FIRE]


async def _fire(settings: KafkaSettings, topic: str, count: int, seed: int) -> None:
    partitions = topic_table(settings.partitions)[topic][0]
    sender = AIOKafkaProducer(**kafka.client_options(settings), acks=1, linger_ms=5, max_request_size=2**21)
    await sender.start()
    waiting: set[asyncio.Future[object]] = set()
    try:
        for record in hostile_records(seed, topic, count, partitions):
            with contextlib.suppress(MessageSizeTooLargeError):  # our own client refuses it: nothing was sent
                waiting.add(await sender.send(topic, record.value, record.key, partition=record.partition, headers=list(record.headers)))
            if len(waiting) >= _IN_FLIGHT:
                await asyncio.gather(*waiting, return_exceptions=True)
                waiting.clear()
        await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        await sender.stop()
    for number in range(3):
        await send_hostile_header(settings, topic, number % partitions)


async def _ends(settings: KafkaSettings, topic: str) -> dict[int, int]:
    return await kafka.end_offsets(settings, topic, range(topic_table(settings.partitions)[topic][0]))


async def _read(settings: KafkaSettings, topic: str, starts: dict[int, int], ends: dict[int, int]) -> list[InputRecord]:
    parts = [await kafka.read_range(settings, topic, partition, starts[partition], end) for partition, end in ends.items() if end > starts[partition]]
    return [record for part in parts for record in part]


async def _until(through: Callable[[], Awaitable[bool]], who: str) -> None:
    deadline = time.monotonic() + _READ_TIMEOUT_S
    while not await through():
        assert time.monotonic() < deadline, f"{who} has not read everything within {_READ_TIMEOUT_S:.0f} s"
        await asyncio.sleep(1)


async def _scheduler_is_through(settings: KafkaSettings, ends: dict[str, dict[int, int]]) -> bool:
    positions = await journal_positions(settings)
    return all(positions.get((topic, partition), -1) >= end - 1 for topic in SCHEDULER_TOPICS for partition, end in ends[topic].items() if end)


async def _registry_is_through(settings: KafkaSettings, http: httpx.AsyncClient, ends: dict[str, dict[int, int]]) -> bool:
    """Its own count of what it has projected, which began with the topics."""
    page = (await http.get("/metrics")).text
    counts = {topic: float(value) for topic, value in re.findall(r'opentinker_registry_projected_total\{topic="([^"]+)"\} (\S+)', page)}
    return all(counts.get(topic, 0) >= sum(ends[topic].values()) for topic in REGISTRY_TOPICS)


async def _ingress_is_through(settings: KafkaSettings, starts: dict[str, dict[int, int]], ends: dict[str, dict[int, int]]) -> bool:
    sent = {(partition, offset) for partition, end in ends[REQUESTS].items() for offset in range(starts[REQUESTS][partition], end)}
    return sent <= await _answered(settings, starts[REPLIES])


async def _answered(settings: KafkaSettings, starts: dict[int, int]) -> set[Place]:
    """Which requests have their answer; its id names their place."""
    replies = await _read(settings, REPLIES, starts, await _ends(settings, REPLIES))
    named = [(header_text(record.headers, "ce_id") or "").rsplit(":", 2) for record in replies]
    return {(int(partition), int(offset)) for _, partition, offset in named}


async def _outcome(settings: KafkaSettings, topic: str, starts: dict[str, dict[int, int]], ends: dict[int, int]) -> Outcome:
    records = {(record.partition, record.offset): record for record in await _read(settings, topic, starts[topic], ends)}
    letters = await _read(settings, dead_letter_topic(topic), starts[dead_letter_topic(topic)], await _ends(settings, dead_letter_topic(topic)))
    dead = {_original(letter) for letter in letters} & records.keys()
    judged = {place for place, record in records.items() if _is_unreadable(topic, record, settings.partitions)}
    # What PostgreSQL refuses, and whom the ingress lets in, is not for a pure function to know: there the judge says the least that is refused.
    wrong = dead ^ judged if topic in SCHEDULER_TOPICS else judged - dead
    return Outcome(topic=topic, sent=len(records), accepted=len(records) - len(dead), dead=len(dead), wrong=tuple(sorted(wrong)))


def _original(letter: InputRecord) -> Place:
    said = dict(letter.headers)
    return int(said["ot-original-partition"] or b"-1"), int(said["ot-original-offset"] or b"-1")


def _is_unreadable(topic: str, record: InputRecord, partitions: int) -> bool:
    if topic in SCHEDULER_TOPICS:
        return bool(interpret(record, partitions).letters)
    if topic == REQUESTS:
        return record.value is None or _header(record, "ce_type") is None
    try:
        project(record)
    except InvalidMessage:
        return True
    return False


def _header(record: InputRecord, name: str) -> str | None:
    with contextlib.suppress(InvalidMessage):
        return header_text(record.headers, name)
    return None


def totals(outcomes: Sequence[Outcome]) -> tuple[int, int, int]:
    """(sent, accepted, dead) of all topics."""
    return sum(o.sent for o in outcomes), sum(o.accepted for o in outcomes), sum(o.dead for o in outcomes)
