"""A gang of threads, for tests of what replicas compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opentinker.trainer_agent.rl.gang import Gang


class ThreadGang:
    """A gang of threads, for tests: same face, same order of sums."""

    transport = "threads"

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._slots = rank, world_size, barrier, slots

    def _exchange(self, mine: Any) -> list[Any]:
        self._slots[self.rank] = mine
        self._barrier.wait(20)
        everyone = list(self._slots)
        self._barrier.wait(20)
        return everyone

    def all_reduce_(self, vector: torch.Tensor) -> None:
        vector.copy_(torch.stack(self._exchange(vector.clone())).sum(0))

    def all_gather(self, record: np.ndarray) -> np.ndarray:
        return np.stack(self._exchange(record))

    def gather_bytes(self, blob: bytes) -> list[bytes]:
        return self._exchange(blob)

    def close(self, exit_code: int = 0) -> None:
        self._barrier.abort()


def in_gang(world_size: int, work: Callable[[Gang], Any]) -> list[Any]:
    """Run `work` on every rank; returns the results in rank order, or raises the first error."""
    barrier, slots, results = threading.Barrier(world_size), [None] * world_size, [None] * world_size

    def one(rank: int) -> None:
        gang = ThreadGang(rank, world_size, barrier, slots)
        try:
            results[rank] = work(gang)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results
