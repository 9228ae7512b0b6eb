"""OpenTelemetry spans joined across Kafka by the W3C `traceparent` header. Exported only when `otlp_endpoint` is set.

All span and attribute names stand here. A span is made around one hop (accept, step, start); the hours-long attempt only links to its placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from .settings import Settings

__all__ = [
    "ATTRIBUTE_JOB_UID",
    "ATTRIBUTE_NAMESPACE",
    "SPAN_ACCEPT",
    "SPAN_ATTEMPT_START",
    "SPAN_STEP",
    "current_traceparent",
    "span",
    "start_tracing",
]

SPAN_ACCEPT = "opentinker.job.accept"
SPAN_STEP = "opentinker.scheduler.step"
SPAN_ATTEMPT_START = "opentinker.attempt.start"
ATTRIBUTE_JOB_UID = "opentinker.job_uid"
ATTRIBUTE_NAMESPACE = "opentinker.namespace"


def start_tracing(settings: Settings, service: str) -> None:
    """Make ids for every span; export them only if somebody listens."""
    provider = TracerProvider(resource=Resource.create({"service.name": f"opentinker-{service}"}))
    if settings.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint)))
    trace.set_tracer_provider(provider)


@contextmanager
def span(name: str, traceparent: str = "", attributes: Mapping[str, str] | None = None) -> Iterator[str]:
    """A span below `traceparent`; yields its own traceparent, for the next hop's header."""
    parent = extract({"traceparent": traceparent}) if traceparent else None
    with trace.get_tracer("opentinker").start_as_current_span(name, context=parent, attributes=dict(attributes or {})):
        yield current_traceparent()


def current_traceparent() -> str:
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier.get("traceparent", "")
