"""Looking back with an administrator's own rights, on a broker that refuses what its table does not allow."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from command import PROGRAM, ROOT
from opentinker.compose.runtime import kafka
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import REPORTS
from secure_access import Access, granted_access

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
async def granted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Access]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    async with granted_access(tmp_path_factory.mktemp("history-rights"), ()) as made:
        yield made


async def test_an_administrator_sees_and_drops_and_sends_again_only_as_one_who_may(granted: Access, tmp_path: Path) -> None:
    async def run(role: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = granted.environment(role, tmp_path)
        return await asyncio.to_thread(
            subprocess.run, [str(PROGRAM), *words], capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=60
        )

    record = InputRecord(topic=REPORTS, partition=1, offset=5, append_time_ms=1, key=b"default", value=b"{}", headers=(("ce_id", b"a"),))
    letter, _ = dead_letter(record, [FieldError(field="node", message="is missing", remedy="add it")], source="test", time_ms=1)
    sender = kafka.producer(granted.of("scheduler"), "test-letters")
    await sender.start()
    try:
        await (await kafka.send(sender, letter))
    finally:
        await sender.stop()

    listed = await run("administrator", "dlq", "list", "-o", "json")
    assert (listed.returncode, [each["offset"] for each in json.loads(listed.stdout)]) == (0, [0]), listed.stderr
    refused = await run("administrator", "dlq", "replay", REPORTS, "0")
    assert (refused.returncode, "this Kafka user may not write opentinker.nodes.reports.v1" in refused.stderr) == (1, True), refused.stderr
    assert "Traceback" not in refused.stderr
    unknown = await run("administrator", "audit", "00000000-0000-4000-8000-000000000000")
    assert (unknown.returncode, "no topic holds a record" in unknown.stderr) == (3, True), unknown.stderr
    replayed = await run("administrator", "replay")
    assert (replayed.returncode, replayed.stdout.count("its journal is empty")) == (0, 4), replayed.stderr
    dropped = await run("administrator", "dlq", "drop", REPORTS, "--before", "1", "--yes")
    assert dropped.returncode == 0, dropped.stderr
    blind = await run("agent", "dlq", "list", "--topic", REPORTS)
    assert (blind.returncode, "this user may not see it" in blind.stderr) == (1, True), blind.stderr
