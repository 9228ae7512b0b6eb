"""Checkpoints: begun, uploaded straight to the store, verified, and only then recorded.

Blob first, record last: a crash anywhere before the last transaction leaves an `uploads` row and objects nobody sees, which the collector removes.
Lock order everywhere: fence, then upload, then model.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from opentinker.schemas.errors import FieldError
from opentinker.schemas.messages import ModelReference
from opentinker.schemas.registry_api import (
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointFile,
    CheckpointSettled,
    CommitCheckpoint,
    CommittedFile,
    FileUpload,
    PartUpload,
)

from .attempts import Holder, lock_fence
from .blobs import BlobStore, Mismatch, UploadRefused
from .core.checkpoints import check_contents, check_members, check_parts, manifest_digest, object_key, object_prefix, plan_parts, total_bytes
from .core.storable import storable
from .errors import Conflict, Gone, InvalidCheckpoint, NotFound
from .models import model_of_job, register_version
from .outbox import checkpoint_committed, put

__all__ = ["begin_checkpoint", "commit_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upload:
    """A begun checkpoint as its row says."""

    checkpoint_id: str
    global_step: int
    prefix: str
    files: tuple[CheckpointFile, ...]
    upload_ids: tuple[str | None, ...]


async def begin_checkpoint(pool: Any, blobs: BlobStore, holder: Holder, asked: BeginCheckpoint) -> CheckpointBegun:
    """URLs to upload each file to. Beginning the same again gives fresh URLs of the same upload.

    Raises InvalidCheckpoint, Fenced, Conflict (the id stands for other files) or Gone (it was collected).
    """
    if errors := check_members(asked.files):
        raise InvalidCheckpoint(errors)
    upload = await _record_begin(pool, holder, asked)
    if upload is None:
        return CheckpointBegun(uploads=(), committed=True)
    if None in upload.upload_ids:
        upload = await _make_uploads(pool, blobs, holder, upload)
    return CheckpointBegun(uploads=await _urls(blobs, upload))


async def _record_begin(pool: Any, holder: Holder, asked: BeginCheckpoint) -> _Upload | None:
    """The row that says what is about to be uploaded, new or as it is; None if the checkpoint is committed already."""
    async with pool.acquire() as connection, connection.transaction():
        await lock_fence(connection, holder)
        done = await _committed(connection, holder.job_uid, asked.checkpoint_id)
        if done:
            if check_contents(_files(done["files"]), asked.files) or done["global_step"] != asked.global_step:
                raise Conflict(f"checkpoint {asked.checkpoint_id} is committed with other contents; draw a new checkpoint_id")
            return None
        row = await _upload_row(connection, holder.job_uid, asked.checkpoint_id)
        if row:
            begun = _begun(row)
            same_epoch = (row["attempt_number"], row["lease_epoch"]) == (holder.fence.attempt_number, holder.fence.lease_epoch)
            if check_contents(begun.files, asked.files) or begun.global_step != asked.global_step or not same_epoch:
                raise Conflict(f"checkpoint {asked.checkpoint_id} was begun with other contents or by an earlier attempt; draw a new checkpoint_id")
            return begun
        prefix = object_prefix(holder.namespace, holder.job_uid, asked.checkpoint_id, secrets.token_hex(8))
        await connection.execute(
            "INSERT INTO uploads (job_uid, checkpoint_id, attempt_number, lease_epoch, global_step, object_prefix, files) "
            "VALUES ($1, $2, $3, $4, $5, $6, $7)",
            holder.job_uid, asked.checkpoint_id, holder.fence.attempt_number, holder.fence.lease_epoch, asked.global_step, prefix,
            [{**file.model_dump(), "upload_id": None} for file in asked.files],
        )  # fmt: skip
        nothing: tuple[str | None, ...] = (None,) * len(asked.files)
        return _Upload(checkpoint_id=asked.checkpoint_id, global_step=asked.global_step, prefix=prefix, files=asked.files, upload_ids=nothing)


async def _make_uploads(pool: Any, blobs: BlobStore, holder: Holder, upload: _Upload) -> _Upload:
    """Make multipart uploads in the store, then record their ids; ids that another call recorded in between win."""
    made = await blobs.create_uploads([object_key(upload.prefix, file.name) for file in upload.files])
    files = [{**file.model_dump(), "upload_id": upload_id} for file, upload_id in zip(upload.files, made, strict=True)]
    async with pool.acquire() as connection, connection.transaction():
        row = await _upload_row(connection, holder.job_uid, upload.checkpoint_id)
        if row is None or row["object_prefix"] != upload.prefix:
            raise Gone(f"checkpoint {upload.checkpoint_id} was collected while it began; draw a new checkpoint_id")
        if None not in _begun(row).upload_ids:
            return _begun(row)
        await connection.execute(
            "UPDATE uploads SET files = $3 WHERE job_uid = $1 AND checkpoint_id = $2", holder.job_uid, upload.checkpoint_id, files
        )
    return _Upload(
        checkpoint_id=upload.checkpoint_id, global_step=upload.global_step, prefix=upload.prefix, files=upload.files, upload_ids=tuple(made)
    )


async def _urls(blobs: BlobStore, upload: _Upload) -> tuple[FileUpload, ...]:
    uploads = []
    for file, upload_id in zip(upload.files, upload.upload_ids, strict=True):
        assert upload_id is not None
        key = object_key(upload.prefix, file.name)
        parts = [PartUpload(number=number, size=size, url=await blobs.part_url(key, upload_id, number)) for number, size in plan_parts(file.size)]
        uploads.append(FileUpload(name=file.name, upload_id=upload_id, parts=tuple(parts)))
    return tuple(uploads)


async def commit_checkpoint(pool: Any, blobs: BlobStore, holder: Holder, checkpoint_id: str, asked: CommitCheckpoint) -> CheckpointSettled:
    """Verify what was uploaded, then make it visible, with its model version and its events, in one transaction.

    Idempotent by id. Raises InvalidCheckpoint (parts, sizes or SHA-256 are wrong), Conflict, Fenced, NotFound or Gone.
    """
    upload = await _begun_or_settled(pool, holder, checkpoint_id, asked)
    if isinstance(upload, CheckpointSettled):
        return upload
    await _assemble_and_verify(pool, blobs, holder, upload, asked.files)
    settled = await _record(pool, holder, upload, asked)
    structlog.get_logger().info(
        "checkpoint committed", job_uid=holder.job_uid, checkpoint_id=checkpoint_id, global_step=upload.global_step, final=asked.final,
        attempt_number=holder.fence.attempt_number, model=settled.model and f"{settled.model.name}/{settled.model.version}",
    )  # fmt: skip
    return settled


async def _begun_or_settled(pool: Any, holder: Holder, checkpoint_id: str, asked: CommitCheckpoint) -> _Upload | CheckpointSettled:
    """What was begun; or the answer, if this very commit has succeeded before."""
    async with pool.acquire() as connection, connection.transaction():
        # Looked up before the fence: a commit that holds is told so, also to a holder that has been fenced since.
        if done := await _committed(connection, holder.job_uid, checkpoint_id):
            return await _settled(connection, holder.job_uid, done, asked)
        await lock_fence(connection, holder)
        row = await _upload_row(connection, holder.job_uid, checkpoint_id)
        if row is None and (done := await _committed(connection, holder.job_uid, checkpoint_id)):
            return await _settled(connection, holder.job_uid, done, asked)  # a commit of the same was faster while this one waited for the fence
    if row is None:
        raise NotFound(f"checkpoint {checkpoint_id} was not begun; begin it first")
    upload = _begun(row)
    errors = check_contents(upload.files, asked.files)
    if errors:
        raise Conflict(errors[0].text())
    if errors := check_parts(asked.files):
        raise InvalidCheckpoint(errors)
    if None in upload.upload_ids:
        raise NotFound(f"checkpoint {checkpoint_id} has no upload yet; begin it again")
    return upload


async def _assemble_and_verify(pool: Any, blobs: BlobStore, holder: Holder, upload: _Upload, files: Sequence[CommittedFile]) -> None:
    """Make objects of the parts and read each back. What is wrong is removed, and named in InvalidCheckpoint."""
    upload_ids = {file.name: upload_id for file, upload_id in zip(upload.files, upload.upload_ids, strict=True)}

    async def settle(position: int, file: CommittedFile) -> FieldError | None:
        key = object_key(upload.prefix, file.name)
        try:
            await blobs.complete(key, str(upload_ids[file.name]), [(part.number, part.etag) for part in file.parts])
            await blobs.verify(key, file.size, file.sha256)
        except (UploadRefused, Mismatch) as error:
            return FieldError(field=f"files[{position}]", message=f"{file.name!r} {error}", remedy="begin and upload the checkpoint again")
        return None

    found = await asyncio.gather(*(settle(position, file) for position, file in enumerate(files)))
    errors = [error for error in found if error is not None]
    if errors:
        await _abandon(pool, blobs, holder.job_uid, upload)
        raise InvalidCheckpoint(errors)


async def _abandon(pool: Any, blobs: BlobStore, job_uid: str, upload: _Upload) -> None:
    """Forget a begun checkpoint whose contents are wrong; the row goes last, so that a crash in between leaves it to the collector."""
    claimed = await pool.fetchval(
        "UPDATE uploads SET state = 'collecting' WHERE job_uid = $1 AND checkpoint_id = $2 AND object_prefix = $3 RETURNING 1",
        job_uid, upload.checkpoint_id, upload.prefix,
    )  # fmt: skip
    if claimed:
        await blobs.discard(upload.prefix)
        await pool.execute(
            "DELETE FROM uploads WHERE job_uid = $1 AND checkpoint_id = $2 AND object_prefix = $3", job_uid, upload.checkpoint_id, upload.prefix
        )


async def _record(pool: Any, holder: Holder, upload: _Upload, asked: CommitCheckpoint) -> CheckpointSettled:
    """The one transaction that makes a checkpoint visible."""
    now_ms = time.time_ns() // 1_000_000
    digest = manifest_digest(global_step=upload.global_step, files=asked.files, final=asked.final, outcome=asked.outcome)
    async with pool.acquire() as connection, connection.transaction():
        fence = await lock_fence(connection, holder)
        if done := await _committed(connection, holder.job_uid, upload.checkpoint_id):
            return await _settled(connection, holder.job_uid, done, asked)
        row = await _upload_row(connection, holder.job_uid, upload.checkpoint_id)
        if row is None or row["object_prefix"] != upload.prefix or row["state"] != "begun":
            raise Gone(f"the upload of checkpoint {upload.checkpoint_id} was collected; draw a new checkpoint_id and begin again")
        await connection.execute(
            "INSERT INTO checkpoints (job_uid, checkpoint_id, namespace, attempt_number, lease_epoch, global_step, digest, size_bytes, "
            "object_prefix, files, metrics, lineage, final, outcome, stop_reason) "
            "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
            holder.job_uid, upload.checkpoint_id, holder.namespace, holder.fence.attempt_number, holder.fence.lease_epoch, upload.global_step,
            digest, total_bytes(asked.files), upload.prefix, [file.model_dump() for file in upload.files], storable(asked.metrics),
            _lineage(asked), asked.final, asked.outcome, storable(asked.stop_reason),
        )  # fmt: skip
        await connection.execute("DELETE FROM uploads WHERE job_uid = $1 AND checkpoint_id = $2", holder.job_uid, upload.checkpoint_id)
        await put(connection, checkpoint_committed(holder, upload.checkpoint_id, upload.global_step, digest, asked, now_ms), now_ms)
        model = None
        if asked.final and asked.outcome == "Succeeded":
            model = await register_version(connection, fence, holder, upload.checkpoint_id, now_ms)
    return CheckpointSettled(checkpoint_id=upload.checkpoint_id, model=model)


def _lineage(asked: CommitCheckpoint) -> dict[str, Any]:
    try:
        lineage: dict[str, Any] = storable(asked.lineage)
    except ValueError as error:
        message, _, remedy = str(error).partition("; ")
        raise InvalidCheckpoint([FieldError(field="lineage", message=message, remedy=remedy)]) from None
    return lineage


async def _committed(connection: Any, job_uid: str, checkpoint_id: str) -> Any:
    return await connection.fetchrow("SELECT * FROM checkpoints WHERE job_uid = $1 AND checkpoint_id = $2", job_uid, checkpoint_id)


async def _settled(connection: Any, job_uid: str, done: Any, asked: CommitCheckpoint) -> CheckpointSettled:
    """The stored answer of a commit that was made before. Raises Conflict if it was another one."""
    digest = manifest_digest(global_step=done["global_step"], files=asked.files, final=asked.final, outcome=asked.outcome)
    if digest != done["digest"]:
        raise Conflict(
            f"checkpoint {done['checkpoint_id']} is committed with digest {done['digest']}, this one has {digest}; draw a new checkpoint_id"
        )
    model: ModelReference | None = None
    if done["final"] and done["outcome"] == "Succeeded":
        model = await model_of_job(connection, job_uid)
    return CheckpointSettled(checkpoint_id=done["checkpoint_id"], model=model)


async def _upload_row(connection: Any, job_uid: str, checkpoint_id: str) -> Any:
    return await connection.fetchrow("SELECT * FROM uploads WHERE job_uid = $1 AND checkpoint_id = $2 FOR UPDATE", job_uid, checkpoint_id)


def _begun(row: Any) -> _Upload:
    """The row as a value. Raises Gone if it is being collected."""
    if row["state"] != "begun":
        raise Gone(f"the upload of checkpoint {row['checkpoint_id']} is being collected; draw a new checkpoint_id and begin again")
    return _Upload(
        checkpoint_id=row["checkpoint_id"],
        global_step=row["global_step"],
        prefix=row["object_prefix"],
        files=_files(row["files"]),
        upload_ids=tuple(file["upload_id"] for file in row["files"]),
    )


def _files(stored: list[dict[str, Any]]) -> tuple[CheckpointFile, ...]:
    return tuple(CheckpointFile(name=file["name"], size=file["size"], sha256=file["sha256"]) for file in stored)
