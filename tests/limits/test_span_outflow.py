"""The traceparent of a call, and the export of spans to a collector that is available, slow, broken or dead."""

import json
import logging
import os
import re
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from tests.support.records.builders import KEY, build_call
from tests.support.stack.otlp_collector import open_collector
from toolcrew.contract.calls import ToolContext
from toolcrew.contract.envelope import decode_call, encode_call
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.masking import Masker
from toolcrew.contract.settings import TracingSettings, load_tracing_settings
from toolcrew.contract.traceparent import (
    SpanRef,
    attempt_span_id,
    call_span_id,
    parse_traceparent,
    run_span_id,
    trace_id_of,
)
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.telemetry import names, otlp
from toolcrew.telemetry.otlp import CLOSE_S, MAX_WAITING, LossReport, _Otel, open_tracer
from toolcrew.telemetry.spans import MAX_CONTENT_CHARS, Span, Tracer, clean

WAIT_S = 20.0
OTEL = _Otel("test", print)


def open_test_tracer(monkeypatch: pytest.MonkeyPatch, url: str, warnings: list[str], **more: str) -> Tracer:
    for name, value in {"TOOLCREW_TRACING": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": url, **more}.items():
        monkeypatch.setenv(name, value)
    tracer = open_tracer(load_tracing_settings(), "test", warnings.append)
    assert tracer is not None
    return tracer


def end_spans(tracer: Tracer, count: int = 1) -> list[Span]:
    spans = [tracer.start("work", {"toolcrew.run": "r"}) for _ in range(count)]
    for span in spans:
        span.end()
    return spans


def test_ended_spans_are_sent_on_close(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_collector() as collector:
        warnings: list[str] = []
        tracer = open_test_tracer(
            monkeypatch, collector.url, warnings, OTEL_SERVICE_NAME="mine", OTEL_EXPORTER_OTLP_COMPRESSION="gzip"
        )
        (span,) = end_spans(tracer)
        tracer.close()
        exported = collector.one("work")
        assert (exported.id, exported.service, warnings) == (span.ref.span_id, "mine", [])


@pytest.mark.parametrize("failure", ["dead", "500", "503", "slow"])
def test_failing_collector_delays_close_only_up_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    warnings: list[str] = []
    with open_collector() as collector:
        url = f"http://127.0.0.1:{reserve_port()}" if failure == "dead" else collector.url
        if failure.isdigit():
            collector.status = int(failure)
        if failure == "slow":
            collector.held.clear()
        tracer = open_test_tracer(monkeypatch, url, warnings)
        with caplog.at_level(logging.WARNING):
            end_spans(tracer, 3 * MAX_WAITING)
            began = time.monotonic()
            tracer.close()
            close_s = time.monotonic() - began
    assert close_s < CLOSE_S + WAIT_S / 4
    assert collector.spans == [] or failure == "slow"
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry.exporter")] == []


def test_lost_spans_are_logged_once_a_minute() -> None:
    now, warnings = [0.0], list[str]()

    class Broken:
        def export(self, spans: object) -> str:
            return "failure"

    report = LossReport(Broken(), "success", warnings.append, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 2.0, 61.0):
        report.export(["span"])
    assert [line.split(" spans")[0] for line in warnings] == ["1", "3"]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in warnings[0]


def test_forked_process_sends_only_its_own_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "PAUSE_S", WAIT_S)
    with open_collector() as collector:
        tracer = open_test_tracer(monkeypatch, collector.url, [])
        tracer.start("before", {}).end()
        child = os.fork()
        if child == 0:
            tracer.start("child", {}).end()
            tracer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [span.name for span in collector.spans] == ["child"]
        tracer.close()
        assert sorted(span.name for span in collector.spans) == ["before", "child"]


def test_tracer_without_spans_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    tracer = open_test_tracer(monkeypatch, f"http://127.0.0.1:{reserve_port()}", [])
    tracer.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TOOLCREW_TRACING", "yes", "TOOLCREW_TRACING: must be 'off', 'otlp' or 'otlp-content'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "set it to that value or unset it"),
    ],
)
def test_invalid_tracing_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv("TOOLCREW_TRACING", "otlp")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected):
        load_tracing_settings()


def test_missing_packages_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'toolcrew\[ops\]'"):
        open_tracer(TracingSettings(tracing="otlp"), "test", print)


@given(
    st.dictionaries(
        st.sampled_from([names.TOOL, names.TOOL_ARGUMENTS, names.FINISH_REASONS]),
        st.text(st.characters(codec=None), max_size=40)
        | st.integers()
        | st.floats()
        | st.booleans()
        | st.none()
        | st.lists(st.text(st.characters(codec=None), max_size=9), max_size=50),
    ),
    st.text(st.characters(codec=None), max_size=400),
)
def test_any_attribute_value_can_be_encoded(attributes: dict[str, object], name: str) -> None:
    ended: list[Span] = []
    tracer = Tracer(ended.append, lambda _: True)
    tracer.start(name, attributes).end(error="\ud800")  # type: ignore[arg-type]
    assert encode_spans([OTEL._convert(ended[0])]).SerializeToString()


def test_content_is_masked_before_it_is_cut() -> None:
    tracer = Tracer(
        lambda _: None, lambda _: True, has_content=True, masker=Masker({"password": "correct-horse-battery"})
    )
    text = "x" * (MAX_CONTENT_CHARS - 5) + "correct-horse-battery" + "y" * 10_000
    attribute = str(clean(tracer.content(names.TOOL_RESULT, lambda: text))[names.TOOL_RESULT])
    assert "corre" not in attribute
    assert len(attribute) < MAX_CONTENT_CHARS + 100
    assert attribute.endswith("characters left out]")
    assert Tracer(lambda _: None, lambda _: True).content(names.TOOL_RESULT, lambda: text) == {}


def test_unsampled_spans_are_not_sent() -> None:
    ended: list[Span] = []
    tracer = Tracer(ended.append, lambda _: False)
    root = tracer.start("root", {"a": "b"})
    child = tracer.start("child", {}, parent=root.ref)
    child.set({"c": "d"})
    child.end()
    root.end()
    assert (ended, child.attributes, child.ref.is_sampled, child.ref.trace_id) == ([], {}, False, root.ref.trace_id)


def test_span_ends_once_and_not_before_its_start() -> None:
    ended: list[Span] = []
    span = Tracer(ended.append, lambda _: True).start("work", {}, at=100.0)
    span.end(at=50.0, error="first")
    span.end(error="second")
    assert [(one.end_at, one.error) for one in ended] == [(100.0, "first")]


GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DIGITS = "0123456789abcdef"


def ids(length: int) -> st.SearchStrategy[str]:
    return st.text(DIGITS, min_size=length, max_size=length).filter(lambda text: set(text) != {"0"})


def context(trace: str | None) -> ToolContext:
    return ToolContext(tenant="acme", sent_at=1.0, deadline_at=2.0, trace=trace)


@given(ids(32), ids(16), st.booleans())
def test_written_traceparent_is_read_back(trace: str, span: str, is_sampled: bool) -> None:
    ref = SpanRef(trace, span, is_sampled)
    assert parse_traceparent(str(ref)) == ref
    assert context(str(ref)).trace == str(ref)


@given(st.integers(0, 255))
def test_only_the_sampled_flag_is_read(flags: int) -> None:
    assert parse_traceparent(f"{GOOD[:-2]}{flags:02x}").is_sampled == bool(flags & 1)


@given(st.text(max_size=80) | st.text("0123456789abcdefABCDEF-", min_size=50, max_size=60))
def test_any_other_text_is_refused_as_a_traceparent(text: str) -> None:
    if re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", text, re.ASCII):
        return
    with pytest.raises(ValueError, match="traceparent"):
        parse_traceparent(text)


@pytest.mark.parametrize(
    "text",
    [
        GOOD.upper(),
        f"{GOOD}\n",
        f" {GOOD}",
        f"{GOOD}-more",
        GOOD.replace("00-", "ff-", 1),
        GOOD.replace("00-", "01-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        GOOD.replace("0af7", "٠af7"),
        "",
    ],
)
def test_similar_traceparent_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="traceparent"):
        parse_traceparent(text)
    with pytest.raises(ValueError, match="traceparent"):
        context(text)


def test_tool_context_refuses_unknown_trace_flags() -> None:
    with pytest.raises(ValueError, match="unsupported flags"):
        context(f"{GOOD[:-2]}03")


def test_envelope_without_a_trace_omits_the_field() -> None:
    untraced = json.loads(encode_call(build_call(), context(None), KEY).split(".", 3)[3])
    assert "trace" not in untraced["context"]


def test_trace_is_signed_with_its_call() -> None:
    envelope = encode_call(build_call(), context(GOOD), KEY)
    assert decode_call(envelope, KEY)[1].trace == GOOD
    with pytest.raises(Exception, match="signature does not match"):
        decode_call(envelope.replace(GOOD, f"{GOOD[:-1]}0"), KEY)


def test_span_and_trace_ids_are_deterministic_and_distinct() -> None:
    span_ids = [run_span_id("acme", "r"), call_span_id("c"), attempt_span_id("c", 1), attempt_span_id("c", 2)]
    assert len(set(span_ids)) == 4
    parse_traceparent(str(SpanRef(trace_id_of("acme", "r"), span_ids[0])))
    assert trace_id_of("acme", "r") == trace_id_of("acme", "r") != trace_id_of("acm", "er")
