"""The synchronous client: the same calls on a private event loop, for scripts and terminals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from .aio import AsyncClient
from .calls import ATTEMPTS_MAX
from .connection import Connection
from .views import JobView

__all__ = ["Client"]

T = TypeVar("T")


class Client:
    """`with Client() as client: job = client.submit(manifest)`. See AsyncClient; use that one inside a running event loop."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        attempts: int = ATTEMPTS_MAX,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self._client = AsyncClient(url, api_key, timeout_s, attempts, on_wait)
        self._runner = asyncio.Runner()

    @property
    def connection(self) -> Connection:
        return self._client.connection

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._client.close())
        self._runner.close()

    def submit(self, manifest: Mapping[str, Any] | str | bytes, *, idempotency_key: str | None = None) -> JobView:
        return self._run(self._client.submit(manifest, idempotency_key=idempotency_key))

    def dry_run(self, manifest: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
        """Every effective value with its source; nothing is submitted."""
        return self._run(self._client.dry_run(manifest))

    def job(self, job: str, namespace: str = "default") -> JobView:
        return self._run(self._client.job(job, namespace))

    def jobs(self, *, namespace: str | None = None, phase: str | None = None) -> Iterator[JobView]:
        return self._each(self._client.jobs(namespace=namespace, phase=phase))

    def cancel(self, job: str, namespace: str = "default", reason: str = "") -> JobView:
        return self._run(self._client.cancel(job, namespace, reason))

    def explain(self, job: str, namespace: str = "default") -> dict[str, Any]:
        return self._run(self._client.explain(job, namespace))

    def events(self, job: str, namespace: str = "default") -> list[dict[str, Any]]:
        return self._run(self._client.events(job, namespace))

    def metrics(self, job: str, namespace: str = "default") -> Any:
        return self._run(self._client.metrics(job, namespace))

    def logs(self, job: str, namespace: str = "default", tail: int = 200) -> Any:
        return self._run(self._client.logs(job, namespace, tail))

    def nodes(self) -> list[dict[str, Any]]:
        return self._run(self._client.nodes())

    def limits(self) -> list[dict[str, Any]]:
        """Namespaces with waiting jobs or limits of their own, by pool."""
        return self._run(self._client.limits())

    def models(self, namespace: str = "default") -> list[dict[str, Any]]:
        return self._run(self._client.models(namespace))

    def model_versions(self, name: str, namespace: str = "default") -> list[dict[str, Any]]:
        """The newest hundred versions of a model with their lineage, newest first."""
        return self._run(self._client.model_versions(name, namespace))

    def model_version(self, name: str, version: int, namespace: str = "default") -> dict[str, Any]:
        """A version with its lineage, metrics and files."""
        return self._run(self._client.model_version(name, version, namespace))

    def checkpoints(self, job: str, namespace: str = "default") -> list[dict[str, Any]]:
        return self._run(self._client.checkpoints(job, namespace))

    def algorithms(self) -> list[dict[str, Any]]:
        return self._run(self._client.algorithms())

    def follow_metrics(self, job: str, namespace: str = "default") -> Iterator[dict[str, Any]]:
        return self._each(self._client.follow_metrics(job, namespace))

    def follow_logs(self, job: str, namespace: str = "default", tail: int = 200) -> Iterator[dict[str, Any]]:
        return self._each(self._client.follow_logs(job, namespace, tail))

    def wait(self, job: str, namespace: str = "default", timeout_s: float = 7 * 86400, poll_s: float = 1.0) -> JobView:
        return self._run(self._client.wait(job, namespace, timeout_s, poll_s))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> T:
            return await anext(items)

        while True:
            try:
                yield self._run(following())
            except StopAsyncIteration:
                return
