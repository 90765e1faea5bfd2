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

from contract.calls import ToolContext
from contract.envelope import decode_call, encode_call
from contract.errors import ConfigError
from contract.masking import Masker
from contract.traceparent import SpanRef, attempt_span_id, call_span_id, parse_traceparent, run_span_id, trace_id_of
from telemetry import names, otlp
from telemetry.otlp import CLOSE_S, MAX_WAITING, LossReport, _Otel, open_tracer
from telemetry.settings import TracingSettings, load_tracing_settings
from telemetry.spans import MAX_CONTENT_CHARS, Span, Tracer, clean
from tests.builders import KEY, build_call
from tests.otlp_collector import open_collector
from tests.stack import free_port

PATIENCE_S = 20.0
OTEL = _Otel("test", print)


def opened(monkeypatch: pytest.MonkeyPatch, url: str, warned: list[str], **more: str) -> Tracer:
    for name, value in {"TOOLCREW_TRACING": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": url, **more}.items():
        monkeypatch.setenv(name, value)
    tracer = open_tracer(load_tracing_settings(), "test", warned.append)
    assert tracer is not None
    return tracer


def tell(tracer: Tracer, count: int = 1) -> list[Span]:
    spans = [tracer.start("work", {"toolcrew.run": "r"}) for _ in range(count)]
    for span in spans:
        span.end()
    return spans


def test_ended_spans_are_sent_at_the_latest_on_close(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_collector() as collector:
        warned: list[str] = []
        tracer = opened(
            monkeypatch, collector.url, warned, OTEL_SERVICE_NAME="mine", OTEL_EXPORTER_OTLP_COMPRESSION="gzip"
        )
        (span,) = tell(tracer)
        tracer.close()
        exported = collector.one("work")
        assert (exported.id, exported.service, warned) == (span.ref.span_id, "mine", [])


@pytest.mark.parametrize("trouble", ["dead", "500", "503", "slow"])
def test_a_collector_in_trouble_delays_neither_a_span_nor_the_end_by_more_than_its_bound(
    monkeypatch: pytest.MonkeyPatch, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    warned: list[str] = []
    with open_collector() as collector:
        url = f"http://127.0.0.1:{free_port()}" if trouble == "dead" else collector.url
        if trouble.isdigit():
            collector.status = int(trouble)
        if trouble == "slow":
            collector.held.clear()
        tracer = opened(monkeypatch, url, warned)
        with caplog.at_level(logging.WARNING):
            tell(tracer, 3 * MAX_WAITING)
            began = time.monotonic()
            tracer.close()
            took = time.monotonic() - began
    assert took < CLOSE_S + PATIENCE_S / 4
    assert collector.spans == [] or trouble == "slow"
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry.exporter")] == []


def test_lost_spans_are_logged_once_a_minute() -> None:
    now, warned = [0.0], list[str]()

    class Broken:
        def export(self, spans: object) -> str:
            return "failure"

    report = LossReport(Broken(), "success", warned.append, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 2.0, 61.0):
        report.export(["span"])
    assert [line.split(" spans")[0] for line in warned] == ["1", "3"]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in warned[0]


def test_a_forked_process_sends_its_own_spans_and_not_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "PAUSE_S", PATIENCE_S)
    with open_collector() as collector:
        tracer = opened(monkeypatch, collector.url, [])
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


def test_a_process_that_never_had_a_span_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    tracer = opened(monkeypatch, f"http://127.0.0.1:{free_port()}", [])
    tracer.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TOOLCREW_TRACING", "yes", "TOOLCREW_TRACING: Input should be 'off', 'otlp' or 'otlp-content'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "set it to that value or unset it"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv("TOOLCREW_TRACING", "otlp")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected):
        load_tracing_settings()


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_any_attribute_leaves_the_batch_readable(attributes: dict[str, object], name: str) -> None:
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


def test_a_span_ends_once_and_never_before_it_began() -> None:
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
def test_a_written_header_is_read_back(trace: str, span: str, is_sampled: bool) -> None:
    ref = SpanRef(trace, span, is_sampled)
    assert parse_traceparent(str(ref)) == ref
    assert context(str(ref)).trace == str(ref)


@given(st.integers(0, 255))
def test_only_the_sampled_flag_counts(flags: int) -> None:
    assert parse_traceparent(f"{GOOD[:-2]}{flags:02x}").is_sampled == bool(flags & 1)


@given(st.text(max_size=80) | st.text("0123456789abcdefABCDEF-", min_size=50, max_size=60))
def test_any_other_text_is_refused_and_nothing_else_happens(text: str) -> None:
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
def test_a_similar_header_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="traceparent"):
        parse_traceparent(text)
    with pytest.raises(ValueError, match="traceparent"):
        context(text)


def test_a_context_takes_it_in_one_form_only() -> None:
    with pytest.raises(ValueError, match="unsupported flags"):
        context(f"{GOOD[:-2]}03")


def test_an_envelope_without_a_trace_has_no_field_for_it_which_earlier_releases_would_refuse() -> None:
    untraced = json.loads(encode_call(build_call(), context(None), KEY).split(".", 3)[3])
    assert "trace" not in untraced["context"]


def test_a_trace_travels_signed_with_its_call() -> None:
    envelope = encode_call(build_call(), context(GOOD), KEY)
    assert decode_call(envelope, KEY)[1].trace == GOOD
    with pytest.raises(Exception, match="signature does not match"):
        decode_call(envelope.replace(GOOD, f"{GOOD[:-1]}0"), KEY)


def test_ids_of_runs_calls_and_attempts_are_those_that_another_process_makes() -> None:
    made = [run_span_id("acme", "r"), call_span_id("c"), attempt_span_id("c", 1), attempt_span_id("c", 2)]
    assert len(set(made)) == 4
    parse_traceparent(str(SpanRef(trace_id_of("acme", "r"), made[0])))
    assert trace_id_of("acme", "r") == trace_id_of("acme", "r") != trace_id_of("acm", "er")
