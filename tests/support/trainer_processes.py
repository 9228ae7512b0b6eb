"""Real trainer processes without an agent: events on standard output, checkpoints in folders."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from opentinker.trainer_agent.protocol import AttemptDescription
from ports import free_port

__all__ = ["TrainerGang", "newest_checkpoint"]

JOB = "11111111-1111-1111-1111-111111111111"


class TrainerGang:
    """`world_size` trainers of one attempt, started at once."""

    def __init__(self, directory: Path, spec: dict[str, Any], world_size: int = 1, *, seed: int = 3, resume: dict[str, Any] | None = None) -> None:
        port = free_port()
        self.directory, self.lines = directory, [[] for _ in range(world_size)]
        self.processes = []
        for rank in range(world_size):
            own = directory / str(rank)
            own.mkdir(parents=True, exist_ok=True)
            description = AttemptDescription.model_validate(
                {
                    "job_uid": JOB,
                    "rank": rank,
                    "world_size": world_size,
                    "rendezvous_port": port,
                    "seed": seed,
                    "directory": str(own),
                    "resume": resume,
                }
                | {"spec": {"algorithm": "PPO", "environment": "CartPole-v1", "replicas": world_size} | spec}
            )
            with open(own / "events", "wb") as out, open(own / "stderr", "wb") as err:
                process = subprocess.Popen(
                    [sys.executable, "-m", "opentinker.trainer_agent.trainer"], stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True
                )
            assert process.stdin is not None
            process.stdin.write(description.model_dump_json().encode())
            process.stdin.close()
            self.processes.append(process)

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory / str(rank) / "events").read_text().splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]  # what else it prints is for the job's log
        return [event for event in said if event["type"] == kind]

    def until(self, kind: str, count: int = 1, rank: int = 0, timeout_s: float = 60) -> dict[str, Any]:
        """Wait for the `count`-th event of a kind."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.events(rank, kind)) < count:
            if time.monotonic() > deadline or self.processes[rank].poll() is not None:
                raise AssertionError(f"no {kind} of rank {rank}: {(self.directory / str(rank) / 'stderr').read_text()[-3000:]}")
            time.sleep(0.02)
        return found[count - 1]

    def wait(self, timeout_s: float = 100) -> list[dict[str, Any]]:
        """Wait for all; returns the last words in rank order."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.wait(max(0.1, deadline - time.monotonic()))
        return [self.events(rank, "stopped")[-1] if self.events(rank, "stopped") else {} for rank in range(len(self.processes))]

    def codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]

    def terminate(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def newest_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest checkpoint in the folder of rank 0: (what a description's `resume` says, state.json)."""
    folder = max((directory / "0" / "checkpoints").iterdir(), key=lambda path: path.name)
    state = json.loads((folder / "state.json").read_text())
    files = [
        {"name": path.name, "size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "url": path.as_uri()}
        for path in sorted(folder.iterdir())
        if path.name != "lineage.json"
    ]
    return {"checkpoint_id": folder.name, "global_step": state["global_step"], "attempt_number": 1, "files": files}, state
