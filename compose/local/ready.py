"""Asking a program whether it is ready, by using it: metadata from Kafka, a query, an object written and read, a GET.

Each check answers None when ready, else the reason, in a second at most. Libraries are imported on use: `status` and `--help` need none of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentinker.compose.local.programs import Ready
    from opentinker.compose.runtime.settings import Settings

__all__ = ["ask", "ask_http", "s3_client"]

_ASK_TIMEOUT_S = 2.0


async def ask(ready: Ready, settings: Settings) -> str | None:
    """None if ready, else why not."""
    checks = {"kafka": _kafka, "postgres": _postgres, "s3": _s3}
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            if ready.how == "http":
                return await ask_http(ready.url)
            await checks[ready.how](settings)
    except TimeoutError:
        return "no answer yet"
    except Exception as error:  # whatever a library raises while the other side starts is a reason to ask again
        return f"{type(error).__name__}: {error}"
    return None


async def is_listening(address: str) -> bool:
    """Whether anybody accepts connections: cheaper than a client's first try, and quieter in its log."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def _kafka(settings: Settings) -> None:
    first = settings.kafka.bootstrap_servers.split(",")[0]
    if not await is_listening(first):
        raise ConnectionError(f"nothing listens on {first}")
    from opentinker.compose.runtime.kafka import admin_client

    admin = admin_client(settings.kafka, "opentinker-up")
    try:
        await admin.start()
        await admin.describe_cluster()
    finally:
        await admin.close()


async def _postgres(settings: Settings) -> None:
    import asyncpg

    connection = await asyncpg.connect(settings.postgres.dsn.get_secret_value(), timeout=_ASK_TIMEOUT_S)
    try:
        await connection.fetchval("SELECT 1")
    finally:
        await connection.close()


def s3_client(settings: Settings) -> Any:
    """A client as every service makes it: path addressing and s3v4, without which presigned part uploads fail."""
    import aioboto3
    from botocore.config import Config

    config = Config(signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 1}, connect_timeout=1, read_timeout=2)
    return aioboto3.Session().client(
        "s3",
        endpoint_url=settings.s3.endpoint_url,
        region_name=settings.s3.region,
        aws_access_key_id=settings.s3.access_key_id.get_secret_value(),
        aws_secret_access_key=settings.s3.secret_access_key.get_secret_value(),
        config=config,
    )


async def _s3(settings: Settings) -> None:
    address = urlsplit(settings.s3.endpoint_url)
    if address.port and not await is_listening(f"{address.hostname}:{address.port}"):
        raise ConnectionError(f"nothing listens on {address.netloc}")
    async with s3_client(settings) as client:
        try:
            await client.put_object(Bucket=settings.s3.bucket, Key=".opentinker/ready", Body=b"ready")
        except client.exceptions.NoSuchBucket:  # a store of somebody else, seen for the first time
            await client.create_bucket(Bucket=settings.s3.bucket)
            raise
        answer = await client.get_object(Bucket=settings.s3.bucket, Key=".opentinker/ready")
        if await answer["Body"].read() != b"ready":
            raise ConnectionError("read back another object than was written")


async def ask_http(url: str) -> str | None:
    """A plain GET over one connection: importing an HTTP client would take longer than the services need."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"GET {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        status = (await reader.readline()).decode("latin-1").split()
        body = (await reader.read(2_000)).decode("utf-8", "replace").partition("\r\n\r\n")[2]
    finally:
        writer.close()
    return None if len(status) > 1 and status[1] == "200" else f"answers {' '.join(status[1:])}: {body.strip()[:200]}"
