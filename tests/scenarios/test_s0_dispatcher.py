"""Rows S0-12 of the scenarios: what the dispatcher says of a tool that does not exist."""

from contract.calls import ToolCall, ToolResult
from orchestrator.agent import Agent
from orchestrator.dialects.tags import TagsDialect
from orchestrator.dispatcher import Dispatcher, Route
from orchestrator.models.scripted import ScriptedModel
from orchestrator.transport import InProcessTransport
from tests.builders import KEY, build_spec
from tests.fakes import StaticCatalog


async def test_s0_12_a_tool_that_does_not_exist_is_an_error_result_that_the_model_reads() -> None:
    dispatcher = Dispatcher(InProcessTransport({}, KEY), StaticCatalog(build_spec("echo")), KEY, queue_wait_s=1)
    results: list[ToolResult] = []

    async def run_call(call: ToolCall) -> ToolResult:
        results.append(await dispatcher.dispatch(call, Route("acme", "s1", "q")))
        return results[-1]

    model = ScriptedModel(['<tool_action name="vector-search"><query value="x" /></tool_action>', "There is no such tool."])
    result = await Agent(model, TagsDialect(), [build_spec("echo")], run_call).run("search")
    assert (results[0].success, results[0].error) == (False, "Tool not found: vector-search")
    assert "Tool not found: vector-search" in model.requests[1].messages[-1]["content"]
    assert result.answer == "There is no such tool."
