"""Writes what other languages need: JSON Schema of the manifest and of every message, and one AsyncAPI 3 document.

`python -m opentinker.schemas.generate DIRECTORY`; the repository holds the result under `schemas/generated/`, and a test compares.
Source: https://www.asyncapi.com/docs/reference/specification/v3.0.0, https://json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .manifest import TrainingJob
from .messages.requests import SUBMIT_REQUEST_TYPE
from .records import Message
from .topics import REQUESTS, TOPICS, dead_letter_topic

__all__ = ["asyncapi", "documents", "write"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_HEADERS: dict[str, Any] = {
    "type": "object",
    "required": ["ce_specversion", "ce_id", "ce_type", "ce_source", "content-type"],
    "properties": {
        "ce_specversion": {"const": "1.0"},
        "ce_id": {"type": "string", "maxLength": 256, "description": "the same id from the same source is the same message"},
        "ce_type": {"type": "string"},
        "ce_source": {"type": "string", "maxLength": 256},
        "ce_time": {"type": "string", "format": "date-time"},
        "ce_subject": {"type": "string"},
        "content-type": {"const": "application/json"},
        "traceparent": {"type": "string", "description": "W3C Trace Context"},
    },
}


def json_schema(model: type[BaseModel], identifier: str) -> dict[str, Any]:
    return {"$schema": _DIALECT, "$id": identifier} | model.model_json_schema(by_alias=True, mode="validation")


def documents() -> dict[str, dict[str, Any]]:
    """Every document by file name."""
    found = {"TrainingJob.v1.json": json_schema(TrainingJob, "TrainingJob.v1.json")}
    for message in _messages():
        name = f"{message.__name__}.v{message.schema_version}.json"
        found[name] = json_schema(message, name)
    found["asyncapi.json"] = asyncapi()
    return found


def _messages() -> list[type[Message]]:
    by_name = {message.__name__: message for topic in TOPICS.values() for message in topic.messages}
    return [by_name[name] for name in sorted(by_name)]


def asyncapi() -> dict[str, Any]:
    """Channels, messages and who sends and receives them."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    components: dict[str, Any] = {
        message.__name__: _message(message.__name__, message.ce_type(), f"{message.__name__}.v{message.schema_version}.json", message.__doc__)
        for message in _messages()
    }
    components["SubmitTrainingJob"] = _message(
        "SubmitTrainingJob", SUBMIT_REQUEST_TYPE, "TrainingJob.v1.json", "Run this manifest. The value is the TrainingJob itself."
    )
    for topic in TOPICS.values():
        names = [message.__name__ for message in topic.messages] + (["SubmitTrainingJob"] if topic.name == REQUESTS else [])
        channel = topic.name.removeprefix("opentinker.").removesuffix(".v1").replace(".", "-")
        channels[channel] = {
            "address": topic.name,
            "description": f"{topic.summary}. Key: {topic.key}. Written by {topic.written_by}; read by {topic.read_by}."
            + (f" What cannot be read goes to {dead_letter_topic(topic.name)}." if topic.dead_letters else ""),
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
            "bindings": {"kafka": {"topic": topic.name, "topicConfiguration": {"cleanup.policy": [topic.cleanup]}, "bindingVersion": "0.5.0"}},
        }
        for action in ("send", "receive"):
            who = topic.written_by if action == "send" else topic.read_by
            operations[f"{action}-{channel}"] = {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": f"by {who}"}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "OpenTinker",
            "version": "1",
            "description": "Reinforcement learning as a service: everything that happens is an event on a topic. CloudEvents 1.0, Kafka binary mode.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": components},
    }


def _message(name: str, ce_type: str, schema: str, text: str | None) -> dict[str, Any]:
    headers = {**_HEADERS, "properties": {**_HEADERS["properties"], "ce_type": {"const": ce_type}}}
    summary = (text or "").strip().splitlines()[0] if text and not text.startswith("A value on a topic") else name
    return {
        "name": name,
        "title": name,
        "summary": summary,
        "contentType": "application/json",
        "headers": headers,
        "payload": {"$ref": f"./{schema}"},
    }


def write(directory: Path) -> list[Path]:
    """Write every document; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, document in documents().items():
        path = directory / name
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        paths.append(path)
    return paths


if __name__ == "__main__":
    write(Path(sys.argv[1]))
