"""The loop of one replica: train, look around at every boundary, publish, end. Read `Replica.run` first."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
import torch
from opentinker.schemas.errors import FieldError, InvalidManifest, field_errors
from opentinker.schemas.manifest import JobSpec
from opentinker.schemas.messages.jobs import ModelReference
from opentinker.schemas.quantities import duration_s
from opentinker.trainer_agent.failures import LeaseOverError, classify
from opentinker.trainer_agent.protocol import (
    AttemptDescription,
    CheckpointCommitted,
    MetricsSample,
    ProgressReport,
    Ready,
    Stopped,
    TrainerOutcome,
)
from opentinker.trainer_agent.publishing import FolderStore, Publisher, Store, fetch, staged
from opentinker.trainer_agent.registry_client import Publication, RegistryClient, RegistryError, checkpoint_id_of
from opentinker.trainer_agent.rl.gang import Gang, GlooGang, SoloGang
from opentinker.trainer_agent.rl.shared_memory import join_shared_memory
from opentinker.trainer_agent.rl.training import IterationReport, Training, hyperparameters_of
from pydantic import ValidationError

if TYPE_CHECKING:
    from opentinker.trainer_agent.control import Line
    from opentinker.trainer_agent.trainer import Ending

__all__ = ["Replica", "join_gang"]

_PROGRESS_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 10.0
_METRICS_INTERVAL_S = 1.0  # a bounded rate: long runs make millions of iterations
_STOP, _FENCED, _CHECKPOINT, _ELAPSED = range(4)  # places in the record that the replicas exchange at a boundary


class Replica:
    """One process of the gang."""

    def __init__(self, description: AttemptDescription, line: Line, ending: Ending) -> None:
        self._description, self._line, self._ending = description, line, ending
        self._leader = description.rank == 0
        self._spec = _spec_of(description)
        torch.set_num_threads(description.threads)
        self._paused_s = 0.0
        self._last_progress = self._last_metrics = self._last_said = 0.0
        self._steps_at_progress = 0
        self._cpu_at_metrics = (time.monotonic(), time.process_time())

    def run(self) -> Stopped:
        """From meeting the gang to the last word. Failures are raised; the peers are told their class."""
        hyperparameters_of(self._spec)  # before anyone waits for anyone
        gang = join_gang(self._description)
        if gang.transport == "shared-memory":  # all replicas share this machine's cores: more threads than cores would only wait for each other
            torch.set_num_threads(max(1, min(self._description.threads, (os.cpu_count() or 1) // gang.world_size)))
        store = self._open_store() if self._leader else None
        try:
            training = Training(self._spec, self._description.seed, gang)
            try:
                return self._train(training, store)
            finally:
                training.close()
        except BaseException as error:
            gang.close(classify(error)[0].exit_code)
            raise
        finally:
            gang.close()
            if store is not None:
                store.close()

    def _train(self, training: Training, store: Store | None) -> Stopped:
        resume = self._start(training, store)
        publisher = None if store is None else Publisher(store, self._await_lease, self._committed)
        self._say_ready(training, resume)
        checkpoint_every_s = float(duration_s(self._spec.checkpoint.every))
        boundary = checkpointed = time.monotonic()
        self._paused_s = 0.0
        while True:
            now = time.monotonic()
            due = publisher is not None and now - checkpointed >= checkpoint_every_s and not publisher.busy
            elapsed_s = training.progress.elapsed_s + now - boundary - self._paused_s
            flags = self._exchange(training, publisher, due=due, elapsed_s=elapsed_s)
            boundary, self._paused_s = now, 0.0
            training.progress.elapsed_s = float(flags[0, _ELAPSED])
            end = training.end()
            if flags[:, _FENCED].any():
                raise RegistryError("a newer attempt holds the fence; this one stops")
            if end is not None or flags[:, _STOP].any():
                return self._finish(training, publisher, None if end is None else end.value)
            if flags[0, _CHECKPOINT]:
                files = training.capture(self._context())
                if publisher is not None:
                    publisher.start(self._publication(training, files, "periodic"))
                checkpointed = now
            self._report(training, training.iterate(self._pause_without_lease))

    def _start(self, training: Training, store: Store | None) -> Literal["fresh", "exact", "episodes-restarted"]:
        """Fresh, or where the registry's checkpoint left off; rank 0 fetches it for all."""
        if self._description.resume is None:
            training.begin()
            return "fresh"
        files = {} if store is None else fetch(store, self._description.resume)
        names = [file.name for file in self._description.resume.files]
        shared = {name: training.gang.gather_bytes(files.get(name, b""))[0] for name in names}
        kind = training.restore(shared)
        self._ending.checkpoint_id = self._description.resume.checkpoint_id
        self._ending.checkpoint_step = self._description.resume.global_step
        return kind

    def _exchange(self, training: Training, publisher: Publisher | None, *, due: bool, elapsed_s: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        fenced = publisher is not None and publisher.fenced
        record = np.array([self._line.stop_requested.is_set(), fenced, due, elapsed_s], dtype=np.float64)
        return training.gang.all_gather(record)

    def _finish(self, training: Training, publisher: Publisher | None, stop_reason: str | None) -> Stopped:
        """The last checkpoint, always; a model version when a stop rule ended training."""
        self._note(training)
        files = training.capture(self._context())
        model: ModelReference | None = None
        if publisher is not None:
            publication = self._publication(training, files, "final", stop_reason)
            self._report_now(training)
            model = publisher.finish(publication)
        progress = training.progress
        self._say(f"ended at step {progress.global_step:,} after {progress.updates:,} updates, weights sha256:{training.weights_sha256()}")
        succeeded = stop_reason is not None
        stopped_by = "the agent is gone" if self._line.agent_lost else "told to stop"
        message = f"training ended by {stop_reason}" if succeeded else stopped_by
        known = {name: getattr(self._ending, name) for name in type(self._ending).__slots__}
        outcome = TrainerOutcome.SUCCEEDED if succeeded else TrainerOutcome.STOPPED
        return Stopped(outcome=outcome, message=message, stop_reason=stop_reason or "", model=model, **known)

    def _publication(self, training: Training, files: dict[str, bytes], kind: str, stop_reason: str | None = None) -> Publication:
        progress, description = training.progress, self._description
        metrics = {"episodes": float(progress.episodes), "updates": float(progress.updates), "elapsed_s": progress.elapsed_s}
        if progress.mean_return is not None:
            metrics["mean_return"] = progress.mean_return
        return Publication(
            checkpoint_id=checkpoint_id_of(description.job_uid, description.attempt_number, progress.global_step, kind),
            global_step=progress.global_step,
            files=staged(files),
            metrics=metrics,
            lineage={**self._context(), "effective": training.effective(), "weights_sha256": training.weights_sha256()},
            final=kind == "final",
            succeeded=stop_reason is not None,
            stop_reason=stop_reason,
        )

    def _context(self) -> dict[str, Any]:
        description = self._description
        return {
            "job_uid": description.job_uid,
            "attempt_number": description.attempt_number,
            "lease_epoch": description.lease_epoch,
            "environment": self._spec.environment.model_dump(mode="json", by_alias=True),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "gymnasium": gymnasium.__version__},
        }

    def _committed(self, publication: Publication) -> None:
        self._ending.checkpoint_id, self._ending.checkpoint_step = publication.checkpoint_id, publication.global_step
        event = CheckpointCommitted(checkpoint_id=publication.checkpoint_id, global_step=publication.global_step, final=publication.final)
        self._line.send(event)

    def _pause_without_lease(self) -> None:
        """Called before every gradient step: past the lease nothing moves (DESIGN.md §6)."""
        if self._line.lease_holds:
            return
        started = time.monotonic()
        holds = self._line.wait_for_lease()
        self._paused_s += time.monotonic() - started
        if not holds:
            raise LeaseOverError("stopped while paused without a lease; the last committed checkpoint stands")

    def _await_lease(self) -> None:
        if not self._line.wait_for_lease():
            raise LeaseOverError("stopped without a lease; this checkpoint is not committed")

    def _open_store(self) -> Store:
        description = self._description
        if description.registry_url:
            return RegistryClient(description.registry_url, description.attempt_token)
        return FolderStore(Path(description.directory) / "checkpoints")

    def _note(self, training: Training) -> None:
        progress, ending = training.progress, self._ending
        ending.global_step, ending.updates, ending.episodes = progress.global_step, progress.updates, progress.episodes
        ending.mean_return, ending.weights_sha256 = progress.mean_return, training.weights_sha256()

    def _say_ready(self, training: Training, resume: Literal["fresh", "exact", "episodes-restarted"]) -> None:
        self._note(training)
        self._line.training_began.set()
        self._steps_at_progress, self._last_progress = training.progress.global_step, time.monotonic()
        ready = Ready(
            transport=training.gang.transport,
            global_step=training.progress.global_step,
            resume=resume,
            weights_sha256=training.weights_sha256(),
            effective=training.effective(),
        )
        self._line.send(ready)
        begins = "begins" if resume == "fresh" else f"resumed at step {training.progress.global_step:,} ({resume})"
        what = f"{self._spec.algorithm} on {self._spec.environment.id}, gradients by {training.gang.transport}, {platform.node()}"
        self._say(f"of {training.gang.world_size} {begins}: pid {os.getpid()}, {what}, weights sha256:{training.weights_sha256()}")

    def _say(self, text: str) -> None:
        """A line of the job's log."""
        print(f"rank {self._description.rank} {text}", flush=True)  # noqa: T201

    def _report(self, training: Training, report: IterationReport) -> None:
        """Tell progress and metrics, at bounded rates."""
        now, progress = time.monotonic(), training.progress
        ending = self._ending
        ending.global_step, ending.updates, ending.episodes = progress.global_step, progress.updates, progress.episodes
        ending.mean_return = progress.mean_return
        if now - self._last_progress >= _PROGRESS_INTERVAL_S:
            self._report_now(training)
        if self._leader and now - self._last_said >= _LOG_INTERVAL_S:
            self._last_said = now
            mean = "no episode ended yet" if progress.mean_return is None else f"mean return {progress.mean_return:.1f}"
            self._say(f"at step {progress.global_step:,}: {progress.episodes:,} episodes, {mean}")
        if now - self._last_metrics >= _METRICS_INTERVAL_S:
            self._last_metrics = now
            values = self._process_figures() | (_training_figures(training, report) if self._leader else {})
            self._line.send(
                MetricsSample(global_step=progress.global_step, update=progress.updates, time_ms=time.time_ns() // 1_000_000, values=values)
            )

    def _report_now(self, training: Training) -> None:
        now, progress = time.monotonic(), training.progress
        rate = (progress.global_step - self._steps_at_progress) / max(now - self._last_progress, 1e-3)
        self._last_progress, self._steps_at_progress = now, progress.global_step
        self._line.send(
            ProgressReport(
                global_step=progress.global_step,
                total_steps=training.plan.total_steps or 0,
                updates=progress.updates,
                episodes=progress.episodes,
                env_steps_per_s=rate,
                mean_return=progress.mean_return,
            )
        )

    def _process_figures(self) -> dict[str, float]:
        """CPU and memory of this process since the last sample; 100 % is one core."""
        now, before = (time.monotonic(), time.process_time()), self._cpu_at_metrics
        self._cpu_at_metrics = now
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"cpu_percent": 100 * (now[1] - before[1]) / max(now[0] - before[0], 1e-3), "memory_bytes": float(peak_kib * 1024)}


def _training_figures(training: Training, report: IterationReport) -> dict[str, float]:
    progress, losses = training.progress, report.losses
    values = {
        **{name: value for name, value in losses.figures.items() if name != "loss"},
        "grad_norm": losses.grad_norm,
        "learning_rate": report.learning_rate,
        "episodes": float(progress.episodes),
        "env_steps_per_s": report.env_steps / max(report.rollout_s + report.update_s, 1e-6),
        "explained_variance": report.explained_variance,
        "rollout_s": report.rollout_s,
        "update_s": report.update_s,
    }
    if progress.recent_returns:
        returns = np.array(progress.recent_returns)
        values |= {
            "mean_return": float(returns.mean()),
            "return_std": float(returns.std()),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
            "episode_length": float(np.mean(progress.recent_lengths)),
        }
    return values


def join_gang(description: AttemptDescription) -> Gang:
    """Meet the other replicas: over gloo at the placement's address, then over shared memory if all are on one host. Raises PeerLostError."""
    rank, world_size = description.rank, description.world_size
    if world_size == 1:
        return SoloGang()
    meeting = GlooGang(
        rank,
        world_size,
        description.rendezvous_address,
        description.rendezvous_port,
        join_timeout_s=description.join_timeout_s,
        wait_timeout_s=description.peer_timeout_s,
    )
    shared = join_shared_memory(meeting, wait_timeout_s=description.peer_timeout_s)
    if shared is None:
        return meeting
    meeting.close()
    return shared


def _spec_of(description: AttemptDescription) -> JobSpec:
    try:
        return JobSpec.model_validate(description.spec)
    except ValidationError as error:
        found = field_errors(error, JobSpec, "spec.")
        raise InvalidManifest(found or [FieldError(field="spec", message="cannot be read", remedy="correct it")]) from None
