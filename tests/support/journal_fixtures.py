"""Fixtures for tests that run over both forms of the journal's log; a test module imports both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from journal_logs import JournalLog, KafkaJournalLog, MemoryJournalLog

__all__ = ["journal_log", "journal_place"]


@pytest.fixture(params=["memory", pytest.param("broker", marks=pytest.mark.stack)])
def journal_place(request: pytest.FixtureRequest) -> Any:
    """None, or the stack with its broker: started only where it is asked for."""
    return request.getfixturevalue("stack") if request.param == "broker" else None


@pytest.fixture
async def journal_log(journal_place: Any) -> AsyncIterator[JournalLog]:
    if journal_place is None:
        yield MemoryJournalLog()
    else:
        async with KafkaJournalLog(journal_place.settings.kafka) as made:
            yield made
