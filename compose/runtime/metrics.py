"""Prometheus metrics: one registry a process, an exporter on 127.0.0.1, and the shared names.

Prefix `opentinker_`, base units, counters end in `_total`. Job ids are never labels. Zeros are exported in advance.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

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


def start_exporter(port: int, host: str = "127.0.0.1", ready: Callable[[], dict[str, str]] | None = None) -> None:
    """Serve `/metrics`, `/health` and `/ready` from a thread; port 0 switches it off.

    `ready` is called from that thread and says part → "ok" or what is missing; anything but "ok" makes `/ready` a 503.
    """
    if not port:
        return
    scrape = make_wsgi_app(REGISTRY)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            page: Iterable[bytes] = scrape(environ, start_response)
            return page
        if path not in ("/health", "/ready"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"see /metrics, /health, /ready"]
        parts = ready() if ready is not None and path == "/ready" else {}
        good = all(text == "ok" for text in parts.values())
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [json.dumps({"status": "ok" if good else "unavailable", "parts": parts}).encode()]

    server = make_server(host, port, answer, _Server, handler_class=_SilentHandler)
    threading.Thread(target=server.serve_forever, name="metrics-exporter", daemon=True).start()
    structlog.get_logger().info("metrics exporter started", port=port)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    timeout = 5.0  # a peer that connects and says nothing does not keep a thread

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no events."""
