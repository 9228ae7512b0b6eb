"""The gate before a breaking change of published messages: it lets through what today's tree holds, and nothing that breaks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentinker.schemas import compatibility, publish
from opentinker.schemas.compatibility import ACCEPTED, breaks, read_published, written_for_others
from opentinker.schemas.generate import documents

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "schemas" / "published"

SCHEMA: dict[str, Any] = {
    "$defs": {"Phase": {"enum": ["Running", "Over"], "type": "string"}, "Inner": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    "type": "object",
    "required": ["uid"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 10, "minLength": 1},
        "count": {"type": "integer", "minimum": 0, "exclusiveMaximum": 100, "default": 0},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "phase": {"$ref": "#/$defs/Phase", "default": "Running"},
        "inner": {"$ref": "#/$defs/Inner"},
        "list": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        "by_name": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 5}},
    },
}


def changed(change: Callable[[dict[str, Any]], object], *, written: bool = False) -> list[str]:
    """What the gate says of one change."""
    now = copy.deepcopy(SCHEMA)
    change(now)
    found = breaks({"Thing.v1.json": SCHEMA}, {"Thing.v1.json": now}, frozenset({"Thing"} if written else ()))
    assert all(each.remedy and "Thing.v2" in each.text() for each in found)
    return [" ".join((each.field, each.what)) for each in found]


def put(*path: str, **values: Any) -> Callable[[dict[str, Any]], object]:
    def change(schema: dict[str, Any]) -> None:
        for part in path:
            schema = schema[part]
        schema.update(values)

    return change


def drop(*path: str) -> Callable[[dict[str, Any]], object]:
    def change(schema: dict[str, Any]) -> None:
        for part in path[:-1]:
            schema = schema[part]
        del schema[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(required=["uid", "count"]), "count is required now"),
        (put("properties", new={"type": "string"}), None),
        (lambda s: (put("properties", new={"type": "string"})(s), put(required=["uid", "new"])(s)), "new is required now"),
        (drop("properties", "count"), "count is gone"),
        (put("properties", "count", type="string"), "count no longer takes: integer"),
        (put("properties", "note", anyOf=[{"type": "string"}]), "note no longer takes: null"),
        (put("properties", "list", "items", type="integer"), "list[] no longer takes: number"),
        (put("$defs", "Phase", enum=["Running"]), "phase no longer takes: Over"),
        (put("properties", "note", anyOf=[{"type": "string", "enum": ["a"]}, {"type": "null"}]), "note takes only some values now: a"),
        (drop("properties", "count", "default"), "count has another default"),
        (put("properties", "count", default=1), "count has another default"),
        (put("properties", "uid", pattern="^[a-f]+$"), "uid has another pattern: ^[a-f]+$"),
        (put("properties", "note", anyOf=[{"type": "string", "pattern": "x"}, {"type": "null"}]), "note must match a pattern now: x"),
        (put("properties", "uid", maxLength=9), "uid has an upper limit now or a lower one: maxLength 9"),
        (put("properties", "uid", minLength=2), "uid has a lower limit now or a higher one: minLength 2"),
        (put("properties", "count", exclusiveMaximum=99), "count has an upper limit now or a lower one: exclusiveMaximum 99"),
        (put("properties", "count", minimum=1), "count has a lower limit now or a higher one: minimum 1"),
        (put("properties", "list", maxItems=3), "list has an upper limit now or a lower one: maxItems 3"),
        (put("properties", "by_name", "additionalProperties", maxLength=4), "by_name.* has an upper limit now or a lower one: maxLength 4"),
        (put("$defs", "Inner", required=["n"]), "inner.n is required now"),
        (put("$defs", "Inner", additionalProperties=False), "inner refuses unknown keys now"),
        (put("properties", "count", type="number"), None),
        (put("properties", "uid", maxLength=11), None),
        (put("$defs", "Phase", enum=["Running", "Over", "Paused"]), None),
        (put(required=[]), None),
        (put(title="other", description="other"), None),
    ],
)
def test_what_can_no_longer_be_read_is_a_break(change: Callable[[dict[str, Any]], object], said: str | None) -> None:
    assert changed(change) == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("$defs", "Phase", enum=["Running", "Over", "Paused"]), "phase also takes: Paused"),
        (put(required=[]), "uid may be missing now"),
        (put("properties", "list", "items", anyOf=[{"type": "number"}, {"type": "null"}]), "list[] also takes: null"),
        (put("properties", "count", type="number"), "count also takes: number"),
        (put("properties", "uid", maxLength=11), "uid has a higher upper limit or none: maxLength 10"),
        (drop("properties", "uid", "pattern"), "uid need no longer match its pattern: ^[a-z]+$"),
        (drop("$defs", "Phase", "enum"), "phase takes any value now: Running, Over"),
        (put("properties", new={"type": "string"}), None),
        (put("properties", "count", minimum=0), None),
    ],
)
def test_what_others_cannot_read_is_a_break_where_others_read(change: Callable[[dict[str, Any]], object], said: str | None) -> None:
    def edited(schema: dict[str, Any]) -> None:
        change(schema)
        if "anyOf" in schema["properties"]["list"]["items"]:
            schema["properties"]["list"]["items"].pop("type", None)

    assert changed(edited, written=True) == ([] if said is None else [said])
    assert changed(edited) == []


def test_messages_types_and_topics_that_are_gone_are_breaks() -> None:
    current = documents()
    asyncapi = copy.deepcopy(current["asyncapi.json"])
    del asyncapi["channels"]["jobs-events"]
    del asyncapi["channels"]["alerts"]["messages"]["NodeLost"]
    now = {name: each for name, each in current.items() if name != "Tick.v1.json"} | {"asyncapi.json": asyncapi}
    assert [each.text().partition(";")[0] for each in breaks(current, now)] == [
        "Tick.v1: the message is gone",
        "opentinker.alerts.v1: the message no longer carries io.opentinker.NodeLost.v1",
        "opentinker.jobs.events.v1: the message is gone",
    ]


def test_who_reads_what() -> None:
    others = written_for_others()
    assert {"JobStatus", "JobSubmitted", "NodeLost", "StartAttempt", "TrainingMetrics", "JobAccepted", "CheckpointCommitted"} <= others
    assert not {"SubmitJob", "Heartbeat", "AttemptEnded", "CordonNode", "Tick", "CancelTrainingJob"} & others


def test_todays_messages_fit_the_published_ones() -> None:
    published, accepted = read_published(PUBLISHED)
    assert len(published) > 30
    found = breaks(published, documents())
    assert {each.key() for each in found} == set(accepted), [each.text() for each in found]


def test_the_command_names_message_field_and_remedy_and_takes_what_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish.main(tmp_path) == 0
    assert compatibility.main(tmp_path) == 0
    path = tmp_path / "JobCancelled.v1.json"
    schema = json.loads(path.read_text())
    schema["properties"]["by_whom"] = {"type": "string"}
    path.write_text(json.dumps(schema))
    capsys.readouterr()
    assert compatibility.main(tmp_path) == 1
    assert (
        "JobCancelled.v1: by_whom is gone; make it optional, as wide as it was and with its default, or publish JobCancelled.v2"
        in capsys.readouterr().err
    )
    assert publish.main(tmp_path) == 1
    (tmp_path / ACCEPTED).write_text(json.dumps({"JobCancelled.v1 by_whom is gone": "nobody has read it yet"}))
    assert compatibility.main(tmp_path) == 0
    assert publish.main(tmp_path) == 0
    assert not (tmp_path / ACCEPTED).exists()
    (tmp_path / ACCEPTED).write_text(json.dumps({"JobCancelled.v1 by_whom is gone": "old"}))
    assert compatibility.main(tmp_path) == 1
    assert "is no break any more; remove it" in capsys.readouterr().err
    assert compatibility.main(tmp_path / "nowhere") == 1


def test_a_default_that_is_an_object_may_gain_fields_at_their_own_defaults() -> None:
    def document(fields: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
        part = {"type": "object", "properties": {name: {"type": "integer", "default": value} for name, value in fields.items()}}
        return {"M.v1.json": {"type": "object", "properties": {"part": {"$ref": "#/$defs/Part", "default": default}}, "$defs": {"Part": part}}}

    before = document({"a": 1}, {"a": 1})
    for fields, default, same in (
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False),
        ({"a": 1, "b": 2}, {"a": 2, "b": 2}, False),
    ):
        found = [each.what for each in breaks(before, document(fields, default), frozenset())]
        assert found == ([] if same else ["has another default"])
