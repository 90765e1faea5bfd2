"""LocalTools: a program's functions behind the same dispatcher as the pool's tools, with one object for many runs."""

import asyncio
import json
import threading
from typing import Any

import pytest
from jsonschema.exceptions import SchemaError

from tests.support.records.builders import build_call
from tests.support.stack.waiting import SOON_S
from toolcrew import LocalTools, tool
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.functions.call_context import CallContext
from toolcrew.orchestrator.approvals import ApprovalRequest, AutoApprover, CallbackApprover, Decision
from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.dialects.profiles import ModelProfile
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.models.choice import ChosenModel
from toolcrew.orchestrator.models.scripted import Calls, Raw, ScriptedModel
from toolcrew.orchestrator.sdk.tool_loop import ToolLoopDeps, run_tool_loop


@tool
def get_weather(city: str) -> dict[str, Any]:
    """Weather of a city."""
    return {"city": city, "temp": 22, "sky": "晴"}


@tool
async def count(context: CallContext) -> int:
    """Count the calls of a session."""
    total: int = await context.state.update("n", lambda n: (n or 0) + 1)
    return total


@tool(dangerous=True)
def wipe(path: str = "all") -> str:
    """Wipe."""
    return f"wiped {path}"


async def call(tools: Any, name: str, **arguments: Any) -> ToolResult:
    result = await tools.run_call(build_call(name, **arguments))
    assert isinstance(result, ToolResult)
    return result


async def test_result_of_a_function_is_json_text() -> None:
    result = await call(LocalTools([get_weather]), "get_weather", city="Oslo")
    assert (result.success, result.output) == (True, '{"city": "Oslo", "temp": 22, "sky": "晴"}')


def test_tool_whose_parameters_are_not_an_object_is_refused() -> None:
    with pytest.raises(SchemaError):
        LocalTools([{"name": "x", "description": "X.", "parameters": {"type": "array"}, "execute": print}])


@pytest.mark.parametrize("arguments", [{}, {"city": 5}, {"city": "Oslo", "town": "x"}])
async def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    result = await call(LocalTools([get_weather]), "get_weather", **arguments)
    assert result.error_code is ErrorCode.INVALID_ARGUMENTS


# Limits


async def test_blocking_tool_does_not_block_the_event_loop_and_times_out() -> None:
    release = threading.Event()

    def block() -> None:
        release.wait(30)

    tools = LocalTools([block, count], timeout_s=0.2)
    blocked = asyncio.create_task(call(tools, "block"))
    assert (await call(tools, "count")).success
    result = await blocked
    release.set()
    assert (result.error_code, "may still run" in str(result.error)) == (ErrorCode.TIMEOUT, True)


async def test_argument_named_timeout_is_passed_to_the_function() -> None:
    @tool
    async def fetch(timeout: float) -> float:
        await asyncio.sleep(0)
        return timeout

    assert (await call(LocalTools([fetch]), "fetch", timeout=0.0000001)).output == "1e-07"


# Approvals


async def test_approver_can_change_the_arguments() -> None:
    requests: list[ApprovalRequest] = []

    def decide(request: ApprovalRequest) -> Decision:
        requests.append(request)
        return Decision(True, arguments={"path": "little"})

    assert (await call(LocalTools([wipe], approver=CallbackApprover(decide)), "wipe")).output == "wiped little"
    assert (await call(LocalTools([wipe], approver=AutoApprover()), "wipe")).output == "wiped all"
    assert [request.call.name for request in requests] == ["wipe"]


# Surroundings


async def test_state_is_kept_per_session_and_not_shared_between_runs() -> None:
    tools = LocalTools([count])
    assert [(await call(tools, "count")).output for _ in range(2)] == ["1", "2"]
    assert [(await call(tools.for_run(), "count")).output for _ in range(2)] == ["1", "1"]
    assert [(await call(tools.for_run(session="s"), "count")).output for _ in range(2)] == ["1", "2"]
    assert (await call(tools.for_run(session="t"), "count")).output == "1"
    tools.forget_session("s")
    assert (await call(tools.for_run(session="s"), "count")).output == "1"


async def test_concurrent_runs_can_share_one_local_tools_object() -> None:
    tools = LocalTools([get_weather, count])

    async def one(number: int) -> tuple[str | None, str | None]:
        bound = tools.for_run(run=f"r{number}")
        await bound.run_call(ToolCall(id="c", name="count"))
        weather = await bound.run_call(ToolCall(id="c", name="get_weather", arguments={"city": f"c{number}"}))
        return (await bound.run_call(ToolCall(id="c", name="count"))).output, json.loads(weather.output or "")["city"]

    assert await asyncio.gather(*(one(number) for number in range(100))) == [
        ("2", f"c{number}") for number in range(100)
    ]


def test_local_tools_object_works_in_successive_event_loops() -> None:
    tools = LocalTools([get_weather, count])
    for expected in ("1", "2"):
        assert asyncio.run(call(tools, "get_weather", city="x")).success
        assert asyncio.run(call(tools, "count")).output == expected


# With the loop


async def test_tool_timeout_option_applies_to_tools_without_a_limit() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    model = ScriptedModel([Calls([("hang", {})]), "It hung."])
    async with asyncio.timeout(SOON_S):
        await LocalTools([hang]).run("go", model=model, dialect="native", options=ReActOptions(tool_timeout_s=0.05))
    assert "did not end within its limit of 0.05 s" in model.requests[1].messages[-1]["content"]


async def test_run_sets_the_call_context_and_the_model_instruction() -> None:
    contexts: list[CallContext] = []
    look = {"name": "look", "description": "Looks.", "execute": lambda args, context: contexts.append(context)}
    tools = LocalTools([look], tenant="acme")
    await call(tools.for_run(run="r1", session="s1"), "look")
    context = contexts.pop()
    assert (context.call_id, context.tenant, context.run, context.session) == ("call-1", "acme", "r1", "s1")
    model = ScriptedModel([Calls([("look", {})]), "ok"])
    result = await tools.run(
        "go", model=ChosenModel(model, ModelProfile("standard", instruction="Be brief.")), dialect="native"
    )
    assert (contexts[0].run, model.requests[0].messages[0]["content"]) == (result.run, "Be brief.")


@pytest.mark.parametrize("session", ["s1", "user:42", "名" * 100])
async def test_tool_loop_keeps_state_per_session(session: str) -> None:
    def chat(messages: list[Message]) -> str:
        last = str(messages[-1]["content"])
        return json.dumps(
            {"tool": None, "reply": last[-1]} if last.startswith("[Tool result") else {"tool": "count", "arguments": {}}
        )

    deps = ToolLoopDeps(chat, LocalTools([count]))
    replies = [(await run_tool_loop(deps, name, "go")).reply for name in (session, "other", session)]
    assert replies == ["1", "1", "2"]


@pytest.mark.parametrize(
    ("content", "calls"),
    [
        ('{"tool": null, "reply": ""}', []),
        (None, [{"index": 0, "id": "c", "function": {"name": "count", "arguments": "{}"}}]),
    ],
    ids=["empty reply", "native call"],
)
async def test_tool_loop_without_text_returns_an_empty_reply(content: str | None, calls: list[Any]) -> None:
    delta = {"content": content, "tool_calls": calls}
    model = ScriptedModel([Raw([{"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}])])
    result = await run_tool_loop(ToolLoopDeps(model, LocalTools([count])), "s1", "go", max_tool_rounds=1)
    assert result.reply == ""


async def test_approval_does_not_apply_to_a_tool_replaced_meanwhile() -> None:
    ran: list[str] = []

    @tool(name="wipe", dangerous=True)
    def replacement(path: str = "all") -> None:
        ran.append(path)

    tools = LocalTools([wipe], approver=CallbackApprover(lambda _: tools.register(replacement) is not None))
    result = await call(tools, "wipe")
    assert (result.error_code, ran) == (ErrorCode.PERMISSION_DENIED, [])
