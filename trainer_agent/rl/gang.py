"""How the replicas of a gang work as one: sums of gradients, exchange of small records, equal start, and bounded waits.

Three transports with one face:

- `SoloGang`: one replica, nothing to do.
- `SharedMemoryGang` (`shared_memory.py`): all replicas on one host.
- `GlooGang`: torch.distributed; the rendezvous of every gang, and the transport between hosts.

Results are the same bits on every rank, since every rank adds the same numbers in the same order; so weights that start equal stay equal.
A replica that is lost raises PeerLostError on the others within seconds: nobody waits for the dead.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

__all__ = ["Gang", "GlooGang", "PeerLostError", "SoloGang", "share", "shares"]

Float64Array = npt.NDArray[np.float64]


class PeerLostError(Exception):
    """Another replica died, left early, or could not be reached.

    `exit_code`: the one it left with, where it could say so, else 0. A gang fails for one reason, so the others leave with the same.
    """

    def __init__(self, message: str, exit_code: int = 0) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Gang(Protocol):
    """What training needs of its peers. All calls are collective: every rank makes the same ones in the same order."""

    rank: int
    world_size: int
    transport: str  # "solo", "shared-memory" or "gloo": reported, so that a slow one is noticed

    def all_reduce_(self, vector: Tensor) -> None:
        """Replace `vector` (float32, one dimension) by its sum over ranks."""

    def all_gather(self, record: Float64Array) -> Float64Array:
        """The records of all ranks, [world_size, *record.shape]; same shape on every rank."""

    def gather_bytes(self, blob: bytes) -> list[bytes]:
        """The blobs of all ranks in rank order, on every rank. For checkpoints: rare, any size."""

    def close(self, exit_code: int = 0) -> None:
        """Leave, and tell the others with what exit code if they still wait. Safe to call twice and after an error."""


class SoloGang:
    """A gang of one."""

    rank = 0
    world_size = 1
    transport = "solo"

    def all_reduce_(self, vector: Tensor) -> None:
        return

    def all_gather(self, record: Float64Array) -> Float64Array:
        return record[np.newaxis]

    def gather_bytes(self, blob: bytes) -> list[bytes]:
        return [blob]

    def close(self, exit_code: int = 0) -> None:
        return


class GlooGang:
    """A gang over torch.distributed with gloo. The order of gloo's sum is the same on every rank."""

    transport = "gloo"

    def __init__(self, rank: int, world_size: int, address: str, port: int, *, join_timeout_s: float, wait_timeout_s: float) -> None:
        """Meet the others at `address`:`port`, which rank 0 listens on. Raises PeerLostError when they do not come in `join_timeout_s`."""
        self.rank, self.world_size = rank, world_size
        try:
            store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=datetime.timedelta(seconds=join_timeout_s))
            wait = datetime.timedelta(seconds=wait_timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
        except (RuntimeError, ValueError, OSError) as error:
            raise PeerLostError(f"rank {rank} could not meet its gang of {world_size} at {address}:{port}: {_first_line(error)}") from error

    def all_reduce_(self, vector: Tensor) -> None:
        try:
            dist.all_reduce(vector)
        except RuntimeError as error:
            raise PeerLostError(f"a replica was lost: {_first_line(error)}") from error

    def all_gather(self, record: Float64Array) -> Float64Array:
        mine = torch.from_numpy(np.ascontiguousarray(record))
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(gathered, mine)
        except RuntimeError as error:
            raise PeerLostError(f"a replica was lost: {_first_line(error)}") from error
        return np.stack([part.numpy() for part in gathered])

    def gather_bytes(self, blob: bytes) -> list[bytes]:
        sizes = self.all_gather(np.array([float(len(blob))])).astype(np.int64).ravel()
        padded = np.zeros(-(-int(sizes.max()) // 8) * 8, dtype=np.uint8)
        padded[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
        rows = self.all_gather(padded.view(np.float64))  # gloo moves the bits as they are
        return [row.view(np.uint8)[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def close(self, exit_code: int = 0) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def share(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """This rank's part of `total` things, as [start, end); the first ranks have one more where it does not divide."""
    each, rest = divmod(total, world_size)
    start = rank * each + min(rank, rest)
    return start, start + each + (1 if rank < rest else 0)


def shares(total: int, world_size: int) -> Sequence[tuple[int, int]]:
    """All ranks' parts of `total`."""
    return [share(total, rank, world_size) for rank in range(world_size)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
