"""The line between agent and trainer, output on its way to the log topic, and the agent's memory."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from opentinker.compose.runtime.settings import AgentSettings, SettingsError
from opentinker.trainer_agent.capacity import capacity_of, port_range
from opentinker.trainer_agent.control import AgentLine
from opentinker.trainer_agent.core.log_rate import LINE_CHARACTERS_MAX, LINES_BURST, LINES_PER_S, LogRate
from opentinker.trainer_agent.journal import FolderError, Journal
from opentinker.trainer_agent.listener import Listener, Place
from opentinker.trainer_agent.processes import is_same_process, start_ticks
from opentinker.trainer_agent.protocol import (
    Event,
    Hello,
    MetricsSample,
    ProgressReport,
    ProtocolError,
    Stopped,
    TrainerOutcome,
    decode_event,
    decode_lease,
    encode_line,
)
from opentinker.trainer_agent.tails import Tail

S = 1_000_000_000
HELLO = Hello(job_uid="j", attempt_number=1, rank=0, pid=7, start_ticks=8, boot_id="b", token_sha256="t")
PLACE: Place = ("j", 1, 0)


class Heard:
    def __init__(self, directory: Path, knows: bool = True) -> None:
        self.events: list[Event] = []
        self.listener = Listener(directory, lambda hello: knows, lambda place, event: self.events.append(event))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.events) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def _wait(holds: object) -> None:
    async with asyncio.timeout(10):
        while not holds():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_events_go_up_and_leases_come_down_also_in_a_deep_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    heard = Heard(deep)
    await heard.listener.start()
    line = AgentLine(deep, HELLO, lease_valid_until_ns=1, grace_s=30)
    assert not line.lease_holds
    line.send(ProgressReport(global_step=5))
    await heard.until(2)
    assert [type(event) for event in heard.events] == [Hello, ProgressReport]
    heard.listener.renew(PLACE, time.monotonic_ns() + 60 * S)
    await _wait(lambda: line.lease_holds)
    heard.listener.renew(PLACE, time.monotonic_ns() - 60 * S)
    heard.listener.renew(PLACE, time.monotonic_ns() + 1 * S)
    await asyncio.sleep(0.1)
    assert line.lease_holds, "a lease is never shortened"
    line.send(Stopped(outcome=TrainerOutcome.STOPPED))
    await asyncio.to_thread(line.close)
    await heard.until(3)
    await heard.listener.stop()


async def test_after_a_restart_of_the_agent_the_newest_of_each_event_is_said_again(tmp_path: Path) -> None:
    first = Heard(tmp_path)
    await first.listener.start()
    line = AgentLine(tmp_path, HELLO, lease_valid_until_ns=time.monotonic_ns() + 60 * S, grace_s=30)
    for step in (1, 2):
        line.send(ProgressReport(global_step=step))
    line.send(MetricsSample(global_step=2, update=1, time_ms=0, values={}))
    await _wait(lambda: any(isinstance(event, MetricsSample) for event in first.events))
    await first.listener.stop()
    second = Heard(tmp_path)
    await second.listener.start()
    await second.until(2)
    assert second.events == [HELLO, ProgressReport(global_step=2)]
    await asyncio.to_thread(line.close)
    await second.listener.stop()


async def test_an_agent_that_stays_away_past_lease_and_grace_means_stop(tmp_path: Path) -> None:
    line = AgentLine(tmp_path, HELLO, lease_valid_until_ns=time.monotonic_ns() + S // 5, grace_s=0.3)
    assert not line.stop_requested.is_set()
    await _wait(line.stop_requested.is_set)
    assert line.agent_lost
    assert line.wait_for_lease() is False


async def test_who_is_not_known_is_sent_away_and_hears_no_lease(tmp_path: Path) -> None:
    heard = Heard(tmp_path, knows=False)
    await heard.listener.start()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "agent.sock")
    writer.write(encode_line(HELLO))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    heard.listener.renew(PLACE, 1)
    assert heard.events == []
    assert (tmp_path / "agent.sock").stat().st_mode & 0o077 == 0
    await heard.listener.stop()


@pytest.mark.parametrize("line", [b"", b"{}\n", b"[1]\n", b'{"type": "no such"}\n', b"\xff\xfe\n", b'{"type": "progress", "global_step": "many"}\n'])
def test_what_is_no_message_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_event(line)
    with pytest.raises(ProtocolError):
        decode_lease(line)


def test_numbers_that_json_does_not_have_survive_the_line() -> None:
    sample = MetricsSample(global_step=1, update=1, time_ms=0, values={"a": float("inf"), "b": float("-inf"), "c": float("nan"), "d": 0.1})
    read = decode_event(encode_line(sample))
    assert isinstance(read, MetricsSample)
    assert str(read.values) == str(sample.values)


def test_output_passes_at_a_bounded_rate_and_what_is_left_out_is_counted() -> None:
    rate = LogRate(0)
    first = rate.take([b"x"] * (LINES_BURST + 50), 0)
    assert first is not None
    assert (first.first_line, first.dropped, len(first.lines)) == (0, 0, LINES_BURST)
    assert rate.take([b"y"] * 3, 0) is None
    later = rate.take([b"z"] * 500, 1 * S)
    assert later is not None
    assert (later.first_line, later.dropped, len(later.lines)) == (LINES_BURST + 53, 53, LINES_PER_S)


def test_a_long_or_broken_line_is_cut_and_not_refused() -> None:
    passed = LogRate(0).take([b"a" * 10_000, b"\xff\xfe"], 0)
    assert passed is not None
    assert len(passed.lines[0]) == LINE_CHARACTERS_MAX
    assert passed.lines[1] == "\ufffd\ufffd"


def test_a_tail_gives_whole_lines_and_at_the_end_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    tail = Tail(path, 0)
    assert tail.look(0) is None
    path.write_bytes(b"one\ntw")
    passed = tail.look(0)
    assert passed is not None
    assert passed.lines == ("one",)
    with open(path, "ab") as file:
        file.write(b"o\nthree")
    assert [passed.lines for passed in (tail.look(0), tail.look(0, last=True)) if passed] == [("two",), ("three",)]


def test_a_large_file_is_cut_once_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    tail = Tail(path, 0)
    os.write(writer, (b"x" * 1023 + b"\n") * 17 * 1024)
    for _ in range(20):
        tail.look(0)
    assert path.stat().st_size == 0
    os.write(writer, b"after\n")
    passed = tail.look(1000 * S)
    assert passed is not None
    assert passed.lines == ("after",)
    os.close(writer)


def test_one_agent_a_folder(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "boot")
    with pytest.raises(FolderError, match="another agent runs in"):
        Journal(tmp_path, "boot")
    journal.close()
    Journal(tmp_path, "boot").close()


def test_a_journal_of_another_boot_has_no_processes_and_a_broken_one_is_set_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "boot-1")
    journal.write((), ())
    journal.close()
    journal = Journal(tmp_path, "boot-2")
    assert journal.read().entries == ()
    (tmp_path / "journal.json").write_text("{")
    assert journal.read().reports == ()
    assert (tmp_path / "journal.unreadable").exists()
    journal.close()


def test_a_process_is_known_by_its_start_time_and_not_by_its_pid_alone() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert is_same_process(os.getpid(), ticks)
    assert not is_same_process(os.getpid(), ticks - 1)
    assert start_ticks(2**22 - 1) is None


def test_capacity_is_what_is_configured_or_what_the_machine_has() -> None:
    configured = capacity_of(AgentSettings(cpu=2.5, memory="4Gi", simulated_gpus=2))
    assert (configured.cpu_millis, configured.memory_bytes, [device.simulated for device in configured.devices]) == (2500, 2**32, [True, True])
    own = capacity_of(AgentSettings())
    assert own.cpu_millis == 1000 * (os.cpu_count() or 1)
    assert not any(device.simulated for device in own.devices)
    with pytest.raises(SettingsError, match="OPENTINKER_AGENT__MEMORY"):
        capacity_of(AgentSettings(memory="much"))


@pytest.mark.parametrize("text", ["", "a-b", "5-4", "0-10", "1-70000"])
def test_a_port_range_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(SettingsError, match="OPENTINKER_AGENT__PORTS"):
        port_range(text)
