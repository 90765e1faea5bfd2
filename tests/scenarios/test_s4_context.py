"""Rows S4-02 and S4-12 to S4-15 of the scenarios: the definition of a tool, and the context that a tool gets besides
its arguments.
"""

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_context, build_spec
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew import CallContext, LocalTools, as_tool, tool
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.call_events import MODEL
from toolcrew.contract.calls import ToolContext, ToolResult
from toolcrew.contract.functions.call_context import ModelAdapter
from toolcrew.contract.functions.function_tools import FunctionTool
from toolcrew.contract.registry import Tool
from toolcrew.orchestrator.dispatch.call_event_listener import CallEventListener
from toolcrew.orchestrator.dispatch.model_requests import ModelRequests
from toolcrew.orchestrator.models.adapter import MAX_CALLS, BudgetedModel
from toolcrew.orchestrator.models.scripted import ScriptedModel
from toolcrew.store.connection import connect, open_redis
from toolcrew.store.tool_state import StateStore
from toolcrew.workers.call_event_writer import open_call_events
from toolcrew.workers.custom.calls import CustomCalls
from toolcrew.workers.executor import Executor
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerRegistry, WorkerTool


class FixedModel:
    """A model that returns the same completion for every prompt."""

    name = "fixed"

    async def complete(self, *_: Any, **__: Any) -> str:
        return "done"


async def call(tools: Any, name: str, **arguments: Any) -> Any:
    result: ToolResult = await tools.run_call(build_call(name, **arguments))
    assert result.success, result.error
    return json.loads(result.output or "")


async def test_s4_02_functions_dicts_and_classes_become_the_same_kind_of_tool() -> None:
    def plain(n: int) -> int:
        return n + 1

    async def execute(args: dict[str, Any], context: CallContext) -> Any:
        return args["n"] + 1

    class BaseTool:
        name = "run_method"
        description = "Adds one."

        def _run(self, n: int) -> int:
            return n + 1

    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [
        as_tool(plain),
        as_tool({"name": "execute", "description": "Adds one.", "parameters": parameters, "execute": execute}),
    ]
    tools.append(as_tool(BaseTool()))
    assert all(
        isinstance(made, Tool) and made.name and made.spec.description and made.spec.parameters for made in tools
    )
    assert [await call(LocalTools(tools), made.name, n=1) for made in tools] == [2, 2, 2]


async def test_s4_12_every_execution_gets_its_own_context() -> None:
    @tool
    async def which(context: CallContext) -> list[str]:
        return [context.call_id, context.tenant]

    tools = LocalTools([which], tenant="acme")
    results = [await tools.run_call(build_call("which", call_id=call_id)) for call_id in ("a", "b")]
    assert [result.output for result in results] == ['["a", "acme"]', '["b", "acme"]']
    assert tools.specs()[0].parameters["properties"] == {}


async def test_s4_13_the_context_contains_the_current_configuration_and_the_working_directory() -> None:
    @tool
    def look(context: CallContext) -> list[Any]:
        return [context.config["region"], context.cwd]

    config = {"region": "north"}
    tools = LocalTools([look], config=config, cwd="/data")
    assert await call(tools, "look") == ["north", "/data"]
    config["region"] = "south"
    assert await call(tools, "look") == ["south", "/data"]


async def test_s4_13_a_tool_cannot_change_the_configuration() -> None:
    @tool
    def meddle(context: CallContext) -> None:
        context.config["region"] = "mine"  # type: ignore[index]

    result = await LocalTools([meddle], config={"region": "north"}).run_call(build_call("meddle"))
    assert (result.success, "TypeError" in str(result.error)) == (False, True)


async def test_s4_14_the_context_contains_the_current_model_and_a_tool_can_call_it() -> None:
    @tool
    async def ask(context: CallContext) -> list[Any]:
        assert isinstance(context.model, ModelAdapter)
        return [context.model.name, await context.model.complete("What now?")]

    @tool
    def ask_plainly(context: CallContext) -> Any:
        assert context.model is not None
        return context.wait(context.model.complete("What now?"))

    tools = LocalTools([ask, ask_plainly], model=FixedModel())
    assert await call(tools, "ask") == ["fixed", "done"]
    assert (await tools.run_call(build_call("ask_plainly"))).output == "done"


async def test_s4_14_a_run_with_another_model_gets_that_model() -> None:
    class Other(FixedModel):
        name = "other"

    @tool
    async def name(context: CallContext) -> list[str]:
        assert context.model is not None
        return [context.model.name]

    tools = LocalTools([name], model=FixedModel())
    assert [await call(tools, "name"), await call(tools.for_run(model=Other()), "name")] == [["fixed"], ["other"]]


async def test_s4_14_a_plain_model_is_wrapped_in_an_adapter_with_a_budget_for_each_call() -> None:
    @tool
    async def ask(context: CallContext) -> str:
        assert isinstance(context.model, BudgetedModel)
        completion = await context.model.complete("What now?")
        return f"{context.model.name}: {completion.text}"

    tools = LocalTools([ask], model=ScriptedModel(lambda _: "done"))
    results = [await tools.run_call(build_call("ask")) for _ in range(MAX_CALLS + 1)]
    assert {result.output for result in results} == {"scripted: done"}


async def test_s4_15_a_tool_reads_and_updates_the_state_of_its_session() -> None:
    @tool
    async def add(item: str, context: CallContext) -> Any:
        return await context.state.update("items", lambda items: [*(items or []), item])

    @tool
    def read(context: CallContext) -> Any:
        return context.wait(context.state.get("items", []))

    tools = LocalTools([add, read])
    one, other = tools.for_run(session="one"), tools.for_run(session="other")
    await call(one, "add", item="a")
    assert await call(one, "add", item="b") == ["a", "b"]
    assert await call(tools.for_run(session="one"), "read") == ["a", "b"]
    assert await call(other, "read") == []


# --- the same for operators' tools, in workers ---


def serve(
    *made: FunctionTool[..., Any], states: StateStore | None = None, events: Any = None, **config: Any
) -> Executor:
    """Return a worker's executor with these tools."""
    calls = CustomCalls(config)
    registry = WorkerRegistry(WorkerTool(one.spec, calls.build_handler(one), one.validators) for one in made)
    return build_executor(
        registry, None, MemoryLedger(), MemoryBlobs(), {"host": "h1"}, open_events=events, states=states
    )


def execute(
    worker: Executor, name: str, call_id: str = "call-1", context: ToolContext | None = None, **arguments: Any
) -> Any:
    result = worker.execute(build_call(name, call_id=call_id, **arguments), context or build_context())
    assert result.success, result.error
    return json.loads(result.output or "")


def test_s4_12_every_execution_in_a_worker_gets_its_own_context() -> None:
    @tool
    def which(context: CallContext) -> list[Any]:
        return [context.call_id, context.tenant, context.session, context.run]

    worker = serve(which)
    assert execute(worker, "which", "a") == ["a", "acme", "s1", None]
    assert execute(worker, "which", "b", build_context(tenant="other", session=None, run="r2")) == [
        "b",
        "other",
        None,
        "r2",
    ]


def test_s4_13_in_a_worker_the_context_contains_configuration_and_working_directory() -> None:
    @tool
    async def look(context: CallContext) -> list[Any]:
        return [context.config["region"], context.config["shop"], context.cwd]

    worker = serve(look, shop="ours")
    context = build_context(config={"region": "north", "shop": "theirs"}, cwd="/workspace/orders")
    assert execute(worker, "look", context=context) == ["north", "ours", "/workspace/orders"]


async def test_s4_14_in_a_worker_a_tool_calls_the_model_of_the_run(redis_server: RedisProcess) -> None:
    @tool
    async def ask(context: CallContext) -> list[Any]:
        assert isinstance(context.model, ModelAdapter)
        return [context.model.name, (await context.model.complete("What now?")).text]

    @tool
    def ask_plainly(context: CallContext) -> list[Any]:
        model = context.require_model()
        return [model.name, context.wait(model.complete("What now?")).text]

    broker = BrokerSettings.model_validate({"redis_url": redis_server.url})
    worker = serve(ask, ask_plainly, events=partial(open_call_events, connect(broker), "default", KEY))
    client = open_redis(broker)
    listener = CallEventListener(client, "default", KEY)
    questions = ModelRequests(ScriptedModel(lambda messages: f"Re: {messages[-1]['content']}"))
    for name in ("ask", "ask_plainly"):
        async with listener.listen("acme", name, {MODEL: questions.open_call()}, 60):
            context = build_context(model="scripted", events=listener.id)
            answer = await asyncio.to_thread(execute, worker, name, name, context)
        assert answer == ["scripted", "Re: What now?"]
    await listener.close()
    await client.aclose()


def test_s4_15_in_workers_a_tool_reads_and_updates_the_state_of_its_session(redis_server: RedisProcess) -> None:
    @tool
    async def add(item: str, context: CallContext) -> Any:
        return await context.state.update("items", lambda items: [*(items or []), item])

    @tool
    def read(context: CallContext) -> Any:
        return context.wait(context.state.get("items", []))

    with redis_server.client() as client:
        one, other = (serve(add, read, states=StateStore(client, "default")) for _ in range(2))
        execute(one, "add", "a", item="a")
        assert execute(other, "add", "b", item="b") == ["a", "b"]
        assert execute(one, "read", "c") == ["a", "b"]
        assert execute(one, "read", "d", build_context(session="s2")) == []


@pytest.mark.parametrize("has_sandbox", [True, False], ids=["with a sandbox", "without a sandbox"])
async def test_s4_12_to_15_built_in_and_skill_tools_get_the_same_context(
    redis_server: RedisProcess, has_sandbox: bool
) -> None:
    contexts: list[CallContext] = []

    def handler(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        contexts.append(bench.call_context())
        return Outcome("seen")

    with redis_server.client() as client:
        sandbox = FakeSandboxClient() if has_sandbox else None
        registry = WorkerRegistry([WorkerTool(build_spec("look", required=[]), handler)])
        states = StateStore(client, "default")
        worker = build_executor(registry, sandbox, MemoryLedger(), MemoryBlobs(), {"host": "h1"}, states=states)
        context = build_context(model="qwen", config={"region": "north"}, cwd="/workspace/orders")
        assert worker.execute(build_call("look"), context).success
        (call_context,) = contexts
        assert (call_context.tenant, call_context.session, call_context.cwd, call_context.config["region"]) == (
            "acme",
            "s1",
            "/workspace/orders",
            "north",
        )
        assert isinstance(call_context.model, ModelAdapter)
        assert call_context.model.name == "qwen"
        await call_context.state.set("step", 2)
        assert await states.open("acme", "s1").get("step") == 2
