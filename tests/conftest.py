"""The real parts for tests: `stack` (Kafka, PostgreSQL, S3, topics made) and `full_stack` (every service too), each started once a run.

Each lives in a temporary home on ports of its own, so that two runs of pytest do not meet, and ends with pytest, however pytest ends. A part that
cannot be had skips the test on a laptop and fails it where CI=true.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from own_stack import Stack


def pytest_configure() -> None:
    """Heed Ctrl-C: in the background of a shell, as CI may run, it is ignored, and every program that a test starts and interrupts would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses a stack is marked so, and `make test-quick` leaves it out."""
    for item in items:
        if {"stack", "full_stack", "own_kafka", "own_full_stack"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.stack)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Kafka, PostgreSQL and S3 with all topics; no service of ours."""
    yield from _started(("kafka", "postgres", "s3"))


@pytest.fixture
def own_kafka() -> Iterator[Stack]:
    """Kafka alone, for one test: what it leaves on the topics meets nobody, and nothing is there before."""
    yield from _started(("kafka",))


@pytest.fixture(scope="session")
def full_stack() -> Iterator[Stack]:
    """Everything `opentinker up` starts."""
    yield from _started(())


@pytest.fixture
def own_full_stack() -> Iterator[Stack]:
    """Everything `opentinker up` starts, for one test that does to it what others would notice."""
    yield from _started(())


def _started(only: tuple[str, ...]) -> Iterator[Stack]:
    from opentinker.compose.local.errors import StackError
    from own_stack import own_stack

    with contextlib.ExitStack() as cleanup:
        try:
            stack = cleanup.enter_context(own_stack(*only))
        except StackError as error:
            if os.environ.get("CI", "").lower() in ("1", "true"):
                raise
            pytest.skip(f"the local stack cannot be had here: {error}")
        yield stack
