"""What tests against the real parts share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from scheduler_process import Publisher


@pytest.fixture
async def publisher(stack: Any) -> AsyncIterator[Publisher]:
    """Writes to the scheduler's inputs for a pool of the test's own, so that tests do not hear each other."""
    made = Publisher(stack.settings.kafka, f"pool-{uuid.uuid4().hex[:8]}")
    await made.start()
    yield made
    await made.stop()
