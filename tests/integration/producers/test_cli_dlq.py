"""`opentinker dlq` on the real broker."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from command import ok, opentinker
from opentinker.compose.runtime.kafka import end_offsets, read_range, send
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import ADMIN, CHECKPOINTS, COMMANDS, EVENTS, LOGS, dead_letter_topic

pytestmark = pytest.mark.stack


async def bury(sender: AIOKafkaProducer, topic: str, value: bytes | None, error: str = "is wrong", **headers: str) -> int:
    """One dead letter; returns its offset."""
    record = InputRecord(
        topic=topic, partition=1, offset=5, append_time_ms=int(time.time() * 1000), key=b"k\xff", value=value,
        headers=tuple((name, text.encode()) for name, text in headers.items()),
    )  # fmt: skip
    letter, _ = dead_letter(record, [FieldError(field="spec", message=error, remedy="mend it")], source="test", time_ms=1)
    answer = await (await send(sender, letter))
    return int(answer.offset)


async def command(stack: Any, *arguments: str, **options: Any) -> Any:
    return await asyncio.to_thread(opentinker, stack, "dlq", *arguments, **options)


async def appended(stack: Any, topic: str, start: int) -> list[InputRecord]:
    end = (await end_offsets(stack.settings.kafka, topic, [1]))[1]
    return await read_range(stack.settings.kafka, topic, 1, start, end) if end > start else []


async def test_the_newest_come_first_and_how_many_more_there_are_is_said(stack: Any, sender: AIOKafkaProducer) -> None:
    offsets = [await bury(sender, LOGS, b"x" * 200_000, ce_id=f"list-{number}") for number in range(7)]
    done = await command(stack, "list", "--topic", LOGS, "--limit", "3", "-o", "json")
    letters = json.loads(ok(done))
    assert [letter["offset"] for letter in letters] == offsets[:-4:-1]
    assert (letters[0]["bytes"], letters[0]["headers"]["ce_id"]) == (200_000, "list-6")
    assert "up to 4 older ones" in done.stderr
    assert len(json.loads(ok(await command(stack, "list", "--topic", LOGS, "--since", "1h", "-o", "json")))) == 7
    await asyncio.sleep(1.2)
    assert ok(await command(stack, "list", "--topic", LOGS, "--since", "1s")) == ""
    latest = await bury(sender, EVENTS, b"x")
    table = ok(await command(stack, "list", "--limit", "2")).splitlines()
    assert table[1].split()[:2] == [dead_letter_topic(EVENTS), str(latest)]
    wrong = await command(stack, "list", "--since", "tomorrow")
    assert (wrong.returncode, "is not a duration" in wrong.stderr) == (2, True)


async def test_a_letter_is_shown_with_everything_and_nothing_of_it_reaches_the_terminal_raw(stack: Any, sender: AIOKafkaProducer) -> None:
    offset = await bury(sender, EVENTS, b'{"a": "\x1b[31mred"}\nline two', "is \x1b[2J wrong", ce_id="esc\x1b[0m")
    shown = ok(await command(stack, "show", EVENTS, str(offset)))
    assert "\x1b" not in shown
    assert f"{EVENTS}:1:5" in shown
    assert "mend it" in shown
    assert "\\x1b[31mred" in shown
    binary = await bury(sender, EVENTS, b"\xff\x00\x1bABC")
    assert "ff 00 1b 41 42 43" in ok(await command(stack, "show", EVENTS, str(binary)))
    data = json.loads(ok(await command(stack, "show", dead_letter_topic(EVENTS), str(binary), "-o", "json")))
    assert base64.b64decode(data["value_base64"]) == b"\xff\x00\x1bABC"
    missing = await command(stack, "show", EVENTS, "99999")
    assert (missing.returncode, "holds offsets" in missing.stderr) == (2, True)


async def test_several_are_sent_again_as_they_were_after_a_question(stack: Any, sender: AIOKafkaProducer) -> None:
    start = (await end_offsets(stack.settings.kafka, LOGS, [1]))[1]
    wanted = [await bury(sender, LOGS, f"again {number}".encode(), "pool is away", ce_id=f"again-{number}") for number in range(3)]
    await bury(sender, LOGS, b"other", "is something else", ce_id="other")
    null = await bury(sender, LOGS, None, ce_id="null")
    asked = await command(stack, "replay", LOGS, "--all", "--error", "Pool is Away", stdin="n\n")
    assert asked.returncode == 130
    assert "3 dead letters" in asked.stderr
    assert await appended(stack, LOGS, start) == []
    assert "3 sent again" in ok(await command(stack, "replay", LOGS, "--all", "--error", "pool is away", "--yes"))
    ok(await command(stack, "replay", LOGS, str(wanted[1]), str(null), stdin="y\n"))
    found = await appended(stack, LOGS, start)
    assert [(record.value, record.key, record.headers) for record in found] == [
        (value, b"k\xff", (("ce_id", identifier),))
        for value, identifier in [
            (b"again 0", b"again-0"), (b"again 1", b"again-1"), (b"again 2", b"again-2"), (b"again 1", b"again-1"), (None, b"null"),
        ]
    ]  # fmt: skip


async def test_what_would_be_stale_is_not_sent_and_the_remedy_is_said(stack: Any, sender: AIOKafkaProducer) -> None:
    start = (await end_offsets(stack.settings.kafka, COMMANDS, [1]))[1]
    old = {"ce_type": "io.opentinker.SubmitJob.v1", "ce_time": "2026-01-01T00:00:00Z", "ce_id": "stale"}
    offset = await bury(sender, COMMANDS, b"{}", **old)
    done = await command(stack, "replay", COMMANDS, str(offset))
    assert done.returncode == 2
    assert "submit its manifest anew" in done.stderr
    done = await command(stack, "replay", COMMANDS, "--all", "--yes")
    assert f"not offset {offset}" in done.stderr
    assert [record for record in await appended(stack, COMMANDS, start) if ("ce_id", b"stale") in record.headers] == []
    for wrong in (["--all", str(offset)], [], ["--error", "x", str(offset)], ["--all", "--value-file", "README.md"]):
        assert (await command(stack, "replay", COMMANDS, *wrong)).returncode == 2


async def test_the_oldest_are_dropped_after_their_names_were_said(stack: Any, sender: AIOKafkaProducer) -> None:
    offsets = [await bury(sender, ADMIN, b"x", f"reason {number}") for number in range(25)]
    before = str(offsets[-2])
    asked = await command(stack, "drop", ADMIN, "--before", before, stdin="n\n")
    assert asked.returncode == 130
    assert "reason 0" in asked.stderr
    assert "more" in asked.stderr
    assert "dropped from" in ok(await command(stack, "drop", ADMIN, "--before", before, "--yes"))
    left = json.loads(ok(await command(stack, "list", "--topic", ADMIN, "-o", "json")))
    assert [letter["offset"] for letter in left] == offsets[:-3:-1]
    assert "holds nothing before" in ok(await command(stack, "drop", ADMIN, "--before", before))
    assert (await command(stack, "drop", ADMIN, "--before", "999999")).returncode == 2
    none = await command(stack, "drop", CHECKPOINTS, "--before", "1")
    assert (none.returncode, "has no dead letters" in none.stderr) == (2, True)
