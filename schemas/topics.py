"""The topics: name, key, retention, who writes and who reads; and which partition a pool lives in.

One table for `ensure_topics`, AsyncAPI and the documentation. The scheduler's inputs and its journal share one partition count, fixed at creation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from .messages import admin, alerts, checkpoints, commands, jobs, placements, reports, requests, training
from .records import Message

__all__ = [
    "ADMIN",
    "ALERTS",
    "CHECKPOINTS",
    "COMMANDS",
    "DEAD_LETTERS_KEPT_MS",
    "EVENTS",
    "INPUT_TOPICS",
    "JOURNAL",
    "LOGS",
    "METRICS",
    "PLACEMENTS",
    "REPLIES",
    "REPORTS",
    "REQUESTS",
    "STATUS",
    "TOPICS",
    "Topic",
    "accepted_types",
    "dead_letter_topic",
    "murmur2",
    "namespace_of_topic",
    "partition_of",
    "tenant_replies",
    "tenant_requests",
    "topic_named",
    "topic_table",
]  # fmt: skip

ADMIN = "opentinker.scheduler.admin.v1"
ALERTS = "opentinker.alerts.v1"
CHECKPOINTS = "opentinker.checkpoints.v1"
COMMANDS = "opentinker.jobs.commands.v1"
EVENTS = "opentinker.jobs.events.v1"
JOURNAL = "opentinker.scheduler.journal.v1"
LOGS = "opentinker.attempts.logs.v1"
METRICS = "opentinker.training.metrics.v1"
PLACEMENTS = "opentinker.placements.v1"
REPLIES = "opentinker.jobs.replies.v1"
REPORTS = "opentinker.nodes.reports.v1"
REQUESTS = "opentinker.jobs.requests.v1"
STATUS = "opentinker.jobs.status.v1"

INPUT_TOPICS = (COMMANDS, REPORTS, ADMIN)  # of the scheduler; this is also the order in which one cycle steps them

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
DEAD_LETTERS_KEPT_MS = 30 * _DAY_MS
_MIB = 2**20


# The largest step: 256 + 512 commands (see the scheduler's policy) that each repeat a manifest of 64 KiB, and what changed.
JOURNAL_BYTES_MAX = 64 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """How one topic is made. `partitions` "inputs": the count of the scheduler's inputs."""

    name: str
    key: str
    written_by: str
    read_by: str
    messages: tuple[type[Message], ...]
    retention_ms: int = 7 * _DAY_MS
    cleanup: Literal["delete", "compact"] = "delete"
    log_append_time: bool = False
    partitions: int | Literal["inputs"] = 4
    message_bytes_max: int = 1 * _MIB
    dead_letters: bool = False
    summary: str = field(default="")

    def config(self) -> dict[str, str]:
        """The broker's topic configuration."""
        config = {"cleanup.policy": self.cleanup, "max.message.bytes": str(self.message_bytes_max)}
        if self.cleanup == "compact":
            config |= {"min.cleanable.dirty.ratio": "0.1", "segment.ms": str(_HOUR_MS)}
        else:
            config["retention.ms"] = str(self.retention_ms)
        config["message.timestamp.type"] = "LogAppendTime" if self.log_append_time else "CreateTime"
        return config


_JOB_EVENTS = (
    jobs.JobSubmitted, jobs.JobUnschedulable, jobs.AttemptPlaced, jobs.AttemptRunning, jobs.AttemptStopping, jobs.AttemptFinished,
    jobs.JobRequeued, jobs.JobCompleted, jobs.JobFailed, jobs.JobCancelled,
)  # fmt: skip

_ALERTS = (
    alerts.DeadLettered, alerts.DeadLettersGrow, alerts.InputHeldUp, alerts.NodeLost, alerts.NodeNameTaken, alerts.NodeRecovered,
    alerts.BrakeEngaged, alerts.BrakeReleased,
    alerts.JournalAdopted, alerts.SchedulerStuck,
)  # fmt: skip

_TABLE = (
    Topic(name=REQUESTS, key="any", written_by="other systems", read_by="ingress", messages=(requests.CancelTrainingJob,),
          log_append_time=True, message_bytes_max=4 * _MIB, dead_letters=True, summary="The public door: manifests to run, jobs to cancel"),
    Topic(name=REPLIES, key="ce_id of the request", written_by="ingress", read_by="whoever asked",
          messages=(requests.JobAccepted, requests.JobRejected), log_append_time=True, summary="One answer to every request"),
    Topic(name=COMMANDS, key="pool", written_by="gateway, operator, ingress", read_by="scheduler", messages=(commands.SubmitJob, commands.CancelJob),
          retention_ms=2 * _DAY_MS, log_append_time=True, partitions="inputs", dead_letters=True, summary="Authorised commands"),
    Topic(name=REPORTS, key="pool", written_by="agents, scheduler (ticks)", read_by="scheduler",
          messages=(reports.AgentStarted, reports.Heartbeat, reports.AttemptEnded, reports.Tick),
          retention_ms=2 * _DAY_MS, log_append_time=True, partitions="inputs", dead_letters=True, summary="Heartbeats and attempt reports"),
    Topic(name=ADMIN, key="pool", written_by="administrators", read_by="scheduler",
          messages=(admin.CordonNode, admin.UncordonNode, admin.AcknowledgeBrake, admin.SetNamespaceLimits),
          retention_ms=30 * _DAY_MS, log_append_time=True, partitions="inputs", dead_letters=True, summary="Configuration of pools and nodes"),
    Topic(name=JOURNAL, key="none", written_by="scheduler, one writer a partition", read_by="scheduler, its read replica", messages=(),
          retention_ms=-1, log_append_time=True, partitions="inputs", message_bytes_max=JOURNAL_BYTES_MAX, summary="What was decided, before anyone sees it"),
    Topic(name=PLACEMENTS, key="job_uid", written_by="scheduler", read_by="agents",
          messages=(placements.StartAttempt, placements.StopAttempt, placements.ResumeAttempt, placements.RefuseAgent),
          retention_ms=2 * _DAY_MS, log_append_time=True, summary="What agents shall run and stop"),
    Topic(name=STATUS, key="job_uid", written_by="scheduler (transactional)", read_by="gateway, operator, anyone", messages=(jobs.JobStatus,),
          cleanup="compact", summary="How each job stands"),
    Topic(name=EVENTS, key="job_uid", written_by="scheduler", read_by="registry, anyone", messages=_JOB_EVENTS,
          retention_ms=30 * _DAY_MS, log_append_time=True, dead_letters=True, summary="Everything that happened to jobs"),
    Topic(name=METRICS, key="job_uid", written_by="agents", read_by="registry, gateway, anyone", messages=(training.TrainingMetrics,),
          summary="Training metrics", dead_letters=True),
    Topic(name=LOGS, key="job_uid", written_by="agents", read_by="registry, gateway", messages=(training.LogLines,), retention_ms=3 * _DAY_MS,
          summary="Output of trainers, rate-bounded", dead_letters=True),
    Topic(name=CHECKPOINTS, key="job_uid", written_by="registry (outbox)", read_by="anyone",
          messages=(checkpoints.CheckpointCommitted, checkpoints.ModelVersionRegistered), retention_ms=30 * _DAY_MS,
          summary="Committed checkpoints and registered model versions"),
    Topic(name=ALERTS, key="subject", written_by="scheduler, ingress, registry", read_by="anyone",
          messages=_ALERTS, retention_ms=30 * _DAY_MS, partitions=1,
          dead_letters=True, summary="What somebody should look at"),
)  # fmt: skip

TOPICS: dict[str, Topic] = {topic.name: topic for topic in _TABLE}


def dead_letter_topic(name: str) -> str:
    return f"{name}.dlq"


def tenant_requests(namespace: str) -> str:
    """The door of one namespace: who may write it is Kafka's access control, so its name is the authority."""
    return _of_namespace(REQUESTS, namespace)


def tenant_replies(namespace: str) -> str:
    """Where the requests of one namespace are answered."""
    return _of_namespace(REPLIES, namespace)


def _of_namespace(topic: str, namespace: str) -> str:
    return f"{topic.removesuffix('.v1')}.{namespace}.v1"


_TENANT_TOPIC = re.compile(r"(opentinker\.jobs\.(?:requests|replies))\.([a-z0-9]([-a-z0-9]*[a-z0-9])?)(\.v1)")


def namespace_of_topic(name: str) -> str | None:
    """The namespace that a topic of requests or replies belongs to; None: it is everybody's."""
    found = _TENANT_TOPIC.fullmatch(name)
    return found[2] if found else None


def topic_named(name: str) -> Topic:
    """A topic of the table, or a namespace's own one. Raises KeyError."""
    found = _TENANT_TOPIC.fullmatch(name)
    if found is None:
        return TOPICS[name]
    # One partition: a tenant is bounded to some MB/s by its quota, and topics are many.
    return replace(TOPICS[found[1] + found[4]], name=name, partitions=1)


def topic_table(partitions: int, namespaces: Iterable[str] = ()) -> dict[str, tuple[int, dict[str, str]]]:
    """Every topic to make, dead-letter topics and those of namespaces included: name → (partition count, configuration)."""
    table: dict[str, tuple[int, dict[str, str]]] = {}
    own = [topic_named(name) for namespace in sorted(set(namespaces)) for name in (tenant_requests(namespace), tenant_replies(namespace))]
    for topic in (*_TABLE, *own):
        table[topic.name] = (partitions if topic.partitions == "inputs" else topic.partitions, topic.config())
        if topic.dead_letters:
            config = {
                "cleanup.policy": "delete",
                "retention.ms": str(DEAD_LETTERS_KEPT_MS),
                "max.message.bytes": str(2 * topic.message_bytes_max + _MIB),
            }
            table[dead_letter_topic(topic.name)] = (1, config)
    return table


def accepted_types(topic: str) -> dict[str, type[Message]]:
    """What may stand on a topic, by ce_type."""
    return {message.ce_type(): message for message in topic_named(topic).messages}


def partition_of(pool: str, partitions: int) -> int:
    """Where a pool lives. Set explicitly by every producer, since clients hash keys in different ways."""
    return (murmur2(pool.encode()) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """Kafka's default hash of a key (org.apache.kafka.common.utils.Utils.murmur2), as an unsigned 32-bit number."""
    length, m, mask = len(data), 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ length
    for i in range(0, length - length % 4, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    tail = data[length - length % 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)
