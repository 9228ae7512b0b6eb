"""The words hold: golden messages of every published version decode for ever, and the generated documents are those of the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from opentinker.schemas import TOPICS, TrainingJob, parse_manifest
from opentinker.schemas.generate import documents
from opentinker.schemas.records import decode, encode
from opentinker.schemas.topics import accepted_types

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]
EVERY_TYPE = {ce_type: model for topic in TOPICS for ce_type, model in accepted_types(topic).items()}


def load(path: Path) -> tuple[tuple[tuple[str, bytes], ...], bytes, dict[str, object]]:
    stored = json.loads(path.read_text())
    return tuple((name, text.encode()) for name, text in stored["headers"].items()), json.dumps(stored["value"]).encode(), stored["value"]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_message_decodes_to_the_same_value(path: Path) -> None:
    headers, value, stored = load(path)
    envelope = decode(headers, value, EVERY_TYPE)
    assert type(envelope.message).__name__ == path.name.split(".")[0]
    again, _ = encode(envelope.message, id=envelope.id, source=envelope.source, time_ms=0)
    assert json.loads(again).items() >= {key: item for key, item in stored.items() if key != "spec"}.items()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_message_obeys_the_published_json_schema(path: Path) -> None:
    _, _, stored = load(path)
    schema = json.loads((ROOT / "schemas" / "generated" / path.name).read_text())
    jsonschema.validate(stored, schema, jsonschema.Draft202012Validator)


def test_every_message_of_every_topic_has_a_golden_one() -> None:
    wanted = {f"{model.__name__}.v{model.schema_version}.json" for model in EVERY_TYPE.values()}
    assert wanted == {path.name for path in GOLDEN.glob("*.json")}


def test_generated_documents_are_those_of_the_code() -> None:
    for name, document in documents().items():
        assert json.loads((ROOT / "schemas" / "generated" / name).read_text()) == document, (
            f"{name}: run python -m opentinker.schemas.generate schemas/generated"
        )


def test_example_manifest_obeys_schema_and_parser_alike() -> None:
    manifest = json.loads((ROOT / "examples" / "cartpole-v1.json").read_text())
    jsonschema.validate(manifest, documents()["TrainingJob.v1.json"], jsonschema.Draft202012Validator)
    assert isinstance(parse_manifest(manifest), TrainingJob)


def test_an_unknown_field_of_a_newer_sender_is_ignored() -> None:
    headers, value, stored = load(GOLDEN / "Heartbeat.v1.json")
    newer = json.dumps({**stored, "from_the_future": {"x": 1}}).encode()
    assert decode(headers, newer, EVERY_TYPE).message == decode(headers, value, EVERY_TYPE).message


def unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Paths of whole numbers without both bounds."""
    if isinstance(schema, list):
        for part in schema:
            yield from unbounded(part, path)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer" and not ({"maximum", "exclusiveMaximum"} & set(schema) and {"minimum", "exclusiveMinimum"} & set(schema)):
            yield path
        for key, part in schema.items():
            named = key in ("properties", "$defs")
            yield from (found for name in part for found in unbounded(part[name], f"{path}.{name}")) if named else unbounded(part, path)


@pytest.mark.parametrize("model", EVERY_TYPE.values(), ids=lambda model: model.__name__)
def test_every_whole_number_has_bounds(model: Any) -> None:
    """What is larger than a reader's store holds stops that reader for ever. Amounts of the manifest are bounded by their own validators, as text may be."""
    amounts = {"cpu", "memory", "every", "maxRuntime", "maxTime"}
    assert [path for path in unbounded(model.model_json_schema()) if path.rpartition(".")[2] not in amounts] == []
