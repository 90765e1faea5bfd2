"""Reading of traces, also torn, damaged or from a later release, and their exports: text, pages, ATIF, OpenTelemetry."""

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.runs.atif_schema import AtifTrajectory
from tests.support.runs.trace_harness import build_lines, call_echo, echo, fail, run_traced, scripts
from toolcrew.contract.errors import ConfigError, ErrorCode
from toolcrew.orchestrator.cli.traces import traces_app
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.terminal.output import MAX_SHOWN_LINES
from toolcrew.orchestrator.traces.export_atif import build_atif
from toolcrew.orchestrator.traces.export_otel import build_otel
from toolcrew.orchestrator.traces.page import build_page
from toolcrew.orchestrator.traces.reading import find_trace, load_trace

HOSTILE = "</pre><script>alert(1)</script><img src=http://x onerror=a> &amp; \x1b[31m \u202e " + '" onload="x'


def append(path: Path, *lines: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(lines))


async def test_trace_lines_of_a_later_release_are_skipped_and_counted(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    line = json.loads(path.read_text().splitlines()[0])
    append(
        path,
        *(json.dumps(line | change).encode() + b"\n" for change in ({"type": "RunDreamt"}, {"v": 3}, {"new_field": 1})),
    )
    trace = load_trace(path)
    assert (trace.later, trace.damaged, len(trace.events)) == (2, 0, 14)


def test_trace_of_an_earlier_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text('{"v":1,"ts":"2026-11-22T15:36:29.145556Z","seq":0,"type":"run.start","run":"r"}\n')
    with pytest.raises(ConfigError, match="the format of an earlier release"):
        load_trace(path)


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n", b"[1]\n", b"{}\n", b'{"v":2,"type":"RunStarted"}\n', b'{"v":2,"run":"run1","at":1,"seq":13}\n',
        b'{"v":2,"type":"StepStarted","run":"run1","at":1e300,"step":1}\n',
        b'{"v":2,"type":"StepStarted","run":"run1","at":Infinity,"step":1}\n', b'{"v":1,"type":"run.start"}\n',
        b"\xff\xfe}\n", b"[" * 100_000 + b"\n", b'{"v":"x","type":[]}\n',
    ],
)  # fmt: skip
async def test_invalid_trace_lines_are_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    path, _, _ = await run_traced(tmp_path)
    append(path, line)
    trace = load_trace(path)
    assert (trace.incomplete + trace.damaged, len(trace.events), len(trace.faults())) == (1, 13, 1)


async def test_missing_trace_line_is_reported_as_a_gap(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    trace = load_trace(path)
    assert (trace.gaps, trace.steps[0].reply, len(trace.steps)) == (1, None, 2)


async def test_trace_without_an_end_is_reported(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    trace = load_trace(path)
    assert "the trace has no end" in trace.faults()[-1]
    assert not any("run 500.0 ms" in line for line in build_lines(trace))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=5), st.floats(0, 1)
)
async def test_damaged_trace_is_read_without_an_exception(
    tmp_path_factory: pytest.TempPathFactory, damages: list[tuple[float, int]], lines: float
) -> None:
    path, _, _ = await run_traced(tmp_path_factory.mktemp("t"))
    content = bytearray(path.read_bytes())
    for place, byte in damages:
        content[int(place * len(content))] = byte
    path.write_bytes(content[: int(lines * len(content))])
    trace = load_trace(path)
    build_lines(trace)
    if trace.events:
        build_page(trace)


async def test_lone_surrogate_in_a_trace_is_replaced(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    path.write_text(path.read_text().replace("It is a.", "It \\ud83d is"))
    trace = load_trace(path)
    assert (trace.damaged, trace.finished and trace.finished.answer) == (0, "It ? is")
    assert json.loads(json.dumps(build_atif(trace)))["steps"][-1]["message"] == "It ? is"


# Finding


@pytest.mark.parametrize(
    ("name", "tenant", "sentence"),
    [
        ("nope", None, "no trace of the run"),
        ("a*", None, "not a valid name of a run"),
        ("x/y", None, "does not exist"),
        ("run1", "other", "no trace of the run"),
    ],
)
async def test_missing_trace_is_reported(tmp_path: Path, name: str, tenant: str | None, sentence: str) -> None:
    await run_traced(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        find_trace(tmp_path, name, tenant)


async def test_run_id_of_two_tenants_requires_the_tenant_option(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    (tmp_path / "zeta").mkdir()
    (tmp_path / "zeta" / "run1.jsonl").write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"--tenant \(acme, zeta\)"):
        find_trace(tmp_path, "run1")


# Showing


async def test_first_sandbox_is_shown_before_the_steps(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ready = {
        "type": "SandboxReady",
        "session": "s1",
        "sandbox": "box0",
        "host": "a",
        "image": "base",
        "network": "none",
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[0], {**lines[0], **ready}, *lines[1:]]))
    text = build_lines(load_trace(path))
    assert text.index("   session s1, sandbox box0 on a base") < text.index("step 1")
    assert "sandbox box1 replaces box0" in text


async def test_long_text_is_shortened_except_with_full(tmp_path: Path) -> None:
    path, _, _ = await run_traced(
        tmp_path, answer=lambda call: echo(call).model_copy(update={"output": "\n".join(map(str, range(500)))})
    )
    trace = load_trace(path)
    short, full = build_lines(trace), build_lines(trace, is_full=True)
    assert any("more lines (--full shows them)" in line for line in short)
    assert "   499" not in short
    assert "   499" in full
    assert len([line for line in short if line.strip().isdigit()]) == MAX_SHOWN_LINES


async def test_shown_trace_escapes_control_characters(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path, ScriptedModel([call_echo(HOSTILE), HOSTILE]))
    assert not {"\x1b", "\u202e"} & set("".join(build_lines(load_trace(path), is_full=True)))


class ParsedPage(HTMLParser):
    """The page as a browser parses it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_trace_page_loads_nothing_and_escapes_html(tmp_path: Path) -> None:
    model = ScriptedModel(
        [Calls([("echo", {"text": HOSTILE}), (f"x{HOSTILE}", {})], f"<think>{HOSTILE}</think>{HOSTILE}"), HOSTILE]
    )
    path, _, _ = await run_traced(tmp_path, model)
    tags = ParsedPage(build_page(load_trace(path)))
    assert not tags.tags & {"script", "img", "link", "iframe", "object", "a", "form", "base"}
    assert tags.attributes.keys() <= {"lang", "charset", "http-equiv", "content", "name", "class", "style"}
    assert any("default-src 'none'" in content for content in tags.attributes["content"])
    assert all(style.startswith("left:") for style in tags.attributes["style"])
    assert "<script>alert(1)</script>" in tags.text
    assert not {"\x1b", "\u202e"} & set(tags.text)


@pytest.fixture
async def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLCREW_TRACES", str(tmp_path / "traces"))
    await run_traced(tmp_path / "talks", ScriptedModel(["done"]), run="talk")
    path, _, _ = await run_traced(tmp_path / "traces")
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(traces_app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_show_prints_a_run_by_id_or_path(trace: Path) -> None:
    assert "answer: It is a." in run("show", "run1")[1]
    assert run("show", str(trace))[1] == run("show", "run1", "--tenant", "acme")[1]
    assert len(json.loads(run("show", "run1", "--json")[1])["events"]) == 13


def test_show_prints_the_last_attempt_and_lists_the_others(trace: Path) -> None:
    folder, item = trace.parent.parent, "0123456789abcdef01234567"
    for run_id, answer in ((item, "One."), (f"{item}-2", "Two.")):
        asyncio.run(run_traced(folder, ScriptedModel([answer]), run=run_id))
    _, shown, note = run("show", item)
    assert ("answer: Two." in shown, "the last of 2 attempts" in note, f"{item}.jsonl" in note) == (True, True, True)


def test_show_reports_a_missing_run_as_text_or_json(trace: Path) -> None:
    code, _, errors = run("show", "nope")
    assert (code, "has no trace of the run nope" in errors, errors.count("\n")) == (1, True, 1)
    assert json.loads(run("show", "nope", "--json")[1])["error"]["code"] == "CONFIG_MISSING"


@pytest.mark.parametrize(("to", "key"), [("atif", "schema_version"), ("otel", "resourceSpans")])
def test_export_prints_or_writes_each_format(trace: Path, tmp_path: Path, to: str, key: str) -> None:
    assert key in json.loads(run("export", "run1", "--to", to)[1])
    assert run("export", "run1", "--to", to, "-o", str(tmp_path / "x.json"))[1] == ""
    assert key in json.loads((tmp_path / "x.json").read_text())


def test_exported_page_is_readable_only_by_its_owner(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("export", "run1", "--to", "html", "-o", str(page))[0] == 0
    assert (page.read_text().startswith("<!DOCTYPE html>"), page.stat().st_mode & 0o777) == (True, 0o600)
    code, _, errors = run("export", "run1", "--to", "html", "-o", str(tmp_path / "no" / "page.html"))
    assert (code, "give another file with -o" in errors) == (1, True)


async def export(folder: Path, build: Any, *turns: Any, **options: Any) -> dict[str, Any]:
    path, _, _ = await run_traced(folder, ScriptedModel(list(turns)) if turns else None, **options)
    exported: dict[str, Any] = json.loads(json.dumps(build(load_trace(path))))
    if build is build_atif:
        AtifTrajectory.model_validate(exported)
    return exported


# ATIF


async def test_atif_has_prompt_instruction_and_one_step_per_reply(tmp_path: Path) -> None:
    exported = await export(tmp_path, build_atif)
    assert exported["schema_version"] == "ATIF-v1.7"
    assert exported["session_id"] == exported["trajectory_id"] == "run1"
    sources = [(step["step_id"], step["source"]) for step in exported["steps"]]
    assert sources == [(1, "system"), (2, "user"), (3, "agent"), (4, "agent")]
    step = exported["steps"][2]
    assert step["message"] == "Let me see."
    assert step["tool_calls"][0]["function_name"] == "echo"
    assert step["tool_calls"][0]["arguments"] == {"text": "a"}
    [result] = step["observation"]["results"]
    assert (result["source_call_id"], result["content"]) == (step["tool_calls"][0]["tool_call_id"], "a")
    assert exported["steps"][3]["message"] == "It is a."
    assert exported["final_metrics"]["total_steps"] == 4
    assert exported["final_metrics"]["total_prompt_tokens"] == 2
    assert exported["agent"]["name"] == "toolcrew"
    assert exported["agent"]["model_name"] == "scripted"
    assert len(exported["agent"]["tool_definitions"]) == 1


async def test_atif_marks_replies_of_the_history_as_copied(tmp_path: Path) -> None:
    exported = await export(
        tmp_path,
        build_atif,
        "ok",
        history=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    )
    assert [step.get("is_copied_context") for step in exported["steps"]] == [None, None, True, None, None]


@settings(max_examples=25, deadline=None)
@given(scripts)
async def test_atif_has_every_call_and_result(tmp_path_factory: pytest.TempPathFactory, script: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("t")
    answers = iter([echo, fail] * 20)
    path, _, _ = await run_traced(
        folder, ScriptedModel(script), answer=lambda call: next(answers)(call), max_malformed_replies=9
    )
    trace = load_trace(path)
    steps = AtifTrajectory.model_validate(json.loads(json.dumps(build_atif(trace)))).steps
    calls = [call for step in steps for call in step.tool_calls or ()]
    assert [(call.tool_call_id, call.function_name, call.arguments) for call in calls] == [
        (call.call_id, call.tool, call.arguments) for call in trace.calls
    ]
    results = [result for step in steps if step.observation for result in step.observation.results]
    assert [(result.source_call_id, result.content) for result in results] == [
        (call.call_id, call.result.text()) for call in trace.calls if call.result is not None
    ]
    json.dumps(build_otel(trace), allow_nan=False)


async def test_atif_says_why_a_call_was_not_run(tmp_path: Path) -> None:
    def refuse(call: Any) -> Any:
        return fail(call).model_copy(
            update={"error_code": ErrorCode.PERMISSION_DENIED, "metadata": {"was_refused": True}}
        )

    turns = [Calls([("echo", {"text": "a"}), ("echo", "{broken"), ("nope", {})]), "done"]
    exported = await export(tmp_path, build_atif, *turns, answer=refuse)
    calls = [call for step in exported["steps"] for call in step.get("tool_calls", ())]
    assert [call["extra"]["unrun"] for call in calls] == [
        "the call was denied",
        "the request was malformed",
        "the call was not sent",
    ]


# OpenTelemetry


async def test_otel_export_is_one_span_tree_with_conventional_names(tmp_path: Path) -> None:
    exported = await export(tmp_path, build_otel)
    [resource] = exported["resourceSpans"]
    spans = resource["scopeSpans"][0]["spans"]
    assert [(span["name"], span["kind"]) for span in spans] == [
        ("invoke_agent toolcrew", 1),
        ("chat scripted", 3),
        ("execute_tool echo", 1),
        ("chat scripted", 3),
    ]
    assert {span.get("parentSpanId") for span in spans[1:]} == {spans[0]["spanId"]}
    assert (len({span["spanId"] for span in spans}), len({span["traceId"] for span in spans})) == (4, 1)
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in spans)
    attributes = {entry["key"]: entry["value"] for entry in spans[2]["attributes"]}
    assert attributes["gen_ai.operation.name"] == {"stringValue": "execute_tool"}
    assert attributes["gen_ai.tool.call.id"] == {"stringValue": "run1-1-0"}
    assert attributes["gen_ai.tool.type"] == {"stringValue": "function"}
    usage = {entry["key"]: entry["value"] for entry in spans[0]["attributes"]}["gen_ai.usage.input_tokens"]
    assert usage == {"intValue": "2"}


async def test_otel_export_contains_no_text_by_default(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path, ScriptedModel([call_echo("needle"), "needle"]))
    trace = load_trace(path)
    assert "needle" not in json.dumps(build_otel(trace))
    assert "needle" in json.dumps(build_otel(trace, with_content=True))


async def test_otel_exports_of_two_attempts_share_no_span(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        exported = await export(tmp_path, build_otel)
        ids.append({span["spanId"] for span in exported["resourceSpans"][0]["scopeSpans"][0]["spans"]})
    assert ids[0] & ids[1] == set()
