"""Attempts: raising the fence, handing out tokens, and knowing who a token is.

The fence's row lock puts opens and commits of one job in one order: a commit of an older epoch either came before the open, and is then what the
open resumes from, or comes after it and is refused.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import structlog
from opentinker.schemas.registry_api import DownloadFile, OpenAttempt, OpenedAttempt, ResumeFrom

from .blobs import BlobStore
from .core.checkpoints import object_key
from .core.fence import Fence, Verdict, judge_open, may_write
from .errors import Conflict, Fenced, Unauthorised

__all__ = ["Holder", "lock_fence", "open_attempt", "who_holds"]

_NEWEST = "SELECT checkpoint_id FROM checkpoints WHERE job_uid = $1 AND expired_at IS NULL ORDER BY global_step DESC, committed_at DESC LIMIT 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whom an attempt token stands for."""

    job_uid: str
    namespace: str
    node: str
    fence: Fence


async def open_attempt(pool: Any, blobs: BlobStore, asked: OpenAttempt) -> OpenedAttempt:
    """Raise or join the fence; returns a new token and where to resume. Raises Fenced or Conflict."""
    token = secrets.token_urlsafe(32)  # 256 bits
    fence = Fence(attempt_number=asked.attempt_number, lease_epoch=asked.lease_epoch)
    async with pool.acquire() as connection, connection.transaction():
        row = await _locked_or_new(connection, asked)
        current = _fence(row) if row["attempt_number"] else None
        verdict = judge_open(current, fence)
        if verdict is Verdict.REFUSE:
            raise Fenced(
                f"attempt {asked.attempt_number} with lease epoch {asked.lease_epoch} is behind attempt {row['attempt_number']} "
                f"with lease epoch {row['lease_epoch']}; stop it"
            )
        if verdict is Verdict.RAISE:
            resume_id = await connection.fetchval(_NEWEST, asked.job_uid)
            await connection.execute(
                "UPDATE fences SET attempt_number = $2, lease_epoch = $3, resume_checkpoint_id = $4, opened_at = now() WHERE job_uid = $1",
                asked.job_uid, fence.attempt_number, fence.lease_epoch, resume_id,
            )  # fmt: skip
        else:
            resume_id = row["resume_checkpoint_id"]
        await connection.execute(
            "INSERT INTO attempt_tokens (token_hash, job_uid, attempt_number, lease_epoch, node, world_size) VALUES ($1, $2, $3, $4, $5, $6) "
            "ON CONFLICT (job_uid, attempt_number, lease_epoch, node) DO UPDATE SET token_hash = EXCLUDED.token_hash, created_at = now()",
            _hash(token), asked.job_uid, fence.attempt_number, fence.lease_epoch, asked.node, asked.world_size,
        )  # fmt: skip
        checkpoint = resume_id and await connection.fetchrow(
            "SELECT * FROM checkpoints WHERE job_uid = $1 AND checkpoint_id = $2", asked.job_uid, resume_id
        )
    structlog.get_logger().info(
        "attempt opened", job_uid=asked.job_uid, attempt_number=asked.attempt_number, lease_epoch=asked.lease_epoch, node=asked.node,
        verdict=verdict.value, resume=resume_id,
    )  # fmt: skip
    return OpenedAttempt(attempt_token=token, resume=await _resume(blobs, checkpoint) if checkpoint else None)


async def _locked_or_new(connection: Any, asked: OpenAttempt) -> Any:
    """The job's fence, locked; a row with attempt 0 is new. Raises Conflict if the uid stands for another job."""
    await connection.execute(
        "INSERT INTO fences (job_uid, namespace, model_name, spec_digest, attempt_number, lease_epoch) VALUES ($1, $2, $3, $4, 0, 0) "
        "ON CONFLICT (job_uid) DO NOTHING",
        asked.job_uid, asked.namespace, asked.model_name, asked.spec_digest,
    )  # fmt: skip
    row = await connection.fetchrow("SELECT * FROM fences WHERE job_uid = $1 FOR UPDATE", asked.job_uid)
    for name in ("namespace", "model_name", "spec_digest"):
        if row[name] != getattr(asked, name):
            raise Conflict(f"job {asked.job_uid} was opened with {name} {row[name]!r}, not {getattr(asked, name)!r}; a job does not change")
    return row


async def _resume(blobs: BlobStore, checkpoint: Any) -> ResumeFrom:
    files = [
        DownloadFile(
            name=file["name"],
            size=file["size"],
            sha256=file["sha256"],
            url=await blobs.download_url(object_key(checkpoint["object_prefix"], file["name"])),
        )
        for file in checkpoint["files"]
    ]
    return ResumeFrom(
        checkpoint_id=checkpoint["checkpoint_id"],
        global_step=checkpoint["global_step"],
        attempt_number=checkpoint["attempt_number"],
        files=tuple(files),
    )


async def who_holds(pool: Any, token: str) -> Holder:
    """Whom the token stands for, also when its epoch is over. Raises Unauthorised."""
    # Looked up by the hash of 256 random bits, so the time a comparison takes tells nothing about the token.
    row = token and await pool.fetchrow(
        "SELECT t.*, f.namespace FROM attempt_tokens t JOIN fences f USING (job_uid) WHERE token_hash = $1", _hash(token)
    )
    if not row:
        raise Unauthorised("the attempt token is missing or not valid; open the attempt again")
    return Holder(job_uid=row["job_uid"], namespace=row["namespace"], node=row["node"], fence=_fence(row))


async def lock_fence(connection: Any, holder: Holder) -> Any:
    """The job's fence row, locked until the transaction ends. Raises Fenced if the holder's epoch is over."""
    row = await connection.fetchrow("SELECT * FROM fences WHERE job_uid = $1 FOR UPDATE", holder.job_uid)
    if not may_write(_fence(row), holder.fence):
        raise Fenced(
            f"attempt {holder.fence.attempt_number} with lease epoch {holder.fence.lease_epoch} is over: attempt {row['attempt_number']} "
            f"with lease epoch {row['lease_epoch']} has been opened"
        )
    return row


def _fence(row: Any) -> Fence:
    return Fence(attempt_number=row["attempt_number"], lease_epoch=row["lease_epoch"])


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
