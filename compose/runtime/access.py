"""The table of rights on a real Kafka: what stands there, how it differs from the table, and making it so.

Users log in by SCRAM-SHA-512; their passwords live in files of mode 0600, one a user, and are never shown. Applying is idempotent: what is missing is added,
what stands beyond the table is told, and removed only when asked. Needs confluent-kafka (extra `access`), whose admin client has the calls for
access-control lists and SCRAM users that aiokafka lacks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiokafka.errors import ClusterAuthorizationFailedError, for_code
from aiokafka.protocol.admin import DescribeAclsRequest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from opentinker.schemas.access import PRINCIPAL_PREFIX, Grant, Role, grants, is_ours

from . import kafka
from .quotas import QuotaKey, alter_quotas, describe_quotas
from .secrets import read_secret
from .settings import KafkaSettings

__all__ = ["AccessError", "Difference", "Entry", "Standing", "apply", "compare", "entries", "passwords", "quotas_of", "read_standing"]

_TIMEOUT_S = 20.0
_ITERATIONS: Final = 8192  # of SCRAM; Kafka allows 4,096 to 16,384, and the passwords are random

# Kafka's numbers and the words of its tools.
_RESOURCES: Final = {
    ResourceType.TOPIC: "topic",
    ResourceType.GROUP: "group",
    ResourceType.TRANSACTIONAL_ID: "transactional-id",
    ResourceType.BROKER: "cluster",
}
_OPERATIONS: Final = {operation: "".join(word.capitalize() for word in operation.name.split("_")) for operation in AclOperation}


class AccessError(Exception):
    """Kafka did not do what was asked. The text says what and the remedy."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Entry:
    """One line of Kafka's access-control lists, whoever wrote it."""

    user: str
    operation: str  # as Kafka's tools write it: Read, DescribeConfigs, All
    resource: str  # topic, group, transactional-id, cluster
    name: str
    prefixed: bool = False
    allowed: bool = True
    host: str = "*"

    def text(self) -> str:
        which = f"{self.resource}s that begin with {self.name}" if self.prefixed else f"{self.resource} {self.name}"
        where = "" if self.host == "*" else f" from {self.host}"
        return f"{self.user} {'may' if self.allowed else 'must not'} {self.operation} {which}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What stands in Kafka and concerns us."""

    users: frozenset[str]
    entries: frozenset[Entry]
    quotas: Mapping[QuotaKey, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What the table has and Kafka has not, and the other way round."""

    users: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    quotas: Mapping[QuotaKey, Mapping[str, float]] = field(default_factory=dict)
    users_beyond: tuple[str, ...] = ()
    entries_beyond: tuple[Entry, ...] = ()
    quotas_beyond: Mapping[QuotaKey, Mapping[str, float]] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """In words, a line each."""
        found = [f"user {user}" for user in self.users]
        return found + [entry.text() for entry in self.entries] + [quota_text(key, values) for key, values in sorted(self.quotas.items())]

    def beyond(self) -> list[str]:
        found = [f"user {user}" for user in self.users_beyond]
        return (
            found + [entry.text() for entry in self.entries_beyond] + [quota_text(key, values) for key, values in sorted(self.quotas_beyond.items())]
        )


def quota_text(key: QuotaKey, values: Mapping[str, float]) -> str:
    user, per_client = key
    return f"quota of {'each client of ' if per_client else ''}{user}: " + ", ".join(f"{name}={value:.0f}" for name, value in sorted(values.items()))


def entries(wanted: Iterable[Grant]) -> frozenset[Entry]:
    """The table's grants as Kafka writes them."""
    return frozenset(
        Entry(
            user=grant.principal,
            operation=grant.right.operation.value,
            resource=grant.right.resource.value,
            name=grant.right.name,
            prefixed=grant.right.prefixed,
        )
        for grant in wanted
    )


def quotas_of(wanted: Iterable[Role]) -> dict[QuotaKey, dict[str, float]]:
    return {(role.principal, role.quota.per_client): role.quota.values() for role in wanted if role.quota is not None}


def compare(wanted: Sequence[Role], standing: Standing) -> Difference:
    """How Kafka differs from the table. Pure."""
    users, lines, quotas = {role.principal for role in wanted}, entries(grants(wanted)), quotas_of(wanted)
    standing_quotas = {key: dict(values) for key, values in standing.quotas.items()}
    return Difference(
        users=tuple(sorted(users - standing.users)),
        entries=tuple(sorted(lines - standing.entries)),
        quotas={key: values for key, values in quotas.items() if standing_quotas.get(key) != values},
        users_beyond=tuple(sorted(standing.users - users)),
        entries_beyond=tuple(sorted(standing.entries - lines)),
        quotas_beyond={key: values for key, values in standing_quotas.items() if key not in quotas},
    )


def passwords(directory: Path, users: Iterable[str]) -> dict[str, str]:
    """Each user's password from its file, made first where there is none. Raises SettingsError for a file that others can read."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = {}
    for user in users:
        path = directory / user
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        found[user] = read_secret(path, f"password of {user}")
    return found


async def read_standing(settings: KafkaSettings) -> Standing:
    """Ask Kafka. Raises AccessError, or aiokafka's error when it cannot be reached at all."""
    async with _aiokafka_admin(settings) as admin:  # first: it says in time, and in words, why nobody answers
        await _check_authorizer(admin)
        quotas = await describe_quotas(admin)
    client = _client(settings)
    filter_ = AclBindingFilter(ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY)
    found = await _answer(client.describe_acls(filter_, request_timeout=_TIMEOUT_S), "the access-control lists could not be read")
    credentials = await _answer(client.describe_user_scram_credentials(request_timeout=_TIMEOUT_S), "the users could not be read")
    return Standing(
        users=frozenset(user for user in credentials if user.startswith(PRINCIPAL_PREFIX)),
        entries=frozenset(entry for entry in map(_entry, found) if is_ours(entry.user, entry.resource, entry.name, entry.prefixed)),
        quotas={key: values for key, values in quotas.items() if key[0].startswith(PRINCIPAL_PREFIX)},
    )


async def _check_authorizer(admin: Any) -> None:
    """Raises AccessError where there is none: librdkafka takes that answer for an empty list."""
    any_ = 1  # resource, pattern, operation and permission alike
    response = await admin._send_request(DescribeAclsRequest(any_, None, any_, None, None, any_, any_))
    if response.error_code == KafkaError.SECURITY_DISABLED:
        raise AccessError(_REMEDIES[KafkaError.SECURITY_DISABLED])
    if response.error_code:
        raise for_code(response.error_code)(response.error_message)


async def apply(settings: KafkaSettings, wanted: Sequence[Role], secrets_by_user: Mapping[str, str], *, prune: bool = False) -> Difference:
    """Make Kafka as the table says; returns what differed before. Passwords are written each time, so that the files are the truth."""
    difference = compare(wanted, await read_standing(settings))
    client = _client(settings)
    alterations: list[Any] = [
        UserScramCredentialUpsertion(user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS), password.encode())
        for user, password in sorted(secrets_by_user.items())
    ]
    if prune:
        alterations += [UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_512) for user in difference.users_beyond]
    if alterations:
        answers = client.alter_user_scram_credentials(alterations, request_timeout=_TIMEOUT_S)
        await asyncio.gather(*(_answer(answer, f"user {user} could not be written") for user, answer in answers.items()))
    # Allowances before quotas and removals: a service that is already running is never without a right that it has in both tables.
    if difference.entries:
        made = client.create_acls([_binding(entry) for entry in difference.entries], request_timeout=_TIMEOUT_S)
        await asyncio.gather(*(_answer(answer, f"could not be allowed: {_entry(binding).text()}") for binding, answer in made.items()))
    known = [entry for entry in difference.entries_beyond if entry.resource in _RESOURCES.values()]
    if prune and known:
        removed = client.delete_acls([_filter(entry) for entry in known], request_timeout=_TIMEOUT_S)
        await asyncio.gather(*(_answer(answer, "an entry could not be removed") for answer in removed.values()))
    async with _aiokafka_admin(settings) as admin:
        await alter_quotas(admin, _quota_changes(difference, prune))
    return difference


def _quota_changes(difference: Difference, prune: bool) -> dict[QuotaKey, dict[str, float | None]]:
    """A quota of the table is set whole: values that it does not have go."""
    known = ("producer_byte_rate", "consumer_byte_rate", "request_percentage", "controller_mutation_rate")
    changes: dict[QuotaKey, dict[str, float | None]] = {key: {name: values.get(name) for name in known} for key, values in difference.quotas.items()}
    if prune:
        changes |= {key: dict.fromkeys(values) for key, values in difference.quotas_beyond.items()}
    return changes


@asynccontextmanager
async def _aiokafka_admin(settings: KafkaSettings) -> AsyncIterator[Any]:
    admin = kafka.admin_client(settings, "opentinker-access")
    try:
        await admin.start()
        yield admin
    except ClusterAuthorizationFailedError:
        raise AccessError(f"users and quotas may not be looked at: {_REMEDIES[KafkaError.CLUSTER_AUTHORIZATION_FAILED]}") from None
    finally:
        await admin.close()


def _client(settings: KafkaSettings) -> AdminClient:
    options: dict[str, Any] = {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": "opentinker-access",
        "security.protocol": settings.security_protocol,
        "log_level": 2,  # the library's own lines; what goes wrong comes back as an error
    }
    if settings.security_protocol.startswith("SASL"):
        options |= {
            "sasl.mechanism": settings.sasl_mechanism,
            "sasl.username": settings.sasl_username,
            "sasl.password": settings.sasl_password.get_secret_value(),
        }
    if settings.ssl_cafile:
        options["ssl.ca.location"] = str(settings.ssl_cafile)
    return AdminClient(options)


_REMEDIES: Final = {
    KafkaError.SECURITY_DISABLED: "this Kafka has no authorizer; set authorizer.class.name on its brokers, see docs/security.md",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "log in as a super user, or as one who may Alter and Describe the cluster",
}


async def _answer(future: Any, trouble: str) -> Any:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), _TIMEOUT_S + 5)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        raise AccessError(f"{trouble}: {cause.str()}; {_REMEDIES.get(cause.code(), 'see the log of the broker')}") from None
    except TimeoutError:
        raise AccessError(f"{trouble}: Kafka did not answer within {_TIMEOUT_S:.0f} s") from None


def _entry(binding: Any) -> Entry:
    return Entry(
        user=binding.principal.removeprefix("User:"),
        operation=_OPERATIONS[binding.operation],
        resource=_RESOURCES.get(binding.restype, binding.restype.name.lower()),
        name=binding.name,
        prefixed=binding.resource_pattern_type is ResourcePatternType.PREFIXED,
        allowed=binding.permission_type is AclPermissionType.ALLOW,
        host=binding.host,
    )


def _arguments(entry: Entry) -> tuple[Any, ...]:
    return (
        next(kind for kind, name in _RESOURCES.items() if name == entry.resource),
        entry.name,
        ResourcePatternType.PREFIXED if entry.prefixed else ResourcePatternType.LITERAL,
        f"User:{entry.user}",
        entry.host,
        next(operation for operation, name in _OPERATIONS.items() if name == entry.operation),
        AclPermissionType.ALLOW if entry.allowed else AclPermissionType.DENY,
    )


def _binding(entry: Entry) -> AclBinding:
    return AclBinding(*_arguments(entry))


def _filter(entry: Entry) -> AclBindingFilter:
    return AclBindingFilter(*_arguments(entry))
