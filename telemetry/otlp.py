"""Export of spans by OTLP over HTTP. Only this file imports OpenTelemetry's packages, and only if tracing is on."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.masking import Masker
from toolcrew.contract.settings import TracingSettings
from toolcrew.contract.traceparent import SpanRef
from toolcrew.telemetry.spans import Span, Tracer

MAX_WAITING = 2048
MAX_BATCH = 512
PAUSE_S = 1.0
"""Seconds that an ended span waits to be sent in a batch. A process that is killed loses the spans of this time."""
CLOSE_S = 2.0
"""Seconds that the end of a process waits for its last spans."""
WARN_EVERY_S = 60.0
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_sending = threading.local()


def open_tracer(
    settings: TracingSettings, service: str, warn: Callable[[str], None], masker: Callable[[], Masker] = Masker
) -> Tracer | None:
    """Return a tracer; None if tracing is off. `service`: the service name unless OTEL_SERVICE_NAME is set. `warn`
    receives messages about lost spans.

    Raises ConfigError if the packages are not installed, or if OpenTelemetry's variables are invalid.
    """
    if not settings.is_on:
        return None
    try:
        otel = _Otel(service, warn)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"TOOLCREW_TRACING is {settings.tracing}, but the package '{error.name}' is not installed: pip install "
            "'toolcrew[ops]', or unset the variable"
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"tracing cannot be set up: {error}; check the OTEL_ variables") from error
    content = settings.has_content
    return Tracer(otel.put, otel.samples, otel.ambient, content, masker() if content else Masker(), otel.close)


class LossReport:
    """Exporter that counts the spans that the collector does not accept, and warns about them once a minute."""

    def __init__(
        self, exporter: Any, success: object, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exporter = exporter
        self._success = success
        self._warn = warn
        self._clock = clock
        self._lost = 0
        self._warned_at: float | None = None
        self._is_shut = False

    def export(self, spans: Sequence[Any]) -> Any:
        """Send the spans, and count and report the spans that are lost."""
        _sending.is_ours = True
        result = self._exporter.export(spans)
        if result is not self._success:
            self._lost += len(spans)
        now = self._clock()
        if self._lost and (self._warned_at is None or now - self._warned_at >= WARN_EVERY_S):
            self._warn(
                f"{self._lost} spans did not reach the collector: check that it runs, and that "
                "OTEL_EXPORTER_OTLP_ENDPOINT is its address"
            )
            self._lost, self._warned_at = 0, now
        return result

    def shutdown(self) -> None:
        """Stop an export that waits for its next try. The processor calls this method when it stops, and when its time
        limit has passed.
        """
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()


class _Otel:
    """OpenTelemetry's exporter, batches, sampler and resource, configured by OpenTelemetry's own variables."""

    def __init__(self, service: str, warn: Callable[[str], None]) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._api: Any = trace
        self._readable: Any = ReadableSpan
        resource = Resource.create({"service.version": _release()})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._resource = resource
        self._scope = InstrumentationScope("toolcrew", _release())
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}
        # Take the sampler that OpenTelemetry's provider chooses from the environment. Nothing else of the provider is
        # used.
        self._sampler: Any = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._exporter = LossReport(OTLPSpanExporter(), SpanExportResult.SUCCESS, warn)
        self._processor: Any = BatchSpanProcessor(
            self._exporter,  # type: ignore[arg-type]
            max_queue_size=MAX_WAITING,
            schedule_delay_millis=PAUSE_S * 1000,
            max_export_batch_size=MAX_BATCH,
        )
        logging.getLogger(_EXPORTER_LOG).addFilter(_is_not_ours)

    def samples(self, trace_id: str) -> bool:
        """Return whether a trace that begins here is recorded."""
        return bool(self._sampler.should_sample(None, int(trace_id, 16), "").decision.is_sampled())

    def ambient(self) -> SpanRef | None:
        """Return the current OpenTelemetry span of the program, or None."""
        context = self._api.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        return SpanRef(f"{context.trace_id:032x}", f"{context.span_id:016x}", bool(context.trace_flags.sampled))

    def put(self, span: Span) -> None:
        """Queue an ended span. Never waits."""
        self._processor.on_end(self._convert(span))

    def close(self) -> None:
        """Send the last spans, for at most CLOSE_S. The processor alone would wait 30 s for a slow collector."""
        thread = threading.Thread(target=self._processor.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _convert(self, span: Span) -> Any:
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
    """Return whether a log line of the exporter is about spans of another library."""
    return not getattr(_sending, "is_ours", False)


def _release() -> str:
    try:
        return version("toolcrew")
    except PackageNotFoundError:
        return ""
