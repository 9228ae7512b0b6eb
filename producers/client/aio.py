"""The asynchronous client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from . import calls
from .connection import find_connection
from .errors import JobFailedError, OpenTinkerError, UnavailableError, UnknownOutcomeError, UnreachableError, WaitTimeoutError
from .views import JobView

__all__ = ["AsyncClient"]

_STREAM_SILENCE_MAX_S = 60.0  # the gateway says something more often than that
_QUIET_S = 2.0  # a call that takes longer says why


class AsyncClient:
    """`async with AsyncClient() as client: job = await client.submit(manifest)`.

    Address and key come from arguments, `OPENTINKER_GATEWAY__URL` and `OPENTINKER_API_KEY`, or the local stack's files. Every call has a timeout;
    calls that do no harm twice are repeated, `attempts` in all. `on_wait` is told why, before a wait that makes a call longer than two seconds.
    Raises OpenTinkerError and its kinds.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        attempts: int = calls.ATTEMPTS_MAX,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.connection = find_connection(url, api_key)
        self._attempts, self._timeout_s, self._on_wait = attempts, timeout_s, on_wait
        headers = {"Authorization": f"Bearer {self.connection.api_key}", "Accept": "application/json"}
        self._http = httpx.AsyncClient(base_url=self.connection.url, headers=headers, timeout=timeout_s, trust_env=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(self, manifest: Mapping[str, Any] | str | bytes, *, idempotency_key: str | None = None) -> JobView:
        return JobView.model_validate(await self._send(calls.submit_job(manifest, idempotency_key=idempotency_key)))

    async def dry_run(self, manifest: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
        """Every effective value with its source; nothing is submitted."""
        return await self._object(calls.submit_job(manifest, dry_run=True))

    async def job(self, job: str, namespace: str = "default") -> JobView:
        """By uid, or the newest of a name."""
        return JobView.model_validate(await self._send(calls.get_job(job, namespace)))

    async def jobs(self, *, namespace: str | None = None, phase: str | None = None) -> AsyncIterator[JobView]:
        """All jobs that match, newest first, page by page."""
        cursor: str | None = None
        while True:
            page = await self._object(calls.list_jobs(namespace=namespace, phase=phase, cursor=cursor))
            for item in page["items"]:
                yield JobView.model_validate(item)
            cursor = page.get("cursor")
            if not cursor:
                return

    async def cancel(self, job: str, namespace: str = "default", reason: str = "") -> JobView:
        return JobView.model_validate(await self._send(calls.cancel_job(job, namespace, reason)))

    async def explain(self, job: str, namespace: str = "default") -> dict[str, Any]:
        return await self._object(calls.explain_job(job, namespace))

    async def events(self, job: str, namespace: str = "default") -> list[dict[str, Any]]:
        return _items(await self._send(calls.job_events(job, namespace)))

    async def metrics(self, job: str, namespace: str = "default") -> Any:
        return await self._send(calls.job_metrics(job, namespace))

    async def logs(self, job: str, namespace: str = "default", tail: int = 200) -> Any:
        return await self._send(calls.job_logs(job, namespace, tail=tail))

    async def nodes(self) -> list[dict[str, Any]]:
        return _items(await self._send(calls.list_nodes()))

    async def limits(self) -> list[dict[str, Any]]:
        """Namespaces with waiting jobs or limits of their own, by pool."""
        return _items(await self._send(calls.list_limits()))

    async def models(self, namespace: str = "default") -> list[dict[str, Any]]:
        return _items(await self._send(calls.list_models(namespace)))

    async def model_versions(self, name: str, namespace: str = "default") -> list[dict[str, Any]]:
        """The newest hundred versions of a model with their lineage, newest first."""
        return _items(await self._send(calls.model_versions(name, namespace)))

    async def model_version(self, name: str, version: int, namespace: str = "default") -> dict[str, Any]:
        """A version with its lineage, metrics and files."""
        return await self._object(calls.model_version(name, version, namespace))

    async def checkpoints(self, job: str, namespace: str = "default") -> list[dict[str, Any]]:
        return _items(await self._send(calls.job_checkpoints(job, namespace)))

    async def algorithms(self) -> list[dict[str, Any]]:
        return _items(await self._send(calls.list_algorithms()))

    async def follow_metrics(self, job: str, namespace: str = "default") -> AsyncIterator[dict[str, Any]]:
        """Samples as they come, until the job has ended. A reader that was away for long may miss some; `metrics` has them all."""
        async for event in self._stream(calls.job_metrics(job, namespace, stream=True)):
            yield event

    async def follow_logs(self, job: str, namespace: str = "default", tail: int = 200) -> AsyncIterator[dict[str, Any]]:
        """Log lines as they come, until the job has ended."""
        async for event in self._stream(calls.job_logs(job, namespace, tail=tail, follow=True)):
            yield event

    async def wait(self, job: str, namespace: str = "default", timeout_s: float = 7 * 86400, poll_s: float = 1.0) -> JobView:
        """The job once it has completed. Raises JobFailedError when it ended otherwise, WaitTimeoutError when it has not ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            view = await self.job(job, namespace)
            if view.status.phase == "Completed":
                return view
            if view.status.terminal:
                raise JobFailedError(view)
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(f"job {job} is still {view.status.phase} after {timeout_s:g} s")
            await asyncio.sleep(poll_s)

    async def _object(self, call: calls.Call) -> dict[str, Any]:
        answer = await self._send(call)
        if not isinstance(answer, dict):
            raise OpenTinkerError(f"{self.connection.url} answered something that is not an object; is it an OpenTinker gateway?")
        return answer

    async def _send(self, call: calls.Call) -> Any:
        began = time.monotonic()
        doubt: UnknownOutcomeError | None = None  # of an earlier try, which a later one's failure does not take away
        for attempt in range(self._attempts):
            last = attempt == self._attempts - 1
            try:
                response = await self._http.request(call.method, call.path, params=call.params, content=call.body, headers=call.headers)
            except httpx.HTTPError as error:
                if not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)):
                    doubt = doubt or _doubt(call)
                if last or not calls.may_retry(call, None):
                    text = f"no answer from {self.connection.url}: {_reason(error, self._timeout_s)}; is the gateway running? `opentinker up` starts a local one"
                    raise UnreachableError(f"{text}. {doubt}" if doubt else text) from None
                await self._wait(began, attempt, None, f"no answer yet ({_reason(error, self._timeout_s)})")
                continue
            if response.status_code < 400:
                return _json(response)
            failure = calls.failure_of(response.status_code, response.content)
            if last or not calls.may_retry(call, response.status_code, response.content):
                raise doubt if doubt is not None and isinstance(failure, UnavailableError) else failure
            if isinstance(failure, UnknownOutcomeError):
                doubt = failure
            await self._wait(began, attempt, response.headers.get("retry-after"), str(failure))
        raise AssertionError("the last attempt returns or raises")

    async def _wait(self, began: float, attempt: int, retry_after: str | None, why: str, attempts: int | None = None) -> None:
        delay_s = calls.delay_before_retry(attempt, retry_after, random.random())  # noqa: S311
        if self._on_wait is not None and time.monotonic() - began + delay_s > _QUIET_S:
            when = f" in {delay_s:.0f} s" if delay_s >= 1 else ""
            self._on_wait(f"{self.connection.url}: {why}; trying again{when} ({attempt + 2} of {attempts or self._attempts})")
        await asyncio.sleep(delay_s)

    async def _stream(self, call: calls.Call) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events as objects; a broken stream is taken up again where it stopped, a bounded number of times without news."""
        last_id, failures, heard = "", 0, time.monotonic()
        while True:
            why = "it ended the stream"
            headers = {**call.headers, "Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
            try:
                async with self._http.stream(call.method, call.path, params=call.params, headers=headers, timeout=_STREAM_SILENCE_MAX_S) as response:
                    if response.status_code >= 400:
                        raise calls.failure_of(response.status_code, await response.aread())
                    fields: dict[str, str] = {}
                    async for line in response.aiter_lines():
                        if not line:
                            if fields.get("event") == "end":
                                return
                            last_id, failures, heard = fields.get("id", last_id), 0, time.monotonic()
                            if "data" in fields and fields.get("event") != "resync":
                                yield json.loads(fields["data"])
                            fields = {}
                        elif not line.startswith(":"):
                            name, _, value = line.partition(":")
                            fields[name] = value.removeprefix(" ")
            except httpx.HTTPError as error:
                why = _reason(error, _STREAM_SILENCE_MAX_S)
            failures += 1
            if failures == calls.ATTEMPTS_MAX:
                raise UnreachableError(f"the stream from {self.connection.url} broke off ({why}); the job goes on without it")
            await self._wait(heard, failures - 1, None, why, calls.ATTEMPTS_MAX)


def _doubt(call: calls.Call) -> UnknownOutcomeError | None:
    """What a call that was sent and not answered leaves behind, if it asked for something to be done."""
    key = call.headers.get("Idempotency-Key")
    if call.method != "POST" or key is None:
        return None
    return UnknownOutcomeError(
        f"An earlier try was not answered, so it is not known whether this was accepted; send the same again with Idempotency-Key: {key}"
    )


def _json(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        raise OpenTinkerError(f"{response.url} answered something that is not JSON; is it an OpenTinker gateway?", response.status_code) from None


def _items(answer: Any) -> list[dict[str, Any]]:
    """A list, or the list inside a page."""
    if isinstance(answer, dict):
        answer = next((value for value in answer.values() if isinstance(value, list)), [])
    return list(answer or [])


def _reason(error: httpx.HTTPError, timeout_s: float) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"nothing came within {timeout_s:g} s"
    return str(error) or type(error).__name__
