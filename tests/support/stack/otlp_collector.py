"""A collector of OTLP over HTTP on loopback. The collector decodes requests, and can be slow or reject requests on
demand.
"""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.web.http_sites import serve_http

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


@dataclass(frozen=True)
class CollectedSpan:
    """A span as the collector received the span. Times are in nanoseconds."""

    trace: str
    id: str
    parent: str
    name: str
    kind: str
    start: int
    end: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    is_error: bool
    service: str

    def encloses(self, other: "CollectedSpan") -> bool:
        """Return whether this span encloses `other`, within the resolution of the clock."""
        return self.start - 50_000 <= other.start and other.end <= self.end + 50_000


@dataclass
class Collector:
    """A collector. `status`: the status of its responses. `held`: requests wait until this event is set."""

    url: str
    spans: list[CollectedSpan] = field(default_factory=list)
    requests: int = 0
    status: int = 200
    held: threading.Event = field(default_factory=threading.Event)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _forgotten: set[str] = field(default_factory=set)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment that a toolcrew process needs to send its spans here."""
        return {"TOOLCREW_TRACING": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": self.url, **more}

    def take(self, body: bytes) -> None:
        found = list(_spans(ExportTraceServiceRequest.FromString(body)))
        with self._news:
            self.requests += 1
            if self.status == 200:
                self.spans += [span for span in found if span.trace not in self._forgotten]
            self._news.notify_all()

    def forget(self) -> None:
        """Start again: late spans of earlier traces are dropped."""
        with self._news:
            self._forgotten |= {span.trace for span in self.spans}
            self.spans.clear()

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in list(self.spans) if span.name == name]

    def one(self, name: str) -> CollectedSpan:
        """Return the only span of that name."""
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans {name} among {sorted(span.name for span in self.spans)}"
        return found[0]

    def wait_for(self, *names: str, within_s: float = 30.0) -> None:
        """Wait until a span of each name, and the parent of each span, has arrived."""
        self._wait(lambda: set(names) <= {span.name for span in self.spans} and self._is_whole(), within_s)

    def _is_whole(self) -> bool:
        span_ids = {span.id for span in self.spans}
        return all(not span.parent or span.parent in span_ids for span in self.spans)

    def _wait(self, condition: Any, within_s: float) -> None:
        with self._news:
            assert self._news.wait_for(condition, within_s), (
                f"only {self.requests} requests with {sorted(span.name for span in self.spans)}"
            )


@contextlib.contextmanager
def open_collector() -> Iterator[Collector]:
    """Run a collector until the block ends."""
    collector = Collector("")
    collector.held.set()
    with serve_http(type("_CollectorHandler", (_Handler,), {"collector": collector})) as port:
        collector.url = f"http://127.0.0.1:{port}"
        try:
            yield collector
        finally:
            collector.held.set()


def assert_one_tree(spans: list[CollectedSpan]) -> CollectedSpan:
    """Fail unless all spans form one trace with one root, each inside a known parent and its time. Returns the root."""
    assert len({span.trace for span in spans}) == 1, sorted((span.trace, span.name) for span in spans)
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans), "a span was sent twice"
    roots = [span for span in spans if not span.parent]
    assert [root.name for root in roots[1:]] == []
    for span in spans:
        if span.parent:
            assert span.parent in by_id, f"{span.name} is an orphan"
            assert by_id[span.parent].encloses(span), f"{span.name} is not within {by_id[span.parent].name}"
        assert span.start <= span.end
    return roots[0]


class _Handler(BaseHTTPRequestHandler):
    collector: Collector

    def do_POST(self) -> None:
        collector = self.collector
        body = self.rfile.read(int(self.headers["Content-Length"]))
        collector.held.wait(60)
        collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(collector.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def _spans(request: ExportTraceServiceRequest) -> Iterator[CollectedSpan]:
    for resource in request.resource_spans:
        service = {item.key: _value(item.value) for item in resource.resource.attributes}.get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    KINDS[span.kind],
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {item.key: _value(item.value) for item in span.attributes},
                    tuple(link.span_id.hex() for link in span.links),
                    span.status.code == 2,
                    service,
                )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
