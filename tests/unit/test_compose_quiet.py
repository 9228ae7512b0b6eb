"""Libraries' repeated lines are thinned, never silenced."""

from __future__ import annotations

import logging

from opentinker.compose.runtime.quiet import Repeats


def record(line: int, text: str = "Unable to connect to %s", args: tuple[object, ...] = ("node 1",)) -> logging.LogRecord:
    return logging.LogRecord("aiokafka", logging.ERROR, "client.py", line, text, args, None)


def test_the_first_is_heard_and_the_rest_are_counted() -> None:
    now = 0.0
    repeats = Repeats(10, lambda: now)
    assert repeats.filter(record(1))
    assert [repeats.filter(record(1)) for _ in range(99)] == [False] * 99
    now = 10.0
    later = record(1)
    assert repeats.filter(later)
    assert later.getMessage() == "Unable to connect to node 1 (99 more like this were left out)"


def test_another_place_in_the_code_is_another_thing() -> None:
    repeats = Repeats(10, lambda: 0.0)
    assert repeats.filter(record(1))
    assert repeats.filter(record(2))


def test_a_text_with_percent_signs_survives() -> None:
    now = 0.0
    repeats = Repeats(1, lambda: now)
    repeats.filter(record(1, "%s", ("100% full",)))
    repeats.filter(record(1, "%s", ("100% full",)))
    now = 1.0
    heard = record(1, "%s", ("100% full",))
    assert repeats.filter(heard)
    assert heard.getMessage() == "100% full (1 more like this were left out)"
