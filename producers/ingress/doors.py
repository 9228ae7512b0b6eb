"""Which request topics the ingress reads: the shared one, and each tenant's that Kafka shows it.

A tenant whose topic is not made, or may not be read, would stop the reading of all others; it is left out, told, and looked for again.
"""

from __future__ import annotations

import time
from typing import Final

import structlog
from aiokafka.errors import KafkaError
from opentinker.compose.runtime.kafka import admin_client
from opentinker.compose.runtime.metrics import gauge
from opentinker.compose.runtime.settings import Settings
from opentinker.schemas.topics import REQUESTS, tenant_requests

__all__ = ["Doors"]

_INTERVAL_S: Final = 30.0
_CLOSED = gauge("ingress_tenants_unreadable", "Tenants whose requests are not read, because their topic is missing or access to it is")


class Doors:
    """Call `look` between batches; it asks Kafka only when a tenant is missing, and not often."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tenants = {tenant_requests(namespace): namespace for namespace in sorted(set(settings.ingress.namespaces))}
        self._open: set[str] = set()
        self._next_look = 0.0
        _CLOSED.set(len(self._tenants))

    @property
    def topics(self) -> list[str]:
        """What is to be subscribed to."""
        return [REQUESTS, *sorted(self._open)]

    async def look(self) -> bool:
        """Whether there is a topic more than before. Raises nothing when Kafka does not answer: the reader will say that."""
        closed = self._tenants.keys() - self._open
        if not closed or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _INTERVAL_S
        try:
            found = closed & await self._visible()
        except (KafkaError, OSError) as error:
            structlog.get_logger().warning("tenants' topics could not be looked for", error=repr(error))
            return False
        self._open |= found
        _CLOSED.set(len(closed - found))
        for topic in sorted(closed - found):
            remedy = "run opentinker topics ensure and opentinker access apply with OPENTINKER_INGRESS__NAMESPACES set as here"
            structlog.get_logger().error("requests of a tenant are not read", namespace=self._tenants[topic], topic=topic, remedy=remedy)
        return bool(found)

    async def _visible(self) -> set[str]:
        """Topics that exist and that this user may at least describe, which a right to read implies."""
        admin = admin_client(self._settings.kafka, "ingress-doors")
        try:
            await admin.start()
            return set(await admin.list_topics())
        finally:
            await admin.close()
