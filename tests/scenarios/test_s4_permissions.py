"""Rows S4-05, 06, 24 and 25 of the scenarios: permission, danger, allowed and forbidden commands, and user input in a
command string.
"""

import io
from typing import Any

from tests.support.records.builders import KEY, build_call, build_context, build_exec_response, build_spec
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, StaticCatalog, build_executor
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.approvals import (
    ApprovalRequest,
    Approver,
    AutoApprover,
    CallbackApprover,
    ConsoleApprover,
    RefusingApprover,
    review,
)
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, Rule
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.in_process_transport import InProcessTransport
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.models.scripted import ScriptedModel
from toolcrew.workers.tools.builtin import build_registry

BASH = build_spec(
    "bash_tool", properties={"command": {"type": "string"}}, required=["command"], command_parameter="command"
)
WRITE = build_spec("write_tool", requires_permission=True)


async def run_agent(
    spec: ToolSpec, argument: str, value: str, approver: Approver, policy: ApprovalPolicy
) -> tuple[list[str], ScriptedModel]:
    """Run an agent whose model calls the tool once. Return the tool's runs and the messages that the model received."""
    executed: list[str] = []

    def tool(**arguments: Any) -> str:
        executed.append(arguments[argument])
        return "done"

    dispatcher = Dispatcher(
        InProcessTransport({spec.name: tool}, KEY), TenantCatalog(StaticCatalog(spec)), KEY, queue_wait_s=1
    )

    async def run_call(call: ToolCall) -> ToolResult:
        reviewed = await review(call, spec, approver, policy=policy, tenant="acme", session="s1")
        return (
            reviewed
            if isinstance(reviewed, ToolResult)
            else await dispatcher.dispatch(Request(reviewed, "acme", "s1", "q"))
        )

    model = ScriptedModel(
        [f'<tool_action name="{spec.name}"><{argument} value="{value}" /></tool_action>', "So be it."]
    )
    await Agent(model, TagsDialect(), [spec], run_call).run("do it")
    return executed, model


def text_for_model(model: ScriptedModel) -> str:
    return str(model.requests[1].messages[-1]["content"])


async def test_s4_05_permission_is_requested_before_the_tool_runs() -> None:
    requests: list[ApprovalRequest] = []

    def say(request: ApprovalRequest) -> bool:
        requests.append(request)
        return True

    executed, _ = await run_agent(WRITE, "text", "hello", CallbackApprover(say), ApprovalPolicy())
    assert WRITE.requires_permission is True
    assert ([request.call.arguments for request in requests], executed) == ([{"text": "hello"}], ["hello"])


async def test_s4_05_without_permission_the_tool_does_not_run_and_the_model_reads_why() -> None:
    executed, model = await run_agent(WRITE, "text", "hello", RefusingApprover(), ApprovalPolicy())
    assert executed == []
    assert "PERMISSION_DENIED" in text_for_model(model)
    assert "no approver is configured" in text_for_model(model)


async def test_s4_06_a_dangerous_operation_is_shown_with_an_extra_warning() -> None:
    shown = io.StringIO()
    wipe = build_spec("wipe", dangerous=True)
    executed, _ = await run_agent(wipe, "text", "all", ConsoleApprover(io.StringIO("y\n"), shown), ApprovalPolicy())
    assert "WARNING: this tool is marked dangerous" in shown.getvalue()
    assert executed == ["all"]


async def test_s4_06_a_tool_that_only_requires_permission_is_shown_without_the_warning() -> None:
    shown = io.StringIO()
    await run_agent(WRITE, "text", "x", ConsoleApprover(io.StringIO("y\n"), shown), ApprovalPolicy())
    assert "needs approval" in shown.getvalue()
    assert "WARNING" not in shown.getvalue()


async def test_s4_24_a_dangerous_command_needs_an_explicit_approval() -> None:
    ran_after: dict[str, list[str]] = {}
    for answer in ("n\n", "y\n"):
        console = ConsoleApprover(io.StringIO(answer), io.StringIO())
        ran_after[answer], _ = await run_agent(BASH, "command", "rm -rf /srv/build", console, ApprovalPolicy())
    assert ran_after == {"n\n": [], "y\n": ["rm -rf /srv/build"]}


async def test_s4_24_a_command_on_the_allowed_list_needs_no_approval() -> None:
    policy = ApprovalPolicy((Rule("allow", tool="bash_tool", argv_prefix=("rm", "-rf", "/srv/build")),))
    executed, _ = await run_agent(BASH, "command", "rm -rf /srv/build", RefusingApprover(), policy)
    assert executed == ["rm -rf /srv/build"]


async def test_s4_24_a_command_on_the_forbidden_list_is_a_security_error_despite_any_approval() -> None:
    policy = ApprovalPolicy((Rule("deny", tool="bash_tool", argv_prefix=("git", "push")), Rule("allow")))
    for command in ("git push", "rm -rf /"):
        executed, model = await run_agent(BASH, "command", command, AutoApprover(), policy)
        assert executed == []
        assert str(ErrorCode.SECURITY_REFUSED) in text_for_model(model)


async def test_s4_25_a_command_string_reaches_the_shell_exactly_as_approved() -> None:
    command = "printf '%s' \"a  b\" '$HOME' `echo` \\; && echo \u00e9"
    reviewed = await review(build_call("bash_tool", command=command), BASH, AutoApprover())
    assert isinstance(reviewed, ToolCall)
    client = FakeSandboxClient(build_exec_response(b"ok"))
    executor = build_executor(build_registry(), client, MemoryLedger(), MemoryBlobs(), {"host": "h", "queue": "q"})
    executor.execute(reviewed, build_context())
    assert (client.requests[0]["argv"], client.bodies) == (None, [command.encode()])


async def test_s4_25_unescaped_input_that_adds_a_dangerous_command_is_refused() -> None:
    user_input = "notes.txt; rm -rf /"
    executed, model = await run_agent(BASH, "command", f"cat {user_input}", AutoApprover(), ApprovalPolicy())
    assert executed == []
    assert str(ErrorCode.SECURITY_REFUSED) in text_for_model(model)
