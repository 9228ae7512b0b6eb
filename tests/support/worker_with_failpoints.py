"""`python tests/support/worker_with_failpoints.py`: a scheduler worker whose named places can be made to fail. See `failpoints.py`."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from failpoints import Failpoints, current_partition

Method = Callable[..., Awaitable[Any]]


def wrap(owner: Any, name: str, around: Callable[[Method], Method]) -> None:
    """Put something around a function or method. One that is gone or renamed is an error here, not a failpoint that never bites."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(around(original)))


def install(points: Failpoints) -> None:
    """Wrap every place. Imports come late: the core version must be set before the scheduler's modules read it."""
    from aiokafka import AIOKafkaProducer
    from opentinker.scheduler_stream import cycle, journal, owner, publishing
    from opentinker.scheduler_stream.codec import OwnerStarted, decode_record
    from opentinker.scheduler_stream.interpret import is_status

    def after(name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> Callable[[Method], Method]:
        def around(original: Method) -> Method:
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                result = await original(*args, **kwargs)
                if counts(*args, **kwargs):
                    await points.hit(name)
                return result

            return wrapped

        return around

    def before(name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> Callable[[Method], Method]:
        def around(original: Method) -> Method:
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                if counts(*args, **kwargs):
                    await points.hit(name)
                return await original(*args, **kwargs)

            return wrapped

        return around

    def knowing_its_partition(original: Method) -> Method:
        async def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            current_partition.set(self.partition)
            return await original(self, *args, **kwargs)

        return wrapped

    def with_fence(original: Method) -> Method:
        async def wrapped(log: Any, *args: Any, fence: Method, **kwargs: Any) -> Any:
            return await original(log, *args, fence=after("ownership.fenced")(fence), **kwargs)

        return wrapped

    def with_owner_started(original: Method) -> Method:
        async def wrapped(self: Any, value: bytes) -> int:
            offset: int = await original(self, value)
            if isinstance(decode_record(value), OwnerStarted):
                await points.hit("ownership.started")
            return offset

        return wrapped

    def with_batch(original: Method) -> Method:
        async def wrapped(self: Any) -> Any:
            batch = await original(self)
            if batch:
                await points.hit("cycle.taken")
            return batch

        return wrapped

    def with_between(original: Method) -> Method:
        async def wrapped(self: Any, offset: int) -> None:
            jumped = offset != self.last + 1
            try:
                await original(self, offset)
            finally:
                if jumped:
                    await points.hit("cycle.between_read")

        return wrapped

    def record_with_outputs(_journal: Any, _positions: Any, _changes: Any, outputs: Any, *_: Any, **__: Any) -> bool:
        return bool(outputs)

    def fast_outputs(_lane: Any, _offset: int, outputs: Any) -> bool:
        return any(not is_status(output) for output in outputs)

    wrap(cycle.PartitionCycle, "_run", knowing_its_partition)
    wrap(cycle, "take_over", with_fence)
    wrap(owner, "find_replay_from", after("ownership.replay_from_read"))
    wrap(cycle.KafkaLog, "append", with_owner_started)
    wrap(owner, "verify_inputs", before("ownership.folded"))
    wrap(owner, "verify_inputs", after("ownership.verified"))
    wrap(cycle.PartitionCycle, "_republish", after("ownership.republished"))
    wrap(cycle.PartitionCycle, "_take", with_batch)
    wrap(journal.Journal, "append", before("cycle.stepped", record_with_outputs))
    wrap(journal.Journal, "append", after("cycle.appended", record_with_outputs))
    wrap(journal.Journal, "_check_between", with_between)
    wrap(publishing.FastLane, "hand_over", after("publish.sent", fast_outputs))
    wrap(publishing, "_await_acks", after("publish.acked", lambda _futures, outputs, *, measure: bool(outputs) and measure))
    wrap(AIOKafkaProducer, "commit_transaction", before("status.begun"))
    wrap(AIOKafkaProducer, "commit_transaction", after("status.committed"))
    wrap(publishing.StatusLane, "hand_over", after("cycle.acked", lambda _lane, _offset, outputs: bool(outputs)))
    wrap(cycle.PartitionCycle, "stop", before("revoked.finishing"))
    wrap(cycle.PartitionCycle, "stop", knowing_its_partition)


def fall_sick(how: str) -> None:
    """Stand still, and let nothing fail. Each begins some seconds after the start, when the worker has been well."""
    from opentinker.scheduler_stream import cycle, shell

    well_until = time.monotonic() + 8

    def stop_when_sick(original: Method) -> Method:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            if time.monotonic() > well_until:
                await asyncio.Event().wait()
            return await original(*args, **kwargs)

        return wrapped

    def skip_when_sick(original: Method) -> Method:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            return None if time.monotonic() > well_until else await original(*args, **kwargs)

        return wrapped

    if how == "no_ticks":
        wrap(shell.Worker, "_send_tick", skip_when_sick)
    elif how == "no_delivery":
        wrap(cycle.PartitionCycle, "deliver", stop_when_sick)
    elif how == "frozen_consumer":
        original = shell._CommittedConsumerThread._create_worker_consumer

        def frozen(self: Any, transport: Any) -> Any:
            self.thread_loop.call_later(8, time.sleep, 3600)
            return original(self, transport)

        shell._CommittedConsumerThread._create_worker_consumer = frozen  # type: ignore[method-assign]
    else:
        raise SystemExit(f"SICK={how}: use no_ticks, no_delivery or frozen_consumer")


def bound_watchdog(bounds: dict[str, float]) -> None:
    from opentinker.scheduler_stream import watchdog

    for name, seconds in bounds.items():
        getattr(watchdog, name)  # a bound that is gone or renamed is an error here
        setattr(watchdog, name, seconds)


def idle_counts(times: float) -> None:
    """Let the group's client believe that it has been idle for so many times as long."""
    from aiokafka.consumer.subscription_state import SubscriptionState

    original = SubscriptionState.fetcher_idle_time.fget
    SubscriptionState.fetcher_idle_time = property(lambda self: original(self) * times)


if __name__ == "__main__":
    if times := os.environ.get("IDLE_COUNTS"):
        idle_counts(float(times))
    if version := os.environ.get("CORE_VERSION"):
        from opentinker.scheduler_stream.core import policy

        policy.CORE_VERSION = int(version)  # type: ignore[misc]
    if bounds := os.environ.get("WATCHDOG"):
        bound_watchdog(json.loads(bounds))
    if how := os.environ.get("SICK"):
        fall_sick(how)
    if told := Failpoints.from_environment():
        install(told)
    sys.argv = ["opentinker.scheduler_stream"]
    runpy.run_module("opentinker.scheduler_stream", run_name="__main__")
