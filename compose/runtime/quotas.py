"""Kafka's client quotas: what stands, and setting it. No client library that we ship has both calls, so one request is spelled out here.

Source: Kafka protocol, DescribeClientQuotas (48) and AlterClientQuotas (49), version 0; KIP-546.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from aiokafka.protocol.admin import DescribeClientQuotasRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Float64, Int16, Int32, Schema, String

__all__ = ["QuotaKey", "alter_quotas", "describe_quotas"]

QuotaKey = tuple[str, bool]  # (user, whether it is the quota of each client id of that user)

_ANY: Final = 2  # match_type of a filter: every name, and no name
_ENTITY: Final = Array(("entity_type", String("utf-8")), ("entity_name", String("utf-8")))


class _AlterClientQuotasResponseV0(Response):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 49
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("entries", Array(("error_code", Int16), ("error_message", String("utf-8")), ("entity", _ENTITY))),
    )


class _AlterClientQuotasRequestV0(RequestStruct):  # type: ignore[misc]
    API_KEY = 49
    API_VERSION = 0
    RESPONSE_TYPE = _AlterClientQuotasResponseV0
    SCHEMA = Schema(
        ("entries", Array(("entity", _ENTITY), ("ops", Array(("key", String("utf-8")), ("value", Float64), ("remove", Boolean))))),
        ("validate_only", Boolean),
    )


class _AlterClientQuotasRequest(Request[_AlterClientQuotasRequestV0]):  # type: ignore[misc]
    API_KEY = 49

    def __init__(self, entries: list[Any]) -> None:
        self._entries = entries

    def build(self, request_struct_class: type[_AlterClientQuotasRequestV0]) -> _AlterClientQuotasRequestV0:
        return request_struct_class(self._entries, False)


async def describe_quotas(admin: AIOKafkaAdminClient) -> dict[QuotaKey, dict[str, float]]:
    """Every quota of a user. Those of single client ids are not ours to judge and are left out."""
    response = await admin._send_request(DescribeClientQuotasRequest([("user", _ANY, None)], False))
    if response.error_code:
        raise for_code(response.error_code)(response.error_message)
    found: dict[QuotaKey, dict[str, float]] = {}
    for entity, values in response.entries:
        parts = dict(entity)
        user = parts.pop("user", None)
        if user is not None and parts in ({}, {"client-id": None}):
            found[user, bool(parts)] = dict(values)
    return found


async def alter_quotas(admin: AIOKafkaAdminClient, changes: Mapping[QuotaKey, Mapping[str, float | None]]) -> None:
    """Set values, or take away those that are None. Raises what Kafka answers for the first that it refuses."""
    if not changes:
        return
    entries = [
        (
            [("user", user)] + ([("client-id", None)] if per_client else []),
            [(key, value if value is not None else 0.0, value is None) for key, value in sorted(values.items())],
        )
        for (user, per_client), values in sorted(changes.items())
    ]
    response = await admin._send_to_controller(_AlterClientQuotasRequest(entries))
    for code, message, _ in response.entries:
        if code:
            raise for_code(code)(message)
