"""What a checkpoint must be: its members, its bounds, how it is cut into parts, and the digest that identifies it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from opentinker.schemas.errors import FieldError
from opentinker.schemas.registry_api import CHECKPOINT_BYTES_MAX, REQUIRED_MEMBERS, CheckpointFile, CommittedFile

__all__ = ["check_contents", "check_members", "check_parts", "manifest_digest", "object_key", "object_prefix", "plan_parts", "total_bytes"]

_MIB = 2**20
_PART_BYTES_MIN = 16 * _MIB  # S3's own floor is 5 MiB; fewer, larger parts upload faster
_PARTS_MAX = 1_000  # a file: S3 allows 10,000, a reply with that many URLs would be 5 MB


def check_members(files: Sequence[CheckpointFile]) -> list[FieldError]:
    """Mistakes of a set of files, before anything is uploaded."""
    errors: list[FieldError] = []
    names = [file.name for file in files]
    for position, name in enumerate(names):
        if name in names[:position]:
            errors.append(FieldError(field=f"files[{position}].name", message=f"{name!r} is there twice", remedy="name every file once"))
    for member in REQUIRED_MEMBERS:
        if member not in names:
            message = f"{member!r} is missing"
            errors.append(FieldError(field="files", message=message, remedy=f"a checkpoint holds at least {', '.join(REQUIRED_MEMBERS)}"))
    total = total_bytes(files)
    if total > CHECKPOINT_BYTES_MAX:
        errors.append(FieldError(field="files", message=f"are {total:,} bytes in all, more than {CHECKPOINT_BYTES_MAX:,}", remedy="save less"))
    return errors


def check_contents(begun: Sequence[CheckpointFile], committed: Sequence[CheckpointFile]) -> list[FieldError]:
    """Whether what is committed is what was begun: the same names, sizes and digests."""
    announced = {file.name: (file.size, file.sha256) for file in begun}
    shown = {file.name: (file.size, file.sha256) for file in committed}
    return [
        FieldError(field="files", message=f"{name!r} is not the file that was begun", remedy="begin the new contents under a new checkpoint_id")
        for name in sorted(announced.keys() | shown.keys())
        if announced.get(name) != shown.get(name)
    ]


def check_parts(files: Sequence[CommittedFile]) -> list[FieldError]:
    """Whether every file names the parts it was cut into, each once."""
    errors = []
    for position, file in enumerate(files):
        wanted = [number for number, _ in plan_parts(file.size)]
        if sorted(part.number for part in file.parts) != wanted:
            message = f"must name parts 1 to {len(wanted)} of {file.name!r}, each once"
            errors.append(FieldError(field=f"files[{position}].parts", message=message, remedy="upload every part that begin returned"))
    return errors


def plan_parts(size: int) -> list[tuple[int, int]]:
    """(number, bytes) of each part of a file of `size` bytes, in order; equal sizes but for the last."""
    part = max(_PART_BYTES_MIN, -(-size // _PARTS_MAX // _MIB) * _MIB)
    part = part if part * _PARTS_MAX >= size else part + _MIB
    return [(number, min(part, size - start)) for number, start in enumerate(range(0, size, part), start=1)]


def total_bytes(files: Sequence[CheckpointFile]) -> int:
    return sum(file.size for file in files)


def manifest_digest(*, global_step: int, files: Sequence[CheckpointFile], final: bool, outcome: str | None) -> str:
    """What makes two commits the same commit: `sha256:<64 hex>` over step, files and whether it is the end. Not over parts, metrics or lineage."""
    document = {
        "global_step": global_step,
        "final": final,
        "outcome": outcome,
        "files": sorted([file.name, file.size, file.sha256] for file in files),
    }
    return "sha256:" + hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def object_prefix(namespace: str, job_uid: str, checkpoint_id: str, salt: str) -> str:
    """Where a begun checkpoint's objects lie. The salt is new for every begin, so that collecting an old upload can never hit a newer one."""
    return f"checkpoints/{namespace}/{job_uid}/{checkpoint_id}/{salt}/"


def object_key(prefix: str, name: str) -> str:
    return prefix + name
