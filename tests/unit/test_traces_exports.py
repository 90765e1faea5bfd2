"""The exports of traces: ATIF and OpenTelemetry."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from contract.errors import ErrorCode
from orchestrator.models.scripted import Calls, ScriptedModel
from orchestrator.traces.export_atif import build_atif
from orchestrator.traces.export_otel import build_otel
from orchestrator.traces.reading import load_trace
from tests.atif_schema import AtifTrajectory
from tests.trace_harness import call_echo, echo, fail, run_traced, scripts


async def export(folder: Path, build: Any, *turns: Any, **options: Any) -> dict[str, Any]:
    path, _, _ = await run_traced(folder, ScriptedModel(list(turns)) if turns else None, **options)
    exported: dict[str, Any] = json.loads(json.dumps(build(load_trace(path))))
    if build is build_atif:
        AtifTrajectory.model_validate(exported)
    return exported


# ATIF


async def test_a_trajectory_has_prompt_instruction_and_a_step_for_each_reply(tmp_path: Path) -> None:
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


async def test_replies_of_an_earlier_conversation_are_marked_as_copied(tmp_path: Path) -> None:
    exported = await export(
        tmp_path,
        build_atif,
        "ok",
        history=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    )
    assert [step.get("is_copied_context") for step in exported["steps"]] == [None, None, True, None, None]


@settings(max_examples=25, deadline=None)
@given(scripts)
async def test_atif_has_the_calls_and_results(tmp_path_factory: pytest.TempPathFactory, script: list[Any]) -> None:
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
        "the call was refused",
        "the request was malformed",
        "the call was not sent",
    ]


# OpenTelemetry


async def test_spans_are_one_tree_with_the_conventions_names(tmp_path: Path) -> None:
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


async def test_spans_hold_no_text_by_default(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path, ScriptedModel([call_echo("needle"), "needle"]))
    trace = load_trace(path)
    assert "needle" not in json.dumps(build_otel(trace))
    assert "needle" in json.dumps(build_otel(trace, with_content=True))


async def test_two_attempts_have_no_span_in_common(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        exported = await export(tmp_path, build_otel)
        ids.append({span["spanId"] for span in exported["resourceSpans"][0]["scopeSpans"][0]["spans"]})
    assert ids[0] & ids[1] == set()
