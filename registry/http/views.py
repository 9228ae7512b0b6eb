"""Rows as the JSON that the registry's API shows."""

from __future__ import annotations

from typing import Any

from ..blobs import BlobStore
from ..core.checkpoints import object_key

__all__ = ["checkpoint_view", "download_files", "model_view", "version_view"]


def checkpoint_view(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "checkpoint_id": row["checkpoint_id"],
        "job_uid": row["job_uid"],
        "namespace": row["namespace"],
        "attempt_number": row["attempt_number"],
        "lease_epoch": row["lease_epoch"],
        "global_step": row["global_step"],
        "digest": row["digest"],
        "size_bytes": row["size_bytes"],
        "files": _plain_files(row["files"]),
        "metrics": row["metrics"],
        "lineage": row["lineage"],
        "final": row["final"],
        "outcome": row["outcome"],
        "stop_reason": row["stop_reason"],
        "committed_at": row["committed_at"].isoformat(),
    }


def model_view(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "namespace": row["namespace"],
        "name": row["name"],
        "last_version": row["last_version"],
        "created_at": row["created_at"].isoformat(),
    }


def version_view(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "namespace": row["namespace"],
        "name": row["name"],
        "version": row["version"],
        "job_uid": row["job_uid"],
        "attempt_number": row["attempt_number"],
        "checkpoint_id": row["checkpoint_id"],
        "global_step": row["global_step"],
        "spec_digest": row["spec_digest"],
        "digest": row["digest"],
        "size_bytes": row["size_bytes"],
        "files": _plain_files(row["files"]),
        "stop_reason": row["stop_reason"],
        "metrics": row["metrics"],
        "lineage": row["lineage"],
        "created_at": row["created_at"].isoformat(),
    }


async def download_files(blobs: BlobStore, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The files with a URL each that anyone may GET for six hours."""
    return [{**file, "url": await blobs.download_url(object_key(row["object_prefix"], file["name"]))} for file in _plain_files(row["files"])]


def _plain_files(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": file["name"], "size": file["size"], "sha256": file["sha256"]} for file in files]
