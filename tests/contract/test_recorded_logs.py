"""Decisions are what they were: today's core does with recorded inputs what was done then, byte for byte."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import recorded_logs
from opentinker.scheduler_stream.core.policy import CORE_VERSION
from opentinker.scheduler_stream.recorded_log import Header, LogFile, RecordedLogError, read_file
from opentinker.scheduler_stream.replay import Outcome, Recorded, Recovered, Replay

RECORDED = Path(__file__).parent / "recorded"
LOGS = sorted(RECORDED.glob("*.log.gz"))
ANEW = "decisions changed: if that is wanted, raise CORE_VERSION and record anew with python tests/support/recorded_logs.py tests/contract/recorded"
BYTES_MAX = 200 * 1024


def replayed(path: Path) -> Outcome:
    header, entries = read_file(path)
    replay = Replay(partitions=header.partitions)
    for entry in entries:
        if replay.feed(entry) is not None:
            break
    return replay.end()


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_todays_core_decides_as_was_recorded(path: Path) -> None:
    outcome = replayed(path)
    assert outcome.difference is None, f"{ANEW}\n{path.name}: {outcome.difference.text()}"
    assert outcome.records > 30


def test_every_story_is_recorded_with_this_core_and_small() -> None:
    assert {path.name for path in LOGS} == {f"{name}.v{CORE_VERSION}.log.gz" for name in recorded_logs.STORIES}, ANEW
    assert all(path.stat().st_size < BYTES_MAX for path in LOGS)


@pytest.mark.parametrize(
    ("story", "wanted"),
    [
        ("plain", {"JobSubmitted", "JobUnschedulable", "AttemptPlaced", "AttemptRunning", "JobCompleted", "StartAttempt", "JobStatus"}),
        (
            "faults",
            {"NodeLost", "NodeRecovered", "JobRequeued", "JobCancelled", "StopAttempt", "NameTaken", "UserError", "Infrastructure", "StartTimeout"}
            | {"DeadlineExceeded", "Cancelled", "GangFailed", "NodeStopping", "NodeNameTaken", "RefuseAgent"},
        ),
        ("brake", {"BrakeEngaged", "BrakeReleased", "DeadLettered", "NodeLost"}),
    ],
)
def test_a_story_holds_what_it_is_for(story: str, wanted: set[str]) -> None:
    _, entries = read_file(RECORDED / f"{story}.v{CORE_VERSION}.log.gz")
    found: Counter[str] = Counter()
    takeovers = -1
    for entry in entries:
        takeovers += isinstance(entry, Recovered)
        for output in entry.outputs if isinstance(entry, Recorded) else ():
            found[dict(output.headers).get("ce_type", b"").decode().removeprefix("io.opentinker.").partition(".")[0]] += 1
            if output.value[:1] == b"{" and not output.topic.endswith(".dlq"):
                value = json.loads(output.value)
                found.update(str(value.get(key)) for key in ("reason", "failure_class") if key in value)
    assert wanted <= set(found)
    assert takeovers == 1


@pytest.mark.parametrize(
    ("module", "number", "wrong", "story", "text"),
    [
        ("effects", "COMMAND_VALID_MS", 60_001, "plain", "valid_until_ms: "),
        ("retry", "BACKOFF_BASE_MS", 1_500, "faults", "eligible_at: "),
        ("step", "START_TIMEOUT_MS", 170_000, "faults", ""),
        ("brake", "BRAKE_NODES_SHARE_PERCENT", 95, "brake", ""),
    ],
)
def test_another_number_in_the_policy_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: str, number: str, wrong: int, story: str, text: str
) -> None:
    monkeypatch.setattr(importlib.import_module(f"opentinker.scheduler_stream.core.{module}"), number, wrong)
    difference = replayed(RECORDED / f"{story}.v{CORE_VERSION}.log.gz").difference
    assert difference is not None
    assert difference.text().startswith("journal offset ")
    assert text in difference.text()


def test_recording_twice_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("once", "twice"):
        recorded_logs.main(tmp_path / name)
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "twice" / path.name).read_bytes()


def test_a_file_that_is_no_log_or_is_cut_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"", b"nonsense", LOGS[0].read_bytes()[:40]):
        path.write_bytes(content)
        with pytest.raises(RecordedLogError, match="is not a recorded log"):
            read_file(path)
    path.write_bytes(LOGS[0].read_bytes()[:-500])
    _, entries = read_file(path)
    with pytest.raises(RecordedLogError, match="is cut or damaged"):
        list(entries)
    header, entries = read_file(LOGS[0])
    with pytest.raises(KeyError):
        _write_half(path, header)
    assert path.read_bytes() == LOGS[0].read_bytes()[:-500]  # what was there stays
    with LogFile(path, header) as file:
        file.add(next(entries))
    assert len(list(read_file(path)[1])) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def _write_half(path: Path, header: Header) -> None:
    with LogFile(path, header):
        raise KeyError
