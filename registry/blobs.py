"""Objects in S3: presigned multipart uploads, verification by reading back, and removal by prefix.

Rules: addressing by path and signature v4 (without them a presigned part was refused, DESIGN.md §9); what a client says about its upload is never
believed: size and SHA-256 come from reading the object.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aioboto3
import structlog
from botocore.config import Config
from botocore.exceptions import ClientError
from opentinker.compose.runtime.settings import S3Settings

__all__ = ["BlobStore", "Mismatch", "UploadRefused", "open_blob_store"]

_URL_LIFETIME_S = 6 * 3600  # how long an upload of one checkpoint may take at most
_READ_BYTES = 1 * 2**20
_READERS_MAX = 4  # verifications at a time: each streams a whole object
_CALLS_MAX = 16  # small calls at a time


class UploadRefused(Exception):
    """The store does not make an object of these parts: wrong etag, missing or too small part."""


class Mismatch(Exception):
    """The object is not what was announced. The text says how."""


class BlobStore:
    """One bucket. Every key is the caller's."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client, self._bucket = client, bucket
        self._readers = asyncio.Semaphore(_READERS_MAX)
        self._calls = asyncio.Semaphore(_CALLS_MAX)

    async def ensure_bucket(self) -> None:
        try:
            await self._client.head_bucket(Bucket=self._bucket)
        except ClientError as error:
            if _code(error) not in {"404", "NoSuchBucket"}:
                raise
            await self._client.create_bucket(Bucket=self._bucket)
            structlog.get_logger().info("bucket made", bucket=self._bucket)

    async def answers(self) -> None:
        """Raises unless the store answers for the bucket."""
        await self._client.head_bucket(Bucket=self._bucket)

    async def create_uploads(self, keys: Sequence[str]) -> list[str]:
        """An upload id for each key, in order."""

        async def create(key: str) -> str:
            async with self._calls:
                answer = await self._client.create_multipart_upload(Bucket=self._bucket, Key=key)
            return str(answer["UploadId"])

        return list(await asyncio.gather(*(create(key) for key in keys)))

    async def part_url(self, key: str, upload_id: str, number: int) -> str:
        parameters = {"Bucket": self._bucket, "Key": key, "UploadId": upload_id, "PartNumber": number}
        return str(await self._client.generate_presigned_url("upload_part", Params=parameters, ExpiresIn=_URL_LIFETIME_S))

    async def download_url(self, key: str) -> str:
        return str(await self._client.generate_presigned_url("get_object", Params={"Bucket": self._bucket, "Key": key}, ExpiresIn=_URL_LIFETIME_S))

    async def complete(self, key: str, upload_id: str, parts: Sequence[tuple[int, str]]) -> None:
        """Make the object of its parts. Doing it again is harmless. Raises UploadRefused."""
        listed = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(parts)]
        try:
            async with self._calls:
                await self._client.complete_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed})
        except ClientError as error:
            if _code(error) == "NoSuchUpload":
                return  # completed by an earlier try, or never uploaded: reading it back tells
            if _status(error) < 500:
                raise UploadRefused(f"the store refused it ({_code(error)})") from None
            raise

    async def verify(self, key: str, size: int, sha256: str) -> None:
        """Read the object and compare. Raises Mismatch."""
        async with self._readers:
            try:
                answer = await self._client.get_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if _code(error) in {"NoSuchKey", "404"}:
                    raise Mismatch("is not in the store") from None
                raise
            body = answer["Body"]
            try:
                if answer["ContentLength"] != size:
                    raise Mismatch(f"has {answer['ContentLength']:,} bytes in the store, {size:,} were announced")
                digest, count = hashlib.sha256(), 0
                async for chunk in body.iter_chunks(_READ_BYTES):
                    count += len(chunk)
                    if len(chunk) > 65_536:
                        await asyncio.to_thread(digest.update, chunk)  # hashing lets the event loop go on
                    else:
                        digest.update(chunk)
            finally:
                body.close()
        if count != size or digest.hexdigest() != sha256:
            raise Mismatch(f"has SHA-256 {digest.hexdigest()} in the store, {sha256} was announced")

    async def discard(self, prefix: str) -> int:
        """Abort every upload and delete every object below the prefix; returns how many there were. Doing it again is harmless."""
        assert prefix.count("/") >= 4, "a prefix names one checkpoint"
        removed = 0
        async for key, upload_id in self._uploads_below(prefix):
            with contextlib.suppress(self._client.exceptions.NoSuchUpload):
                await self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
            removed += 1
        async for key in self.keys_below(prefix):
            await self._client.delete_object(Bucket=self._bucket, Key=key)
            removed += 1
        return removed

    async def _uploads_below(self, prefix: str) -> AsyncIterator[tuple[str, str]]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
        async for page in pages:
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(prefix):
                    yield upload["Key"], upload["UploadId"]

    async def keys_below(self, prefix: str) -> AsyncIterator[str]:
        async for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                yield entry["Key"]


@contextlib.asynccontextmanager
async def open_blob_store(settings: S3Settings) -> AsyncIterator[BlobStore]:
    """A store whose client lives as long as the block."""
    session = aioboto3.Session(
        aws_access_key_id=settings.access_key_id.get_secret_value() or None,
        aws_secret_access_key=settings.secret_access_key.get_secret_value() or None,
        region_name=settings.region,
    )
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path"},
        connect_timeout=5,
        read_timeout=60,
        retries={"max_attempts": 3, "mode": "standard"},
        max_pool_connections=32,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    async with session.client("s3", endpoint_url=settings.endpoint_url or None, config=config) as client:
        yield BlobStore(client, settings.bucket)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))
