"""The contents of a trace: every event of a run, masked. A failure of the trace never ends the run."""

import asyncio
import base64
import errno
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.conftest import RedisProcess
from tests.support.records.builders import build_call, build_spec
from tests.support.redis.switched_pool import SESSION, SwitchedPool
from tests.support.runs.trace_harness import RUN, call_echo, echo, fail, lines_of, of_type, run_traced, scripts
from tests.support.stack.waiting import until
from toolcrew.contract.calls import MAX_NAME_CHARS, MAX_OUTPUT_CHARS, SandboxInfo, ToolCall, ToolResult
from toolcrew.contract.errors import ConfigError, ModelUnavailable
from toolcrew.contract.masking import Masker
from toolcrew.contract.run_events import (
    CallFinished,
    CallSent,
    CallStarted,
    OutputArrived,
    RunEvent,
    RunStarted,
    SandboxClosed,
    SandboxReady,
    TextArrived,
)
from toolcrew.orchestrator.approvals import ApprovalPolicy, CallbackApprover, Decision, review
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect, build_tag_call
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.traces.reading import load_trace
from toolcrew.orchestrator.traces.recorder import IDENTIFIERS, RECORDS, open_trace, trace_path
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool

CANARY = "canary-7f3a/9b+!"


async def test_recorded_request_has_only_new_messages_and_tools_once(tmp_path: Path) -> None:
    model = ScriptedModel([call_echo("a"), call_echo("b"), "done"])
    path, _, _ = await run_traced(tmp_path, model)
    requests = of_type(path, "ModelAsked")
    assert [(line["kept"], len(line["new_messages"]), line["messages"]) for line in requests] == [
        (0, 2, 2),
        (2, 2, 4),
        (4, 2, 6),
    ]
    assert ["new_tools" in line for line in requests] == [True, False, False]
    assert [line["tools"] for line in requests] == [1, 1, 1]
    assert [step.messages for step in load_trace(path).steps] == [request.messages for request in model.requests]


async def test_recorded_request_with_changed_messages_is_read_back(tmp_path: Path) -> None:
    model = ScriptedModel(
        [build_tag_call("echo", {"text": "a" * 3000}), build_tag_call("echo", {"text": "b" * 3000}), "done"]
    )
    path, _, _ = await run_traced(tmp_path, model, dialect=TagsDialect(), context_tokens=2500)
    assert [step.messages for step in load_trace(path).steps] == [request.messages for request in model.requests]


async def test_aborted_run_records_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable):
        await run_traced(tmp_path, ScriptedModel([]))
    [end] = of_type(tmp_path / "acme" / "run1.jsonl", "RunAborted")
    assert "the script has 0 turns" in end["reason"]


async def test_timed_out_run_is_recorded_with_its_partial_steps(tmp_path: Path) -> None:
    async def stall(call: ToolCall) -> ToolResult:
        await asyncio.Event().wait()
        return echo(call)

    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:
        options = ReActOptions(max_wall_s=1.0)
        agent = Agent(
            ScriptedModel([call_echo("a")]),
            NativeDialect(),
            [build_spec("echo")],
            stall,
            options=options,
            on_event=trace,
            run_id=RUN,
        )
        result = await agent.run("do it")
    assert result.stop_reason is StopReason.MAX_WALL
    read = load_trace(trace.path)
    assert [call.result.error_code for call in read.calls if call.result] == ["CANCELLED"]
    assert read.finished == read.end
    assert read.finished.stop_reason == "max_wall"
    assert read.steps[0].reply is not None


# Sandboxes, approvals, pieces


async def test_replaced_sandbox_is_recorded(tmp_path: Path) -> None:
    def answer(call: ToolCall) -> ToolResult:
        return echo(call).model_copy(update={"sandbox": SandboxInfo(id=f"box-{call.arguments['text']}", generation=2)})

    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:
        # The session is there before the run begins, and still there when it has ended.
        trace(SandboxReady(run=RUN, session="s9", host="h", image="i", network="none", sandbox="box-a"))
        trace(RunStarted(run=RUN, instruction="x", model="m", dialect="native"))
        for text in ("a", "b"):
            trace(CallFinished(run=RUN, result=answer(build_call(text=text, call_id=text))))
        trace(SandboxClosed(run=RUN, session="s9"))
    read = load_trace(trace.path)
    assert [type(event) for event in read.events[:2]] == [RunStarted, SandboxReady]
    assert (read.session, read.notes()) == ("s9", ["sandbox box-b replaces box-a", "sandbox box-b is closed"])


async def test_approvals_are_recorded(tmp_path: Path) -> None:
    spec, call = build_spec("echo", requires_permission=True), build_call("echo", text="a", call_id="c1")
    approver = CallbackApprover(lambda request: Decision(True, "fine", {"text": "b"}))
    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:
        trace(RunStarted(run=RUN, instruction="x", model="m", dialect="native"))
        reviewed = await review(call, spec, approver, policy=ApprovalPolicy(), on_event=trace, run=RUN)
    assert isinstance(reviewed, ToolCall)
    [question], [decided] = of_type(trace.path, "ApprovalAsked"), of_type(trace.path, "ApprovalDecided")
    assert question["call"]["id"] == "c1"
    assert question["call"]["name"] == "echo"
    assert decided["is_allowed"] is True
    assert decided["is_changed"] is True
    assert decided["reason"] == "fine"
    assert question["digest"] == decided["digest"]


async def test_streamed_text_is_not_recorded(tmp_path: Path) -> None:
    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:
        trace(RunStarted(run=RUN, instruction="x", model="m", dialect="native"))
        trace(TextArrived(run=RUN, text=CANARY[:8]))
        trace(OutputArrived(run=RUN, call_id="c1", stream="stdout", text=CANARY[8:]))
    text = trace.path.read_text()
    assert (CANARY[:8] in text, CANARY[8:] in text) == (False, False)
    assert [line["type"] for line in lines_of(trace.path)] == ["RunStarted"]


# Secrets


def all_of(folder: Path) -> tuple[bytes, str]:
    """Return the contents and the names of all files below the folder."""
    paths = list(folder.rglob("*"))
    return b"".join(file.read_bytes() for file in paths if file.is_file()), " ".join(str(file) for file in paths)


async def test_secret_is_in_no_trace_file_in_any_encoding(tmp_path: Path) -> None:
    forms = [CANARY, base64.b64encode(b"user:" + CANARY.encode()).decode(), CANARY.encode().hex()]
    model = ScriptedModel(
        [
            Calls([("echo", {"text": f"say {CANARY}"}), (f"x{CANARY}", {CANARY: 1})], f"I use {CANARY}."),
            f"It is {CANARY}.",
        ]
    )

    def answer(call: ToolCall) -> ToolResult:
        large = f"{forms[1]} {forms[2]} " + "x" * 40_000 + CANARY
        return echo(call).model_copy(update={"output": large, "metadata": {"note": CANARY, CANARY: [CANARY]}})

    await run_traced(
        tmp_path, model, secrets={"the canary": CANARY}, answer=answer, history=[{"role": "user", "content": CANARY}]
    )
    whole, names = all_of(tmp_path)
    assert [form for form in forms if form.encode() in whole or form in names] == []
    assert whole.count(b"[masked: the canary]") >= 8
    assert hashlib.sha256(CANARY.encode()).hexdigest().encode() not in whole


async def test_fields_with_content_are_never_exempt_from_masking() -> None:
    # A new field must be marked as ours or not: only the others may hold text of a model or a tool.
    content = {"instruction", "new_messages", "message", "arguments", "name", "output", "error", "metadata", "reason"}
    assert (IDENTIFIERS | RECORDS) & (content | {"answer", "warning", "new_tools", "extra"}) == set()


async def test_secrets_equal_to_field_names_do_not_damage_a_trace(tmp_path: Path) -> None:
    names = ["arguments", "output", "result", "success", "call_id", "CallFinished", "TIMEOUT", "metadata", "clocks"]
    path, _, _ = await run_traced(tmp_path, secrets={name: name for name in names}, answer=fail)
    assert (load_trace(path).faults(), load_trace(path).events != []) == ([], True)


async def test_masked_text_is_cut_to_its_field_limit(tmp_path: Path) -> None:
    answer = "secret" * (MAX_OUTPUT_CHARS // 6)
    path, _, _ = await run_traced(
        tmp_path,
        ScriptedModel([Calls([("secret" * 20, {}), ("echo", {"text": "a"})]), "done"]),
        secrets={"the secret": "secret"},
        answer=lambda call: echo(call).model_copy(update={"output": answer}),
    )
    trace = load_trace(path)
    [unknown, valid] = trace.calls
    assert trace.faults() == []
    assert (len(unknown.tool), valid.result and len(valid.result.output or "")) == (MAX_NAME_CHARS, MAX_OUTPUT_CHARS)


async def test_trace_files_and_folders_are_private(tmp_path: Path) -> None:
    await run_traced(tmp_path / "traces", answer=lambda call: echo(call).model_copy(update={"output": "x" * 40_000}))
    modes = {file.is_file(): file.stat().st_mode & 0o777 for file in (tmp_path / "traces").rglob("*")}
    assert modes == {True: 0o600, False: 0o700}


# Values that JSON does not have


async def test_lone_surrogates_and_nan_are_recorded(tmp_path: Path) -> None:
    history = [{"role": "user", "content": "half \ud800 a pair", "n": float("nan")}]
    path, _, _ = await run_traced(tmp_path, history=history)
    assert load_trace(path).faults() == []
    assert of_type(path, "ModelAsked")[0]["new_messages"][1]["content"] == "half ? a pair"


async def test_deeply_nested_values_are_left_out(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    model = ScriptedModel([Calls([("echo", {"text": deep})]), "done"])
    path, _, _ = await run_traced(tmp_path, model, history=[{"role": "user", "content": deep}])
    assert ("nested too deeply" in path.read_text(), load_trace(path).faults()) == (True, [])


@settings(max_examples=25, deadline=None)
@given(scripts)
async def test_any_recorded_run_is_read_back(tmp_path_factory: pytest.TempPathFactory, script: list[Any]) -> None:
    received: list[Any] = []
    model = ScriptedModel(script)
    path, result, _ = await run_traced(
        tmp_path_factory.mktemp("t"), model, also=received.append, max_malformed_replies=9
    )
    trace = load_trace(path)
    assert trace.faults() == []
    assert (trace.finished is not None and trace.finished.stop_reason) == result.stop_reason.value
    results = [(call.call_id, call.result.text()) for call in trace.calls if call.result]
    assert results == [
        (event.result.call_id, event.result.text()) for event in received if isinstance(event, CallFinished)
    ]


# Writing


def failures_in(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often the log says that a file of events cannot be written."""
    return sum("events_not_kept" in message for message in caplog.messages)


async def test_trace_lines_are_written_without_further_events(tmp_path: Path) -> None:
    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:
        trace(RunStarted(run=RUN, instruction="x", model="m", dialect="native"))
        assert not trace.path.exists()
        await until(lambda: trace.path.exists(), 30)


async def test_resumed_run_continues_the_trace(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"v":2,"seq":13,"type":"Warn')
    await run_traced(tmp_path, ScriptedModel(["Better."]))
    trace = load_trace(path)
    assert trace.attempts == 2
    assert trace.incomplete == 1
    assert trace.damaged == 0
    assert (trace.finished and trace.finished.answer) == "Better."
    assert len(trace.steps) == 1
    numbers = [json.loads(line)["seq"] for line in re.findall(r'.*"RunStarted".*', path.read_text())]
    assert (numbers, trace.gaps) == ([0, 13], 0)


@pytest.mark.parametrize(
    ("tenant", "run"),
    [("../x", "r"), ("acme", "../r"), ("acme", "a/b"), ("", "r"), ("acme", "x" * 65), ("acme", "r\n")],
)
def test_invalid_tenant_or_run_name_is_refused(tmp_path: Path, tenant: str, run: str) -> None:
    with pytest.raises(ConfigError, match="use 1 to 64 letters"):
        trace_path(tmp_path, tenant, run)


async def test_trace_is_not_written_through_a_symlink(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    target.write_text("mine\n")
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "run1.jsonl").symlink_to(target)
    _, result, _ = await run_traced(tmp_path)
    assert (target.read_text(), result.answer, failures_in(caplog)) == ("mine\n", "It is a.", 1)


async def test_unwritable_trace_folder_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "acme").write_text("a file")
    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:
        for _ in range(3):
            trace(RunStarted(run=RUN, instruction="x" * 20_000, model="m", dialect="native"))
            trace.close()
    assert failures_in(caplog) == 1


async def test_full_disk_loses_lines_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_write, room = os.write, [500]

    def write(descriptor: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = original_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr("toolcrew.orchestrator.traces.event_file.os.write", write)
    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:
        for number in range(5):
            trace(RunStarted(run=RUN, instruction=str(number), model="m", dialect="native"))
        trace.close()
        room[0] = 1 << 20
        trace(RunStarted(run=RUN, instruction="again", model="m", dialect="native"))
        trace.close()
    read = load_trace(trace.path)
    assert read.incomplete + read.damaged == 1
    assert read.gaps > 0
    assert len(read.events) == 6 - read.gaps
    assert read.start.instruction == "again"


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator[ToolClient]:
    def say(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        return Outcome(str(arguments.get("text")))

    async with SwitchedPool(redis_server, WorkerTool(build_spec("say"), say)).client() as opened:
        yield opened


async def test_trace_of_a_client_run_has_its_sandbox_and_calls(client: ToolClient, tmp_path: Path) -> None:
    events: list[RunEvent] = []
    model = ScriptedModel([Calls([("say", {"text": "a"})]), "ok"])
    await client.run("go", session=await client.open_session(), model=model, on_event=events.append, shows_output=False)
    kinds = [type(event) for event in events]
    assert kinds.index(SandboxReady) < kinds.index(RunStarted)
    assert [kind for kind in kinds if kind in (CallStarted, CallSent, CallFinished)] == [
        CallStarted,
        CallSent,
        CallFinished,
    ]
    with open_trace(tmp_path, "acme", events[0].run, masker=Masker()) as trace:
        for event in events:
            trace(event)
    read = load_trace(trace.path)
    assert (read.faults(), [type(event) for event in read.events[:2]]) == ([], [RunStarted, SandboxReady])
    assert (read.session, [call.arguments for call in read.calls]) == (SESSION, [{"text": "a"}])
