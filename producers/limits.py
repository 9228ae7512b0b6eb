"""How many jobs of a namespace may wait, as the scheduler's replica last said: enough for every door to refuse before Kafka is asked.

Best effort: it lags by some seconds, and without a replica nothing is known and nothing refused. The scheduler judges every submission itself; but it has
to remember each that it refuses for a day, so a flood is better refused here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import httpx

__all__ = ["QueueLimits"]

_INTERVAL_S: Final = 5.0
_TIMEOUT_S: Final = 2.0


class QueueLimits:
    """One writer: `run`."""

    def __init__(self, http: httpx.AsyncClient, replica_url: str, api_key: str) -> None:
        self._http, self._url, self._headers = http, replica_url.rstrip("/") + "/v1/limits", {"Authorization": f"Bearer {api_key}"}
        self._known: dict[tuple[str, str], int] = {}
        self._usual: int | None = None

    def queued_max(self, pool: str, namespace: str) -> int | None:
        """None: not known."""
        return self._known.get((pool, namespace), self._usual)

    async def run(self) -> None:
        """Ask until cancelled. What was known stays known while the replica is away."""
        while True:
            with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
                await self._ask()
            await asyncio.sleep(_INTERVAL_S)

    async def _ask(self) -> None:
        answer = (await self._http.get(self._url, headers=self._headers, timeout=_TIMEOUT_S)).raise_for_status().json()
        usual = int(answer["usual"]["queuedMax"])
        self._known = {(str(item["pool"]), str(item["namespace"])): int(item["queuedMax"]) for item in answer["limits"]}
        self._usual = usual
