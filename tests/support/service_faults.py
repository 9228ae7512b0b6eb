"""The faults of a service drill: each is inflicted while trainers work, and says whether it was seen to bite.

Processes die or stand still, parts are away, others do mischief on the topics, clocks jump, an agent's disk is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from broker_mischief import make_anew, outsider, send_again, set_stamps, tick_stamped, two_transactions
from opentinker.compose.runtime import kafka
from opentinker.schemas.topics import REPORTS
from own_stack import clean_environment

if TYPE_CHECKING:
    from service_drill import ServiceDrill

__all__ = ["FAULTS", "troubled_agents"]

_DISK = "64m"  # an agent's, so that it can be filled
_CLOCK_OFF_S = 2 * 3600
_JUMP_MS = 3_300_000  # of the broker's clock
# Python reads this file when it starts; the clock it gives can be moved while the process runs.
_MOVABLE_CLOCK = """
import pathlib, time
_here, _real, _real_ns, _known = pathlib.Path(__file__).parent, time.time, time.time_ns, [0.0, 0.0]
def _off():
    if time.monotonic() - _known[0] > 0.1:
        _known[0] = time.monotonic()
        try:
            asked = float((_here / "asked").read_text())
            if asked != _known[1]:
                _known[1] = asked
                (_here / "seen").write_text(str(asked))
        except (OSError, ValueError):
            pass
    return _known[1]
time.time, time.time_ns = lambda: _real() + _off(), lambda: _real_ns() + int(_off() * 10**9)
"""


def _kill(program: str) -> Callable[[ServiceDrill], Awaitable[bool]]:
    async def inflict(drill: ServiceDrill) -> bool:
        before = drill.pid(program)
        os.kill(before, signal.SIGKILL)
        return await drill.until(lambda: drill.pid(program) not in (0, before), 60)

    return inflict


def _pause(program: str, seconds: float = 20.0) -> Callable[[ServiceDrill], Awaitable[bool]]:
    async def inflict(drill: ServiceDrill) -> bool:
        pid = drill.pid(program)
        os.kill(pid, signal.SIGSTOP)
        try:
            stopped = await drill.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 5)
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        return stopped

    return inflict


def _outage(program: str, seconds: float) -> Callable[[ServiceDrill], Awaitable[bool]]:
    async def inflict(drill: ServiceDrill) -> bool:
        await asyncio.to_thread(drill.supervisor.stop_programs, [program], 30)
        gone = drill.pid(program) == 0
        await asyncio.sleep(seconds)
        await asyncio.to_thread(drill.supervisor.start_program, program)
        return gone

    return inflict


async def _node_power(drill: ServiceDrill) -> bool:
    """An agent and its trainers at once, as when a node loses power."""
    program, before = drill.working_agent(), 0
    before = drill.pid(program)
    processes = [psutil.Process(before), *psutil.Process(before).children(recursive=True)]
    for each in processes:
        each.send_signal(signal.SIGKILL)
    return len(processes) > 1 and await drill.until(lambda: drill.pid(program) not in (0, before), 60)


async def _agent_killed(drill: ServiceDrill) -> bool:
    return await _kill(drill.working_agent())(drill)


async def _agent_paused(drill: ServiceDrill) -> bool:
    return await _pause(drill.working_agent())(drill)


def _clock(off_s: float) -> Callable[[ServiceDrill], Awaitable[bool]]:
    """A working agent's clock jumps while its trainers work, and back."""

    async def inflict(drill: ServiceDrill) -> bool:
        folder = _clock_folder(drill.home.root, drill.working_agent())

        async def jump(to_s: float) -> bool:
            (folder / "asked").write_text(str(to_s))
            return await drill.until(lambda: float((folder / "seen").read_text() or 0) == to_s, 10)

        (folder / "seen").touch()
        there = await jump(off_s)
        await asyncio.sleep(12)
        return await jump(0.0) and there

    return inflict


async def _disk_full(drill: ServiceDrill) -> bool:
    """A working agent's disk has no byte left for a while."""
    directory = _directory(drill.home.root, drill.working_agent())
    if not directory.is_mount():
        return False  # it would be everybody's disk

    def fill() -> int:
        with contextlib.suppress(OSError), (directory / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return shutil.disk_usage(directory).free

    full = 0
    for _ in range(15):  # what is removed meanwhile makes no room
        full += await asyncio.to_thread(fill) == 0
        await asyncio.sleep(1)
    (directory / "filler").unlink()
    return full > 10


async def _broker_clock(drill: ServiceDrill) -> bool:
    """Single reports carry a stamp that is almost an hour ahead, or behind."""
    settings = drill.settings.kafka
    await set_stamps(settings, "CreateTime")
    try:
        for ahead_ms in (_JUMP_MS, -_JUMP_MS, _JUMP_MS):
            await asyncio.sleep(1)
            for partition in range(settings.partitions):
                await tick_stamped(settings, partition, ahead_ms)
    finally:
        await set_stamps(settings, "LogAppendTime")
    return True


async def _again_and_late(drill: ServiceDrill) -> bool:
    return await send_again(drill.settings.kafka, 100, after_s=5) > 0


async def _transactions(drill: ServiceDrill) -> bool:
    """Holes on every input."""
    settings, sender = drill.settings.kafka, outsider(drill.settings.kafka)
    before = await kafka.end_offsets(settings, REPORTS, range(settings.partitions))
    await sender.start()
    try:
        for _ in range(3):
            await two_transactions(sender, settings.partitions)
    finally:
        await sender.stop()
    after = await kafka.end_offsets(settings, REPORTS, range(settings.partitions))
    return all(after[partition] - before[partition] >= 12 for partition in before)  # two records and two markers each time


async def _reports_anew(drill: ServiceDrill) -> bool:
    """An input topic is deleted and made again; the scheduler refuses to guess until an administrator has decided."""
    settings, log = drill.settings.kafka, drill.home.log_file("scheduler")
    await asyncio.to_thread(drill.supervisor.stop_programs, ["scheduler"], 30)
    await make_anew(settings, REPORTS)
    said = log.stat().st_size
    await asyncio.to_thread(drill.supervisor.start_program, "scheduler")
    refused = await drill.until(lambda: b"was made anew" in log.read_bytes()[said:], 60)
    adopted = 0
    for partition in range(settings.partitions):
        arguments = ["scheduler", "adopt", "--partition", str(partition), "--from", "beginning", "--reason", "drill", "--yes"]
        program = str(Path(sys.executable).parent / "opentinker")
        done = await asyncio.to_thread(
            subprocess.run, [program, *arguments], env=clean_environment(drill.home.root), capture_output=True, timeout=60, check=False
        )
        adopted += b"adopted: journal offset" in done.stdout
    return refused and adopted > 0


FAULTS: dict[str, Callable[[ServiceDrill], Awaitable[bool]]] = {
    "kill agent": _agent_killed,
    "kill agent and its trainers": _node_power,
    "stop agent 20 s": _agent_paused,
    "kill scheduler": _kill("scheduler"),
    "stop scheduler 20 s": _pause("scheduler"),
    "kill gateway": _kill("gateway"),
    "stop gateway 20 s": _pause("gateway"),
    "kill ingress": _kill("ingress"),
    "kill read replica": _kill("replica"),
    "kill registry": _kill("registry"),
    "stop registry 20 s": _pause("registry"),
    "kill Kafka": _kill("kafka"),
    "stop Kafka 20 s": _pause("kafka"),
    "Kafka away 60 s": _outage("kafka", 60),
    "kill PostgreSQL": _kill("postgres"),
    "PostgreSQL away 30 s": _outage("postgres", 30),
    "kill S3": _kill("s3"),
    "S3 away 30 s": _outage("s3", 30),
    "agent's clock 2 h ahead": _clock(_CLOCK_OFF_S),
    "agent's clock 2 h behind": _clock(-_CLOCK_OFF_S),
    "agent's disk full": _disk_full,
    "broker's clock jumps": _broker_clock,
    "inputs sent again and late": _again_and_late,
    "others' transactions": _transactions,
    "reports topic made anew": _reports_anew,
}


def _directory(home: Path, program: str) -> Path:
    return home / "agents" / program.replace("agent", "node")


def _clock_folder(home: Path, program: str) -> Path:
    return home / "drill" / f"clock-{program}"


@contextmanager
def troubled_agents(drill: ServiceDrill) -> Iterator[None]:
    """Every agent with a small disk of its own, if one can be mounted here, and a clock that can be moved; as they were, afterwards."""
    names = [name for name in drill.supervisor.states() if name.startswith("agent-")]
    specs = {name: drill.home.run / f"{name}.json" for name in names}
    before = {name: spec.read_text() for name, spec in specs.items()}
    drill.supervisor.stop_programs(names, 30)
    for name in names:
        folder, directory = _clock_folder(drill.home.root, name), _directory(drill.home.root, name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(_MOVABLE_CLOCK)
        spec = json.loads(before[name])
        specs[name].write_text(json.dumps(spec | {"env": spec["env"] | {"PYTHONPATH": str(folder)}}))
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700", "tmpfs", str(directory)], capture_output=True, check=False)
    try:
        for name in names:
            drill.supervisor.start_program(name)
        yield
    finally:
        drill.supervisor.stop_programs(names, 30)
        for name in names:
            if _directory(drill.home.root, name).is_mount():
                subprocess.run(["umount", "-l", str(_directory(drill.home.root, name))], capture_output=True, check=False)
            specs[name].write_text(before[name])
            drill.supervisor.start_program(name)
