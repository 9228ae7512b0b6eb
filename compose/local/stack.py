"""The local stack's story: `up` brings it to ready, `down` ends every process of it, `restart` ends and starts one program.

Rules: one caller at a time a home (a lock); `up` on a running stack only adds what is missing; an `up` that fails or is interrupted stops what it
started; `down` finds processes also when supervisord is gone (records of pid and start time, and a mark in their environment).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import FrameType

from opentinker.compose.local.errors import PartFailed, StackError, UnknownProgram
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import Layout, UpOptions, choose_layout, prepare_programs, settings_of
from opentinker.compose.local.processes import Recorded, end_processes, find_marked, is_alive, listens, port_holder, read_records
from opentinker.compose.local.programs import AGENT, PARTS, Program, explain, stop_stages
from opentinker.compose.local.progress import Progress
from opentinker.compose.local.ready import ask
from opentinker.compose.local.supervisor import SUPERVISOR, Supervisor
from opentinker.compose.runtime.settings import Settings

__all__ = ["down", "restart", "supervisor_of", "up"]

_TRIES_MAX = 3  # starts of one program during an `up` before it is called failed: about four seconds
_STOP_STAGE_S, _STOP_SUPERVISOR_S = 30.0, 10.0  # a little above each program's own stop wait
_LEFTOVER_WAIT_S = 15.0
_LAST_LINES = 15


def up(home: Home, options: UpOptions, progress: Progress) -> Layout:
    """Start what is missing and return when everything answers. Raises StackError; then nothing that this call started runs on."""
    home.prepare()
    with home.lock(), _signals_interrupt():
        supervisor = supervisor_of(home)
        running = supervisor is not None and supervisor.is_running()
        if options.fresh:
            _stop_everything(home, progress)
            home.drop_data()
            home.prepare()
            running = False
        elif not running:
            _end_leftovers(home, progress)
        layout = choose_layout(home, options, os.environ, running=running)
        for name, (earlier, port) in layout.moved.items():
            holder = port_holder(earlier)
            held = f"held by {holder}" if holder != "nobody" else "kept for another OPENTINKER_HOME of yours"
            progress.say(f"port {earlier} of {name} is {held}; {name} listens on {port} from now on: tell who uses the old one")
        supervisor = Supervisor(home=home, port=layout.ports["supervisor"], password=home.secret("supervisor-password"))
        states = supervisor.states() if running else {}
        before = {name for name, info in states.items() if info["statename"] == "RUNNING"}

        def known(name: str) -> bool:  # what an earlier `up` started stays in the configuration, else supervisord would stop it
            return not options.only or name in options.only or name in states

        programs = [program for program in prepare_programs(layout, known, progress.say) if known(program.name)]
        wanted = _wanted(programs, options.only, before)
        try:
            _take_over(supervisor, programs, layout, running=running, ends_with_caller=options.ends_with_caller)
            asyncio.run(_bring_up(supervisor, wanted, layout, progress))
        except BaseException:
            with _signals_ignored():
                progress.say("stopping what was started")
                if running:
                    _stop_in_order(supervisor, [program.name for program in wanted if program.name not in before], progress)
                else:
                    _stop_everything(home, progress)
            raise
        return layout


def down(home: Home, progress: Progress) -> None:
    """End every process of this home. Fine when none runs."""
    if not home.stack_file.exists():
        return
    with home.lock(), _signals_ignored():
        _stop_everything(home, progress)


def restart(home: Home, name: str) -> None:
    """Stop one program and start it again. Returns once it was started, not when it is ready."""
    supervisor = supervisor_of(home)
    if supervisor is None or not supervisor.is_running():
        raise StackError("the stack is not running; `opentinker up` starts it")
    known = sorted(supervisor.states())
    if name not in known:
        raise UnknownProgram(f"no program {name!r}; there are {', '.join(known)}")
    supervisor.stop_programs([name], _STOP_STAGE_S)
    supervisor.start_program(name)


def supervisor_of(home: Home) -> Supervisor | None:
    """This home's supervisor by what earlier runs kept; None if there never was one."""
    port = home.read_stack().get("ports", {}).get("supervisor")
    return Supervisor(home=home, port=port, password=home.secret("supervisor-password")) if port else None


def _wanted(programs: Sequence[Program], only: Sequence[str], before: set[str]) -> list[Program]:
    """What this `up` starts and waits for: what was asked for, and what ran before (a changed setting may have stopped it)."""
    names = [program.name for program in programs]
    unknown = [name for name in only if name not in names and name not in PARTS]
    if unknown:
        raise StackError(f"no program {unknown[0]!r} in this stack")
    return [program for program in programs if not only or program.name in only or program.name in before]


def _take_over(supervisor: Supervisor, programs: Sequence[Program], layout: Layout, *, running: bool, ends_with_caller: bool) -> None:
    """Write the configuration and have supervisord know it."""
    stack = layout.home.read_stack()
    stack["programs"] = {program.name: dict(program.ports) for program in programs}
    stack["listens"] = {program.name: program.ready.port for program in programs}
    layout.home.write_stack(stack)
    supervisor.write(programs)
    if running:
        supervisor.reload()
    else:
        supervisor.start(layout.environment, ends_with_caller=ends_with_caller)


async def _bring_up(supervisor: Supervisor, programs: Sequence[Program], layout: Layout, progress: Progress) -> None:
    """Start each program once what it needs is ready; end when all are, or with the first failure."""
    settings = settings_of(layout.home.root)
    ready = {name: asyncio.Event() for name in (*PARTS, "topics")}
    for part in PARTS:
        if part not in {program.name for program in programs} and part in layout.embedded:
            ready[part].set()  # left out by --only: the caller knows that it is there
    names = [program.name for program in programs]
    async with _first_failure() as group:
        watcher = group.create_task(_watch(supervisor, programs))
        group.create_task(asyncio.to_thread(importlib.import_module, "aioboto3"))  # a second of reading, best beside Kafka's start
        tasks = [group.create_task(_start_one(supervisor, program, settings, ready, progress)) for program in programs]
        tasks += [group.create_task(_check_external(part, settings, ready, progress)) for part in PARTS if part not in layout.embedded]
        if "kafka" in names or "kafka" not in layout.embedded:
            tasks.append(group.create_task(_ensure_topics(settings, ready, progress)))
        else:
            ready["topics"].set()
        await asyncio.gather(*tasks)
        await _until_settled(supervisor, {program.name for program in programs})
        watcher.cancel()


async def _until_settled(supervisor: Supervisor, names: set[str]) -> None:
    """Supervisord calls a program running once it has lived for a second; ended by `_watch` if one does not."""
    while True:
        states = await asyncio.to_thread(supervisor.states)
        if not any(info["statename"] == "STARTING" for name, info in states.items() if name in names):
            return
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first failure comes out as itself, not wrapped in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _start_one(supervisor: Supervisor, program: Program, settings: Settings, ready: dict[str, asyncio.Event], progress: Progress) -> None:
    if program.name not in PARTS:
        for need in (*PARTS, "topics"):
            await ready[need].wait()
    await asyncio.to_thread(supervisor.start_program, program.name)
    deadline = time.monotonic() + program.start_timeout_s
    while (reason := await ask(program.ready, settings) or await _somebody_else(supervisor, program)) is not None:
        if time.monotonic() > deadline:
            raise _failure(supervisor.home, program, f"not ready after {program.start_timeout_s:.0f} s ({reason})")
        await asyncio.sleep(0.05)
    progress.done(program.name, "ready")
    if program.name in ready:
        ready[program.name].set()


async def _somebody_else(supervisor: Supervisor, program: Program) -> str | None:
    """Why what answered is not this home's program: another stack may sit on its port."""
    port = program.ready.port
    info = (await asyncio.to_thread(supervisor.states)).get(program.name, {})
    if port and not (info.get("pid") and await asyncio.to_thread(listens, info["pid"], port)):
        return f"port {port} is answered by {await asyncio.to_thread(port_holder, port)}, not by this stack's {program.name}"
    return None


async def _ensure_topics(settings: Settings, ready: dict[str, asyncio.Event], progress: Progress) -> None:
    await ready["kafka"].wait()
    from aiokafka.errors import KafkaError
    from opentinker.compose.runtime.kafka import TopicMismatchError, ensure_topics

    try:
        made = await ensure_topics(settings.kafka, settings.ingress.namespaces)
    except TopicMismatchError as error:
        raise StackError(str(error)) from error
    except (KafkaError, OSError) as error:
        raise StackError(f"the topics could not be made: {type(error).__name__}: {error}") from error
    progress.done("topics", f"{len(made)} made" if made else "as they should be")
    ready["topics"].set()


async def _check_external(part: str, settings: Settings, ready: dict[str, asyncio.Event], progress: Progress) -> None:
    """An outside service is asked for as long as an embedded one; its message names the variable that chose it."""
    from opentinker.compose.local.layout import EXTERNAL
    from opentinker.compose.local.programs import Ready

    check = Ready(how=part)  # type: ignore[arg-type]
    deadline = time.monotonic() + 30
    while (reason := await ask(check, settings)) is not None:
        if time.monotonic() > deadline:
            raise StackError(f"the {part} that {EXTERNAL[part]} names does not answer: {reason}. Unset the variable to use the embedded one")
        await asyncio.sleep(0.2)
    progress.done(part, "reachable (external)")
    ready[part].set()


async def _watch(supervisor: Supervisor, programs: Sequence[Program]) -> None:
    """Raise as soon as a program has ended too often to be only starting slowly."""
    starts: dict[str, set[int]] = {program.name: set() for program in programs}
    while True:
        states = await asyncio.to_thread(supervisor.states)
        for program in programs:
            info = states.get(program.name)
            if info is None or info["statename"] == "STOPPED":
                continue
            if info["statename"] in ("BACKOFF", "EXITED", "FATAL"):
                starts[program.name].add(info["start"])
            if info["statename"] == "FATAL" or len(starts[program.name]) >= _TRIES_MAX:
                raise _failure(supervisor.home, program, info["spawnerr"] or f"it ended {_TRIES_MAX} times")
        await asyncio.sleep(0.2)


def _failure(home: Home, program: Program, fallback: str) -> PartFailed:
    log = home.log_file(program.name)
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    except OSError:
        lines = []
    return PartFailed(program.name, explain(lines, fallback, program.causes), str(log), lines)


def _stop_everything(home: Home, progress: Progress) -> None:
    """In the order of `stop_stages`; then supervisord, and whatever is left."""
    supervisor = supervisor_of(home)
    if supervisor is not None and supervisor.is_running():
        with contextlib.suppress(OSError):  # it may end while we talk: what follows needs no supervisor
            _stop_in_order(supervisor, list(supervisor.states()), progress)
            supervisor.shut_down()
            _wait_until_gone([record for record in read_records(home.pids) if record.name == SUPERVISOR], _STOP_SUPERVISOR_S)
    _end_leftovers(home, progress)


def _stop_in_order(supervisor: Supervisor, names: Sequence[str], progress: Progress) -> None:
    def waiting(for_: list[str]) -> None:
        why = ": their trainers write a last checkpoint" if for_[0].startswith(AGENT) else ""
        progress.say(f"waiting for {', '.join(for_)}{why}")

    for stage in stop_stages(names):
        supervisor.stop_programs(stage, _STOP_STAGE_S, waiting)


def _end_leftovers(home: Home, progress: Progress) -> None:
    """End what a crash left. Supervisord first, so that it restarts nothing."""
    records = [record for record in read_records(home.pids) if is_alive(record)]
    if records:
        progress.say(f"ending what was left running: {', '.join(record.name for record in records)}")
    end_processes([record for record in records if record.name == SUPERVISOR], wait_s=1.0)
    for stage in stop_stages(record.name for record in records if record.name != SUPERVISOR):
        end_processes([record for record in records if record.name in stage], wait_s=_LEFTOVER_WAIT_S)
    stack_id = home.read_stack().get("stack_id")
    if stack_id:
        end_processes(find_marked(stack_id), wait_s=3.0)
    for path in home.pids.glob("*.json"):
        path.unlink(missing_ok=True)


def _wait_until_gone(records: Sequence[Recorded], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while any(is_alive(record) for record in records) and time.monotonic() < deadline:
        time.sleep(0.02)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end an `up` as Ctrl-C does, so that it cleans up behind itself."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handlers(interrupt, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Cleaning up is bounded and must not be cut short: that is how orphans come about."""
    with _handlers(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
