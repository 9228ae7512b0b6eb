"""Who may do what on Kafka: one table from roles to rights, from which users, access-control lists and quotas follow.

Rules: nobody writes a topic that another role owns (`written_by` in `topics.py`; a test compares them); a right is named once, and what Kafka implies is left
out (reading and writing imply describing; writing implies idempotent writing since Kafka 3). Services and administrators are principals of fixed names,
a tenant is one principal for its namespace. Pure values: `compose.runtime.access` applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from .topics import (
    ADMIN,
    ALERTS,
    CHECKPOINTS,
    COMMANDS,
    EVENTS,
    INPUT_TOPICS,
    JOURNAL,
    LOGS,
    METRICS,
    PLACEMENTS,
    REPLIES,
    REPORTS,
    REQUESTS,
    STATUS,
    TOPICS,
    dead_letter_topic,
    tenant_replies,
    tenant_requests,
)

__all__ = [
    "INGRESS_GROUP",
    "PRINCIPAL_PREFIX",
    "SCHEDULER_GROUP",
    "SERVICE_ROLES",
    "STATUS_TRANSACTIONS",
    "TENANT_GROUP",
    "Grant",
    "Operation",
    "Quota",
    "Resource",
    "Right",
    "Role",
    "grants",
    "is_ours",
    "principal",
    "roles",
    "tenant_role",
]

PRINCIPAL_PREFIX: Final = "opentinker-"
INGRESS_GROUP: Final = "opentinker-ingress"
SCHEDULER_GROUP: Final = "opentinker-scheduler"
TENANT_GROUP: Final = "opentinker-tenant-"  # then the namespace and whatever the tenant likes
STATUS_TRANSACTIONS: Final = "status-"  # then the partition
_TOPICS: Final = "opentinker."
_MIB: Final = 2**20


class Resource(StrEnum):
    """Kafka's names."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


class Operation(StrEnum):
    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    DELETE = "Delete"
    DESCRIBE = "Describe"
    DESCRIBE_CONFIGS = "DescribeConfigs"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """May do `operation` on the resource of that name, or on all whose names begin so."""

    resource: Resource
    name: str
    operation: Operation
    prefixed: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One entry of Kafka's access-control lists: always an allowance, from any host."""

    principal: str
    right: Right


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one broker gives a principal. `per_client`: to each client id of it, which suits a role of many processes that we wrote ourselves."""

    producer_bytes_per_s: int
    request_percent: int | None = None  # of one broker's request threads: 100 is one thread
    per_client: bool = False

    def values(self) -> dict[str, float]:
        """By Kafka's names."""
        found = {"producer_byte_rate": float(self.producer_bytes_per_s)}
        return found if self.request_percent is None else found | {"request_percentage": float(self.request_percent)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What one kind of client is for, and all it may do."""

    name: str
    summary: str
    rights: tuple[Right, ...]
    quota: Quota | None = None

    @property
    def principal(self) -> str:
        return principal(self.name)

    def topics(self, operation: Operation) -> frozenset[str]:
        """Names of single topics that it may read, write, …"""
        return frozenset(
            right.name for right in self.rights if right.resource is Resource.TOPIC and right.operation is operation and not right.prefixed
        )


def principal(role: str) -> str:
    """The user that a role logs in as."""
    return f"{PRINCIPAL_PREFIX}{role}"


def _read(*topics: str) -> tuple[Right, ...]:
    return tuple(Right(Resource.TOPIC, topic, Operation.READ) for topic in topics)


def _write(*topics: str) -> tuple[Right, ...]:
    return tuple(Right(Resource.TOPIC, topic, Operation.WRITE) for topic in topics)


def _letters(*topics: str) -> tuple[Right, ...]:
    """What a reader of these topics cannot read, it keeps, and says so."""
    return _write(*(dead_letter_topic(topic) for topic in topics), ALERTS)


def _drop(*topics: str) -> tuple[Right, ...]:
    """May delete the dead letters of these topics."""
    return tuple(Right(Resource.TOPIC, dead_letter_topic(topic), Operation.DELETE) for topic in topics)


def _group(name: str) -> tuple[Right, ...]:
    return (Right(Resource.GROUP, name, Operation.READ),)


# The one table. Groupless consumers need no group; every other right is used by some code of ours, which a test on a real broker shows.
SERVICE_ROLES: Final[tuple[Role, ...]] = (
    Role(
        name="gateway",
        summary="HTTP in, commands out; shows jobs, metrics and logs",
        rights=_write(COMMANDS) + _read(STATUS, METRICS, LOGS),
    ),
    Role(
        name="operator",
        summary="Kubernetes objects in, commands out",
        rights=_write(COMMANDS) + _read(STATUS),
    ),
    Role(
        name="ingress",
        summary="requests of other systems in, commands and replies out",
        rights=_read(REQUESTS, STATUS) + _group(INGRESS_GROUP) + _write(COMMANDS, REPLIES) + _letters(REQUESTS),
    ),
    Role(
        name="scheduler",
        summary="decides; alone writes the journal, placements, status and events",
        rights=(
            *_read(*INPUT_TOPICS, JOURNAL),
            *_group(SCHEDULER_GROUP),
            *_write(JOURNAL, PLACEMENTS, STATUS, EVENTS, REPORTS),
            *_letters(*INPUT_TOPICS),
            Right(Resource.TOPIC, JOURNAL, Operation.DELETE),  # it trims its own past
            Right(Resource.TRANSACTIONAL_ID, STATUS_TRANSACTIONS, Operation.WRITE, prefixed=True),
        ),
    ),
    Role(
        name="replica",
        summary="folds the journal to answer questions; writes nothing",
        rights=_read(JOURNAL),
    ),
    Role(
        name="agent",
        summary="runs attempts on a node",
        rights=_read(PLACEMENTS) + _write(REPORTS, METRICS, LOGS),
        quota=Quota(producer_bytes_per_s=20 * _MIB, per_client=True),
    ),
    Role(
        name="registry",
        summary="remembers: projects events, metrics, logs and alerts; tells of checkpoints",
        rights=_read(EVENTS, METRICS, LOGS, ALERTS) + _write(CHECKPOINTS) + _letters(EVENTS, METRICS, LOGS, ALERTS),
    ),
    Role(
        name="publisher",
        summary="a system that signs its requests for the shared door, and sees every answer there",
        rights=_write(REQUESTS) + _read(REPLIES),
    ),
    Role(
        name="administrator",
        summary="makes topics, reads everything, drops dead letters, tells the scheduler about nodes, brakes and limits",
        rights=(
            *_write(ADMIN),
            *_drop(*(topic.name for topic in TOPICS.values() if topic.dead_letters)),
            *(
                Right(Resource.TOPIC, _TOPICS, operation, prefixed=True)
                for operation in (Operation.CREATE, Operation.READ, Operation.DESCRIBE_CONFIGS)
            ),
        ),
    ),
    Role(
        name="reader",
        summary="dashboards and other systems that watch every namespace",
        rights=_read(STATUS, EVENTS, METRICS, CHECKPOINTS, ALERTS),
    ),
)


def tenant_role(namespace: str) -> Role:
    """A namespace's own principal: it asks for jobs and reads the answers. It watches them through the gateway, since other topics hold all namespaces."""
    return Role(
        name=f"tenant-{namespace}",
        summary=f"asks for jobs of namespace {namespace}",
        rights=(
            *_write(tenant_requests(namespace)),
            *_read(tenant_replies(namespace)),
            # A dot ends the namespace's name, so that team-a may not use the groups of team-a-b.
            Right(Resource.GROUP, f"{TENANT_GROUP}{namespace}.", Operation.READ, prefixed=True),
        ),
        quota=Quota(producer_bytes_per_s=1 * _MIB, request_percent=50),
    )


def roles(namespaces: Iterable[str] = (), quotas: Mapping[str, Quota] | None = None) -> tuple[Role, ...]:
    """Every role of an installation, with what tenants' topics add; `quotas` replace the usual ones, by role, `tenant` being all tenants."""
    names = sorted(set(namespaces))
    found = [_with_tenants(role, names) for role in SERVICE_ROLES] + [tenant_role(name) for name in names]
    return tuple(_with_quota(role, quotas or {}) for role in found)


def _with_tenants(role: Role, namespaces: Iterable[str]) -> Role:
    requests = [tenant_requests(namespace) for namespace in namespaces]
    if role.name == "ingress":
        own = _read(*requests) + _write(*map(tenant_replies, namespaces), *map(dead_letter_topic, requests))
        return replace(role, rights=role.rights + own)
    return replace(role, rights=role.rights + _drop(*requests)) if role.name == "administrator" else role


def _with_quota(role: Role, quotas: Mapping[str, Quota]) -> Role:
    chosen = quotas.get(role.name) or (quotas.get("tenant") if role.name.startswith("tenant-") else None)
    return replace(role, quota=chosen) if chosen else role


def grants(wanted: Iterable[Role]) -> frozenset[Grant]:
    """Every entry of the access-control lists."""
    return frozenset(Grant(role.principal, right) for role in wanted for right in role.rights)


def is_ours(user: str, resource: str, name: str, prefixed: bool) -> bool:
    """Whether an entry that stands in Kafka concerns us: it is of one of our users, or reaches one of our resources."""
    if user.startswith(PRINCIPAL_PREFIX):
        return True
    beginnings = {Resource.TOPIC: _TOPICS, Resource.GROUP: PRINCIPAL_PREFIX, Resource.TRANSACTIONAL_ID: STATUS_TRANSACTIONS}
    ours = beginnings.get(Resource(resource)) if resource in set(Resource) else None
    return ours is not None and (name == "*" or name.startswith(ours) or (prefixed and ours.startswith(name)))
