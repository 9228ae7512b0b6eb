"""The agent's rules as values: no clock, no processes, no Kafka. Time is an argument, in nanoseconds of the host's monotonic clock."""

from __future__ import annotations
