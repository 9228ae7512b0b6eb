"""What trainers produce: metrics (`training.metrics`) and output (`attempts.logs`), key job_uid.

NaN and infinities are the strings "NaN", "Infinity", "-Infinity", since JSON has no such numbers.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..records import Message
from .types import Count, JobUid, Millis, Name, NodeName, Ordinal, Text

__all__ = ["LogLines", "MetricValue", "TrainingMetrics"]

MetricValue = Annotated[float, Field(allow_inf_nan=False)] | Literal["NaN", "Infinity", "-Infinity"]


class TrainingMetrics(Message):
    """One sample. (job_uid, attempt_number, replica_rank, global_step) identifies it.

    Names and units: `mean_return` (last `window` episodes), `return_std`, `return_min`, `return_max`, `episode_length` (steps), `episodes`
    (count), `env_steps_per_s`, `policy_loss`, `value_loss`, `entropy` (nats), `approx_kl` (nats), `clip_fraction`, `explained_variance`,
    `grad_norm`, `learning_rate`, `rollout_s`, `update_s`, `cpu_percent`, `memory_bytes`.
    """

    job_uid: JobUid
    namespace: Name
    attempt_number: Ordinal
    lease_epoch: Ordinal
    replica_rank: Count
    node: NodeName
    global_step: Count
    update: Count
    time_ms: Millis
    samples: Annotated[int, Field(ge=1, le=2**53)] = 1  # above 1: `values` are means over so many, merged since they came too fast
    values: dict[Annotated[str, Field(max_length=64)], MetricValue] = Field(max_length=128)


class LogLines(Message):
    """Lines of one replica's output. `first_line` numbers them; `dropped` counts lines left out by the rate bound before these."""

    job_uid: JobUid
    namespace: Name
    attempt_number: Ordinal
    replica_rank: Count
    node: NodeName
    stream: Literal["stdout", "stderr", "agent"]
    time_ms: Millis
    first_line: Count
    dropped: Count = 0
    lines: tuple[Text, ...] = Field(max_length=1000)
