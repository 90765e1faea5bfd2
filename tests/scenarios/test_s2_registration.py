"""Rows S2-24 to S2-27 of the scenarios (and T18, T19): one registry, with every tool enabled at the start, switched
off and on during use, and listed.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_context, build_spec
from tests.support.records.fakes import MemoryBlobs, MemoryLedger, build_executor
from tests.support.records.skill_harness import SHIPPED
from tests.support.redis.switched_pool import SwitchedPool
from tests.support.web.web_servers import MemoryStore
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import BUILTIN_TOOLS
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.run_events import CallFinished, RunEvent
from toolcrew.contract.settings import WebSettings
from toolcrew.contract.specs import SkillSummary
from toolcrew.orchestrator.functions.function_tools import tool
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sdk.local_tools import LocalTools
from toolcrew.store.skills import SkillStore
from toolcrew.workers.custom.calls import CustomCalls
from toolcrew.workers.custom.loading import serve_values
from toolcrew.workers.skills.loader import load_skills
from toolcrew.workers.skills.tool import build_skill_tool, register_skill_tools
from toolcrew.workers.tools.base import Outcome, WorkerTool
from toolcrew.workers.tools.builtin import build_registry
from toolcrew.workers.web.tools import build_web_tools

ALPHA, BETA = build_spec("alpha_tool"), build_spec("beta_tool")


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    with capture_logs():
        yield


@pytest.fixture(autouse=True)
def fresh_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache of the switches. Other tests check how old a cached value may be."""
    monkeypatch.setattr("toolcrew.store.tools.SWITCHES_FRESH_S", 0.0)


def build_answering(text: str) -> Any:
    return lambda *_: Outcome(text)


@pytest.fixture
async def pool(redis_server: RedisProcess) -> SwitchedPool:
    verb = WorkerTool(build_spec("session.close", audience="session"), build_answering("closed"))
    return SwitchedPool(
        redis_server,
        WorkerTool(ALPHA, build_answering("from alpha")),
        WorkerTool(BETA, build_answering("from beta")),
        verb,
    )


@pytest.fixture
async def client(pool: SwitchedPool) -> AsyncIterator[ToolClient]:
    async with pool.client() as opened:
        yield opened


async def work(client: ToolClient, *replies: Any) -> list[str]:
    """Run the agent with these replies. Return the result of each call."""
    events: list[RunEvent] = []
    await client.run(
        "go", session=await client.open_session(), model=ScriptedModel([*replies, "ok"]), on_event=events.append
    )
    return [event.result.text() for event in events if isinstance(event, CallFinished)]


def call(name: str) -> Calls:
    return Calls([(name, {})])


def test_s2_24_all_kinds_of_tools_are_registered_in_one_registry_and_run_from_it(
    redis_server: RedisProcess,
) -> None:
    @tool
    def own_tool() -> str:
        """An operator's tool."""
        return "from own"

    registry = build_registry()
    skills = load_skills([SHIPPED])
    registry.register(build_skill_tool(skills))
    register_skill_tools(registry, skills)
    for made in (
        *build_web_tools(WebSettings(), MemoryStore()),
        *serve_values([own_tool], CustomCalls({}), "this test"),
    ):
        registry.register(made)
    names = {state.name for state in registry.describe() if state.spec.audience == "model"}
    assert names == BUILTIN_TOOLS | {skill.summary.name for skill in skills} | {"own_tool"}
    worker = build_executor(registry, None, MemoryLedger(), MemoryBlobs(), {})
    assert worker.execute(build_call("own_tool", call_id="a"), build_context()).output == "from own"
    for name in names:
        registry.disable(name)
    codes = {worker.execute(build_call(name, call_id=name), build_context()).error_code for name in names}
    assert codes == {ErrorCode.TOOL_DISABLED}


@pytest.mark.parametrize("off", ["counts", "skill_tool", "bash_tool"])
async def test_s2_24_a_tenant_skill_runs_through_skill_tool_and_can_be_disabled(
    redis_server: RedisProcess, off: str
) -> None:
    runner = WorkerTool(build_skill_tool([]).spec, lambda arguments, _: Outcome(f"ran {arguments['name']}"))
    pool = SwitchedPool(redis_server, runner, WorkerTool(build_spec("bash_tool"), build_answering("ran")))
    summary = SkillSummary(name="counts", description="Counts.", digest="0" * 64, files=1, bytes=1)
    async with pool.client() as client, redis.asyncio.Redis.from_url(redis_server.url) as opened:
        await SkillStore(opened, "default", KEY).install("acme", summary, b"bundle", build_spec("counts"))
        session = await client.open_session()
        assert (await session.call("counts", {"text": "a"})).output == "ran counts"
        switch = b'{"by": "ada"}'
        pool.redis.hset("toolcrew:default:switches", off, switch)
        assert (await session.call("counts", {"text": "a"})).error_code is ErrorCode.TOOL_DISABLED
        # The worker refuses the call too, even if the sender's copy of the switches is stale.
        client._dispatcher._rules = replace(client._dispatcher._rules, switches=None)
        assert (await session.call("counts", {"text": "a"})).error_code is ErrorCode.TOOL_DISABLED


def test_s2_25_the_built_in_tools_are_registered_and_enabled_by_default() -> None:
    states = {state.name: state.state for state in build_registry().describe() if state.spec.audience == "model"}
    assert {"bash_tool", "read_tool", "write_tool", "edit_tool", "glob_tool", "grep_tool"} <= set(states)
    assert set(states.values()) == {"enabled"}


def test_s2_25_the_web_tools_are_registered_without_a_search_key() -> None:
    """T22: a tool without its key reports the missing key on a call. The tool is listed, and the start succeeds."""
    tools = build_web_tools(WebSettings(), MemoryStore())
    states = {state.name: state.state for state in ToolRegistry(tools).describe()}
    assert states == {"webfetch_tool": "enabled", "websearch_tool": "enabled"}


async def test_s2_26_a_disabled_tool_cannot_be_called_and_others_can(pool: SwitchedPool, client: ToolClient) -> None:
    async with pool.client() as administrator:
        await administrator.disable("beta_tool", reason="it is being repaired", by="ada")
    session = await client.open_session()
    refused = await session.call("beta_tool", {})
    assert (refused.error_code, "beta_tool" in (refused.error or "")) == (ErrorCode.TOOL_DISABLED, True)
    assert "it is being repaired" in (refused.error or "")
    assert (await session.call("alpha_tool", {})).output == "from alpha"


async def test_s2_26_a_tool_disabled_during_a_run_gives_an_error_result_and_the_loop_continues(
    pool: SwitchedPool,
) -> None:
    def turn_beta_off(*_: Any) -> Outcome:
        pool.redis.hset("toolcrew:default:switches", "beta_tool", '{"by": "ada"}')
        return Outcome("from alpha")

    pool.registry.register(WorkerTool(ALPHA, turn_beta_off))
    async with pool.client() as client:
        result = await work(client, call("beta_tool"), call("alpha_tool"), call("beta_tool"), call("alpha_tool"))
    assert [text.split(":")[0] for text in result] == ["from beta", "from alpha", "Error [TOOL_DISABLED]", "from alpha"]


async def test_s2_26_a_disabled_tool_is_not_offered_to_the_agent_and_a_call_reads_why(
    client: ToolClient,
) -> None:
    """T18: the error differs from the error for a missing tool."""
    await client.disable("beta_tool", reason="no more")
    model = ScriptedModel([call("beta_tool"), call("gamma_tool"), "ok"])
    events: list[RunEvent] = []
    await client.run("go", session=await client.open_session(), model=model, on_event=events.append)
    messages = [event.result.text() for event in events if isinstance(event, CallFinished)]
    assert "(no more)" in messages[0]
    assert messages[0].startswith("Error [TOOL_DISABLED]")
    assert messages[1] == "Error [TOOL_NOT_FOUND]: Tool not found: gamma_tool"
    assert [described["function"]["name"] for described in model.requests[0].tools or ()] == ["alpha_tool"]


async def test_s2_26_a_worker_refuses_a_disabled_tool_from_any_sender(pool: SwitchedPool, client: ToolClient) -> None:
    await client.disable("beta_tool")
    client._dispatcher._rules = replace(client._dispatcher._rules, switches=None)
    assert (await (await client.open_session()).call("beta_tool", {})).error_code is ErrorCode.TOOL_DISABLED


async def test_s2_26_an_enabled_tool_works_again(client: ToolClient) -> None:
    await client.disable("beta_tool")
    state = await client.enable("beta_tool")
    assert state is not None
    assert state.state == "enabled"
    assert await work(client, call("beta_tool")) == ["from beta"]


async def test_s2_26_unknown_tools_and_session_operations_cannot_be_disabled(client: ToolClient) -> None:
    for name, code in (("beta_tol", ErrorCode.TOOL_NOT_FOUND), ("session.close", ErrorCode.INVALID_ARGUMENTS)):
        with pytest.raises(ToolFailure) as refused:
            await client.disable(name)
        assert refused.value.code is code
    with pytest.raises(ToolFailure) as unknown:
        await client.enable("beta_tol")
    assert "beta_tool" in str(unknown.value.metadata["nearest"])


async def test_s2_26_the_switch_of_a_tool_without_a_worker_can_be_removed(
    pool: SwitchedPool, client: ToolClient
) -> None:
    pool.redis.hset("toolcrew:default:switches", "gone_tool", "{}")
    assert await client.enable("gone_tool") is None
    assert pool.redis.hgetall("toolcrew:default:switches") == {}


async def test_s2_26_no_approval_is_requested_for_a_disabled_tool(redis_server: RedisProcess) -> None:
    requests: list[str] = []

    class Asking:
        async def decide(self, request: Any) -> Any:
            requests.append(request.call.name)
            raise AssertionError

    def turn_risky_off(*_: Any) -> Outcome:
        pool.redis.hset("toolcrew:default:switches", "risky_tool", "{}")
        return Outcome("from alpha")

    risky = WorkerTool(build_spec("risky_tool", requires_permission=True), build_answering("ran"))
    pool = SwitchedPool(redis_server, WorkerTool(ALPHA, turn_risky_off), risky)
    async with pool.client() as client:
        client._builder.reviewer.approver = Asking()
        result = await work(client, call("alpha_tool"), call("risky_tool"))
    assert (requests, result[1].split(":")[0]) == ([], "Error [TOOL_DISABLED]")


async def test_s2_26_local_tools_are_disabled_and_enabled_in_their_registry() -> None:
    @tool
    def shout(text: str) -> str:
        """Say it loudly."""
        return text.upper()

    tools = LocalTools([shout])
    tools.registry.disable("shout")
    events: list[RunEvent] = []
    for _ in range(2):
        model = ScriptedModel([Calls([("shout", {"text": "hi"})]), "ok"])
        await tools.run("go", model=model, on_event=events.append)
        tools.registry.enable("shout")
    messages = [event.result for event in events if isinstance(event, CallFinished)]
    assert [(result.success, result.error_code) for result in messages] == [
        (False, ErrorCode.TOOL_DISABLED),
        (True, None),
    ]


async def test_s2_27_the_list_has_every_registered_tool_with_name_description_and_status(client: ToolClient) -> None:
    """T19: the administrator sees every tool; an agent sees only enabled tools."""
    await client.disable("beta_tool", reason="no more", by="ada")
    states = await client.tool_states()
    assert [(state.name, state.description, state.state) for state in states] == [
        ("alpha_tool", "The tool alpha_tool.", "enabled"),
        ("beta_tool", "The tool beta_tool.", "disabled"),
    ]
    switch = states[1].switch
    assert switch is not None
    assert (switch.by, switch.reason, switch.at > 1_700_000_000) == ("ada", "no more", True)
    assert [spec.name for spec in await client.tools()] == ["alpha_tool"]
    assert await client.tools(["beta_tool"]) == []
