"""The words of OpenTinker: manifest, messages, topics and codec. Pure: imports the standard library and pydantic only."""

from __future__ import annotations

from .errors import FieldError, InvalidManifest, InvalidMessage
from .manifest import JobSpec, TrainingJob, effective_values, parse_manifest, spec_digest
from .records import Envelope, InputRecord, Message, OutputRecord, decode, encode, job_uid_of
from .topics import TOPICS, accepted_types, dead_letter_topic, partition_of

__all__ = [
    "TOPICS",
    "Envelope",
    "FieldError",
    "InputRecord",
    "InvalidManifest",
    "InvalidMessage",
    "JobSpec",
    "Message",
    "OutputRecord",
    "TrainingJob",
    "accepted_types",
    "dead_letter_topic",
    "decode",
    "effective_values",
    "encode",
    "job_uid_of",
    "parse_manifest",
    "partition_of",
    "spec_digest",
]
