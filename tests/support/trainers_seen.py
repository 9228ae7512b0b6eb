"""What /proc says about trainers: which attempt each process belongs to, and whether it works. For proof that two attempts of a job never train at once."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Seen", "TrainerWatch"]

_PART = re.compile(r"/parts/(?P<uid>[0-9a-f-]{36})-(?P<attempt>\d+)-(?P<epoch>\d+)/rank-(?P<rank>\d+)$")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Seen:
    """One trainer process: its attempt, and the instants (wall clock) at which it was seen to have used the processor since the look before."""

    pid: int
    job_uid: str
    attempt_number: int
    lease_epoch: int
    rank: int
    first: float
    last: float = 0.0
    worked: list[tuple[float, float]] = field(default_factory=list)  # (from, to) of intervals in which it used at least a fifth of a core
    ticks: int = 0


class TrainerWatch:
    """Looks every `interval_s` at all trainers below a directory. Paused trainers live and use no processor; those that train do."""

    def __init__(self, below: Path, interval_s: float = 0.2) -> None:
        self._below, self._interval_s = str(below.resolve()), interval_s
        self.seen: dict[tuple[int, str], Seen] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainer-watch", daemon=True)

    def __enter__(self) -> TrainerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def _watch(self) -> None:
        before = time.time()
        while not self._stop.wait(self._interval_s):
            now = time.time()
            for entry in os.scandir("/proc"):
                if entry.name.isdigit():
                    self._look(int(entry.name), before, now)
            before = now

    def _look(self, pid: int, before: float, now: float) -> None:
        try:
            directory = os.readlink(f"/proc/{pid}/cwd")
            if not directory.startswith(self._below) or (match := _PART.search(directory.removesuffix(" (deleted)"))) is None:
                return
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        if fields[0] in "ZX":
            return
        ticks = int(fields[11]) + int(fields[12])
        key = (pid, directory)
        found = self.seen.get(key)
        if found is None:
            found = self.seen[key] = Seen(
                pid, match["uid"], int(match["attempt"]), int(match["epoch"]), int(match["rank"]), first=now, ticks=ticks
            )  # fmt: skip
        elif (ticks - found.ticks) / _TICKS_PER_S >= 0.2 * (now - before):
            found.worked.append((before, now))
        found.ticks, found.last = ticks, now

    def overlaps(self, slack_s: float = 0.5) -> list[str]:
        """Sentences about jobs of which a lower epoch worked later than a higher one had begun to: none, if the leases do what they should.

        `slack_s`: an interval of looking, and what a trainer needs for the update it is in when the pause comes.
        """
        by_job: dict[str, dict[int, list[Seen]]] = defaultdict(lambda: defaultdict(list))
        for seen in self.seen.values():
            by_job[seen.job_uid][seen.lease_epoch].append(seen)
        found = []
        for uid, epochs in by_job.items():
            for epoch, processes in epochs.items():
                began = [each.first for later, others in epochs.items() if later > epoch for each in others]
                worked = [until for each in processes for _, until in each.worked]
                if began and worked and max(worked) > min(began) + slack_s:
                    found.append(f"job {uid}: epoch {epoch} worked {max(worked) - min(began):.1f} s after a later one had started")
        return found
