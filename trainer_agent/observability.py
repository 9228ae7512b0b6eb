"""The agent's Prometheus metrics. Names are a contract: dashboards and alerts use them."""

from __future__ import annotations

from opentinker.compose.runtime.metrics import counter, gauge, histogram
from opentinker.schemas.messages.reports import AttemptOutcome
from opentinker.trainer_agent.core.lifecycle import Phase

__all__ = ["ENDED", "HEARTBEAT_SECONDS", "LEASE_SECONDS", "PARTS", "RECORDS_DROPPED", "START_SECONDS", "prepare"]

PARTS = gauge("agent_attempts", "Attempts on this node by phase", ("phase",))
ENDED = counter("agent_attempts_ended_total", "Attempts that ended on this node", ("outcome", "failure_class"))
HEARTBEAT_SECONDS = histogram("agent_heartbeat_seconds", "From sending a heartbeat to Kafka's acknowledgement")
START_SECONDS = histogram("agent_start_seconds", "From a placement to the first training step", (0.5, 1, 2, 3, 5, 8, 13, 21, 34, 60, 120))
LEASE_SECONDS = gauge("agent_lease_seconds", "How long this node may go on without another acknowledged heartbeat; 0: it is paused")
RECORDS_DROPPED = gauge("agent_records_dropped", "Metrics and log records given up because Kafka was away")


def prepare() -> None:
    """Zeros in advance, so that a graph shows nothing happening and not nothing known."""
    for phase in Phase:
        PARTS.labels(phase.value).set(0)
    for outcome in AttemptOutcome:
        ENDED.labels(outcome.value, "").inc(0)
