"""Watches one worker: what makes no headway is told, counted, and ended, so that another worker takes over and a supervisor starts this one anew.

Four things can stand still while nothing fails: a takeover, the delivery of inputs, the partition's own ticks, and membership of the group. Slow is not
stuck: whatever moves is left alone, however far behind it is. A fifth, the event loop itself, is watched by a thread that needs no loop (`guard_loop`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from opentinker.compose.runtime import kafka, metrics
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.access import SCHEDULER_GROUP
from opentinker.schemas.messages.alerts import InputHeldUp, SchedulerStuck
from opentinker.schemas.records import encode, header_text
from opentinker.schemas.topics import ALERTS, INPUT_TOPICS, REPORTS

from .cycle import PartitionCycle, close_bounded
from .errors import StuckError
from .held import Held, Holds
from .interpret import SOURCE

__all__ = ["Observation", "Stuck", "Watch", "Watchdog", "end_within", "guard_loop"]

# Ticks come every second. Above the 60 s that a broker of ours lets a stranger's transaction stay open, and the 10 s until it looks: readers wait that long.
STUCK_S = 90.0
RECOVERY_S = 120.0  # without any headway: reading one part of a journal is bounded at 60 s
MEMBERSHIP_S = 30.0  # five session timeouts without being seen in the group
LOOP_S = 60.0  # the event loop has not come round
HELD_S = 10.0  # a transaction of somebody that is open for longer is an event; most last some milliseconds
OBSERVE_S = 5.0
ANSWER_S = 4.0  # what the broker does not answer in this time is not known; only what is known ends a worker
ALERT_S = 2.0

LAG = metrics.gauge("scheduler_input_lag", "Records of the input topics that are not stepped yet", ("topic", "partition"))
HELD = metrics.gauge("scheduler_input_held_records", "Records of the input topics behind an open transaction of somebody", ("topic", "partition"))
STUCK = metrics.counter("scheduler_stuck_total", "Times that this worker ended because something made no headway", ("what",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One partition at one moment. `ends`: offset behind the last record of each topic, where it is known. `through`: the last one stepped."""

    ready: bool
    progressed_at: float
    own_tick_at: float
    ends: Mapping[str, int]
    through: Mapping[str, int]

    def lag(self, topic: str) -> int:
        return max(0, self.ends.get(topic, 0) - 1 - self.through.get(topic, -1))


@dataclass(frozen=True, slots=True)
class Stuck:
    kind: str  # label of the counter
    what: str
    for_s: float
    partition: int | None = None
    topic: str | None = None


@dataclass(slots=True)
class Watch:
    """What stands still, and since when. Pure: time is an argument."""

    unmoved: dict[tuple[int, str], tuple[int, float]] = field(
        default_factory=dict
    )  # (partition, topic) → (through, since when with something to read)
    absent_since: float | None = None

    def partition(self, partition: int, seen: Observation, now: float) -> Stuck | None:
        """The first thing that makes no headway in a partition."""
        if not seen.ready:
            still = now - seen.progressed_at
            return Stuck("recovery", "the takeover makes no headway", still, partition) if still > RECOVERY_S else None
        for topic in INPUT_TOPICS:
            if (stuck := self._delivery(partition, topic, seen, now)) is not None:
                return stuck
        silent = now - seen.own_tick_at
        if silent > STUCK_S and REPORTS in seen.ends and seen.lag(REPORTS) == 0:
            return Stuck("tick", "none of its own ticks comes back, though all that stands in the topic is read", silent, partition)
        return None

    def _delivery(self, partition: int, topic: str, seen: Observation, now: float) -> Stuck | None:
        if topic not in seen.ends:
            return None
        key, through = (partition, topic), seen.through.get(topic, -1)
        before = self.unmoved.get(key)
        if seen.lag(topic) == 0 or before is None or before[0] != through:
            self.unmoved[key] = (through, now)
            return None
        still = now - before[1]
        return Stuck("delivery", f"{topic} is not delivered beyond offset {through}", still, partition, topic) if still > STUCK_S else None

    def moved(self, partition: int, topic: str, through: int, now: float) -> None:
        """It was a false alarm: there is nothing to read up there but holes."""
        self.unmoved[partition, topic] = (through, now)

    def forget(self, kept: set[int]) -> None:
        """Partitions that are no longer ours."""
        self.unmoved = {key: value for key, value in self.unmoved.items() if key[0] in kept}

    def membership(self, present: bool | None, now: float) -> Stuck | None:
        """None: the broker did not say."""
        if present is not False:
            self.absent_since = None
            return None
        self.absent_since = now if self.absent_since is None else self.absent_since
        absent = now - self.absent_since
        return Stuck("membership", "it is no longer a member of its group", absent) if absent > MEMBERSHIP_S else None


class Watchdog:
    """The watch on real partitions and a real broker, by clients of its own."""

    def __init__(self, settings: KafkaSettings, worker: str, cycles: Mapping[int, PartitionCycle]) -> None:
        self._settings, self._worker, self._cycles = settings, worker, cycles
        self._watch, self._holds = Watch(), Holds()
        self._joined = False
        self._log = structlog.get_logger().bind(worker=worker)

    async def run(self) -> None:
        """Until cancelled. Raises StuckError, after it was told."""
        reader = kafka.groupless_consumer(self._settings, f"{self._worker}-watchdog")
        to_the_end = kafka.groupless_consumer(self._settings, f"{self._worker}-watchdog-ends", isolation_level="read_uncommitted")
        admin = kafka.admin_client(self._settings, f"{self._worker}-watchdog")
        await asyncio.gather(reader.start(), to_the_end.start(), admin.start())
        try:
            while True:
                await asyncio.sleep(OBSERVE_S)
                await self._look_for_holds(reader, to_the_end)
                stuck = await self._observe(reader) or self._watch.membership(await self._present(admin), time.monotonic())
                if stuck is not None:
                    await self._tell(stuck)
                    where = f"partition {stuck.partition}" if stuck.partition is not None else f"worker {self._worker}"
                    raise StuckError(f"{where}: {stuck.what}, for {stuck.for_s:.0f} s; it ends so that another worker takes over")
        finally:
            await close_bounded(reader.stop(), to_the_end.stop(), admin.close(), timeout_s=ALERT_S)

    async def _observe(self, reader: AIOKafkaConsumer) -> Stuck | None:
        owned = dict(self._cycles)
        self._watch.forget(set(owned))
        ends = await self._ends(reader, sorted(partition for partition, cycle in owned.items() if cycle.ready.is_set()))
        now = time.monotonic()
        for partition, cycle in owned.items():
            seen = Observation(
                ready=cycle.ready.is_set(),
                progressed_at=cycle.progressed_at,
                own_tick_at=cycle.own_tick_at,
                ends={place.topic: end for place, end in ends.items() if place.partition == partition},
                through=cycle.through(),
            )
            for topic in seen.ends:
                LAG.labels(topic, str(partition)).set(seen.lag(topic))
            stuck = self._watch.partition(partition, seen, now)
            if stuck is not None and not (stuck.topic and await self._only_holes(stuck.topic, partition, seen, now)):
                return stuck
        return None

    async def _only_holes(self, topic: str, partition: int, seen: Observation, now: float) -> bool:
        """Behind the last record there may be markers of transactions, which nobody can deliver."""
        through = seen.through.get(topic, -1)
        try:
            records = await kafka.read_range(self._settings, topic, partition, through + 1, seen.ends[topic], timeout_s=ANSWER_S)
        except (KafkaError, OSError, TimeoutError):
            return True  # not known
        if not records:
            self._watch.moved(partition, topic, through, now)
        return not records

    async def _look_for_holds(self, reader: AIOKafkaConsumer, to_the_end: AIOKafkaConsumer) -> None:
        """Tell of transactions that are open on our inputs, and of where they come from."""
        owned = sorted(self._cycles)
        stable = await self._ends(reader, owned)
        ends = await self._ends(to_the_end, owned)  # asked later: never below what was stable before
        if not ends:
            return
        for place, offset in stable.items():
            HELD.labels(place.topic, str(place.partition)).set(max(0, ends.get(place, offset) - offset))
        for held in self._holds.see(stable, ends, time.monotonic(), HELD_S):
            source = await self._source_at(held)
            self._log.error(
                "an open transaction holds an input up", topic=held.place.topic, partition=held.place.partition, offset=held.offset, source=source
            )
            now_ms = int(time.time() * 1000)
            alert = InputHeldUp(
                topic=held.place.topic, partition=held.place.partition, offset=held.offset, source=source,
                records=held.records, for_s=round(held.for_s), time_ms=now_ms,
            )  # fmt: skip
            await self._send_soon(alert, f"{held.place.topic}/{held.place.partition}/{held.offset}/held", held.place.topic)

    async def _source_at(self, held: Held) -> str:
        """The ce_source of the transaction's first record, empty if that cannot be told."""
        place, offset = held.place, held.offset
        try:
            records = await kafka.read_range(
                self._settings, place.topic, place.partition, offset, offset + 1, timeout_s=ANSWER_S, isolation_level="read_uncommitted"
            )
        except (KafkaError, OSError, TimeoutError):
            return ""
        return header_text(records[0].headers, "ce_source") or "" if records else ""

    async def _ends(self, reader: AIOKafkaConsumer, partitions: list[int]) -> dict[TopicPartition, int]:
        places = [TopicPartition(topic, partition) for partition in partitions for topic in INPUT_TOPICS]
        if not places:
            return {}
        try:
            found: dict[TopicPartition, int] = await asyncio.wait_for(reader.end_offsets(places), ANSWER_S)
        except (KafkaError, OSError, TimeoutError):
            return {}
        return found

    async def _present(self, admin: AIOKafkaAdminClient) -> bool | None:
        """Whether the group knows us; counted once it has known us before."""
        try:
            [answer] = await asyncio.wait_for(admin.describe_consumer_groups([SCHEDULER_GROUP]), ANSWER_S)
        except (KafkaError, OSError, TimeoutError):
            return None
        [group] = answer.to_object()["groups"]
        if group["error_code"]:
            return None
        present = any(member["client_id"] == self._worker for member in group["members"])
        self._joined = self._joined or present
        return present if self._joined else None

    async def _tell(self, stuck: Stuck) -> None:
        """Count it, log it, and say it on the alerts topic if that can be done soon."""
        STUCK.labels(stuck.kind).inc()
        self._log.error("stuck", partition=stuck.partition, what=stuck.what, for_s=round(stuck.for_s))
        now_ms = int(time.time() * 1000)
        alert = SchedulerStuck(partition=stuck.partition, worker=self._worker, what=stuck.what, for_s=round(stuck.for_s), time_ms=now_ms)
        await self._send_soon(alert, f"{self._worker}-stuck", self._worker if stuck.partition is None else f"partition-{stuck.partition}")

    async def _send_soon(self, alert: SchedulerStuck | InputHeldUp, id: str, subject: str) -> None:
        sending = asyncio.ensure_future(self._send(alert, id, subject))
        _, late = await asyncio.wait({sending}, timeout=ALERT_S)
        if late or sending.exception() is not None:
            sending.cancel()
            self._log.error("the alert could not be published")

    async def _send(self, alert: SchedulerStuck | InputHeldUp, id: str, subject: str) -> None:
        value, headers = encode(alert, id=id, source=SOURCE, subject=subject, time_ms=alert.time_ms)
        producer = kafka.producer(self._settings, f"{self._worker}-alert")  # a new one: an older one may be what is stuck
        await producer.start()
        try:
            await producer.send_and_wait(ALERTS, value, key=subject.encode(), headers=list(headers))
        finally:
            await close_bounded(producer.stop(), timeout_s=ALERT_S)


def guard_loop(timeout_s: float | None = None) -> None:
    """Called whenever the event loop comes round: if it does not again in time, a thread writes every stack to standard error and ends the process."""
    faulthandler.dump_traceback_later(LOOP_S if timeout_s is None else timeout_s, exit=True)


def end_within(timeout_s: float) -> None:
    """The process is ending, and does so by force if a thread or a client does not let go."""
    guard_loop(timeout_s)
