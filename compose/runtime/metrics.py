"""Prometheus metrics: one registry a process, an exporter on 127.0.0.1, and the shared names.

Prefix `opentinker_`, base units, counters end in `_total`. Job ids are never labels. Zeros are exported in advance.
"""

from __future__ import annotations

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

__all__ = ["LATENCY_BUCKETS_S", "REGISTRY", "WAIT_BUCKETS_S", "counter", "gauge", "histogram", "start_exporter"]

REGISTRY = CollectorRegistry()
LATENCY_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0, 5.0, 10.0)
WAIT_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600)  # queue waits reach hours


def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"opentinker_{name}", text, labels, registry=REGISTRY)


def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"opentinker_{name}", text, labels, registry=REGISTRY)


def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S, labels: tuple[str, ...] = ()) -> Histogram:
    return Histogram(f"opentinker_{name}", text, labels, registry=REGISTRY, buckets=buckets)


def start_exporter(port: int, host: str = "127.0.0.1") -> None:
    """Serve `/metrics` from a thread; port 0 switches it off."""
    if port:
        start_http_server(port, addr=host, registry=REGISTRY)
        structlog.get_logger().info("metrics exporter started", port=port)
