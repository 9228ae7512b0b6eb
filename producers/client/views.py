"""What the API answers, typed. Unknown fields are kept, so that an older client shows what a newer gateway says."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

__all__ = ["JobStatusView", "JobView", "MetadataView", "ModelView", "ProgressView"]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", alias_generator=to_camel, populate_by_name=True)


class MetadataView(_View):
    uid: str
    name: str
    namespace: str
    labels: dict[str, str] = Field(default_factory=dict)


class ModelView(_View):
    name: str
    version: int


class ProgressView(_View):
    global_step: int = 0
    total_steps: int | None = None
    env_steps_per_s: float = 0.0
    mean_return: float | None = None
    episodes: int = 0
    checkpoint_step: int = 0
    eta_s: int | None = None


class JobStatusView(_View):
    phase: str
    reason: str = ""
    message: str = ""
    pool: str = "default"
    attempt: int = 0
    replicas: int = 1
    replicas_running: int = 0
    nodes: list[str] = Field(default_factory=list)
    seed: int | None = None  # what it trains with, given or drawn
    progress: ProgressView = ProgressView()
    stop_reason: str | None = None
    model: ModelView | None = None
    submitted_at: str | None = None
    started_at: str | None = None
    finished_at: str | None = None

    @property
    def terminal(self) -> bool:
        return self.phase in ("Completed", "Failed", "Cancelled")


class JobView(_View):
    """`{apiVersion, kind, metadata, spec, status}`, like the manifest it came from."""

    metadata: MetadataView
    spec: dict[str, Any]
    status: JobStatusView
