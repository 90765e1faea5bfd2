"""Spans by OTLP over HTTP. The only file that knows OpenTelemetry's packages, and it loads them only when tracing is
on.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from contract.errors import ConfigError
from contract.masking import Masker
from contract.traceparent import SpanRef
from telemetry.outflow import THREAD, Outflow
from telemetry.settings import TracingSettings
from telemetry.spans import Span, Tracer

_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def open_tracer(
    settings: TracingSettings, service: str, warn: Callable[[str], None], masker: Callable[[], Masker] = Masker
) -> Tracer | None:
    """None: tracing is off. `service`: its name where OTEL_SERVICE_NAME says none; `warn` is told what could not be
    sent.

    Raises ConfigError when the packages are not there, or OpenTelemetry's variables say what cannot be.
    """
    if not settings.is_on:
        return None
    try:
        otel = _Otel(service)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"TOOLCREW_TRACING is otlp, and the package '{error.name}' is not installed: pip install "
            "'toolcrew[tracing]', or unset it"
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"tracing cannot be set up: {error}; look at the OTEL_ variables") from error
    outflow = Outflow(otel.send, warn, stop=otel.stop)
    content = settings.tracing_content
    return Tracer(outflow.put, otel.samples, otel.ambient, content, masker() if content else Masker(), outflow.close)


class _Otel:
    """OpenTelemetry's exporter, sampler and resource, as its own variables set them up."""

    def __init__(self, service: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._api: Any = trace
        self._readable: Any = ReadableSpan
        resource = Resource.create({"service.version": _release()})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._resource = resource
        self._scope = InstrumentationScope("toolcrew", _release())
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}
        # The sampler that a provider would choose; nothing else of the provider is used.
        self._sampler: Any = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._success = SpanExportResult.SUCCESS
        self._exporter: Any = OTLPSpanExporter()
        # What it says of each batch is said once a minute, by us.
        logging.getLogger(_EXPORTER_LOG).addFilter(_is_not_ours)

    def samples(self, trace_id: str) -> bool:
        """Whether a trace that begins here is recorded."""
        return bool(self._sampler.should_sample(None, int(trace_id, 16), "").decision.is_sampled())

    def ambient(self) -> SpanRef | None:
        """The span of OpenTelemetry's own that this program is in."""
        context = self._api.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        return SpanRef(f"{context.trace_id:032x}", f"{context.span_id:016x}", bool(context.trace_flags.sampled))

    def send(self, spans: Sequence[Span]) -> bool:
        """Whether the collector has taken them."""
        return bool(self._exporter.export([self._converted(span) for span in spans]) is self._success)

    def stop(self) -> None:
        self._exporter.shutdown()

    def _converted(self, span: Span) -> Any:
        status = (
            self._api.Status(self._api.StatusCode.ERROR) if span.error else self._api.Status(self._api.StatusCode.UNSET)
        )
        return self._readable(
            span.name,
            context=self._context(span.ref, is_remote=False),
            parent=self._context(span.parent, is_remote=span.kind == "consumer") if span.parent is not None else None,
            resource=self._resource,
            attributes=span.attributes,
            links=[self._api.Link(self._context(link, is_remote=False)) for link in span.links],
            kind=self._kinds[span.kind],
            status=status,
            start_time=int(span.start_at * 1e9),
            end_time=int(span.end_at * 1e9),
            instrumentation_scope=self._scope,
        )

    def _context(self, ref: SpanRef, *, is_remote: bool) -> Any:
        flags = self._api.TraceFlags(int(ref.is_sampled))
        return self._api.SpanContext(int(ref.trace_id, 16), int(ref.span_id, 16), is_remote, flags)


def _is_not_ours(_: logging.LogRecord) -> bool:
    """Whether a line of the exporter's is about somebody else's spans."""
    return threading.current_thread().name != THREAD


def _release() -> str:
    try:
        return version("toolcrew")
    except PackageNotFoundError:
        return ""
