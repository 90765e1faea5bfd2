"""Calls that run another tool, such as the runs of skill_tool. A ban, a switch or an approval rule for that tool
applies to such calls as well.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.records.builders import build_context, build_exec_response, build_spec
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from tests.support.records.skill_harness import write_skill
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.registry import Switch, ToolRegistry, check_call
from toolcrew.contract.tenancy import CommandRule, TenantPolicy, tools_of
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, Rule
from toolcrew.orchestrator.dispatch.tenant_catalog import is_offered, refuse_before_approval, with_tenant_rules
from toolcrew.workers.executor import CallPolicy
from toolcrew.workers.skills.loader import load_skills
from toolcrew.workers.skills.tool import build_skill_tool

SKILL_TOOL = build_skill_tool(()).spec
RUN, LOAD = {"name": "a", "action": "run", "script": "a.sh"}, {"name": "a", "action": "load"}
NO_BASH = TenantPolicy(tools=("skill_tool", "read_tool"))


def find_refusal(policy: TenantPolicy, arguments: dict[str, Any]) -> ErrorCode | None:
    try:
        check_call(policy, "acme", SKILL_TOOL, arguments)
    except ToolFailure as failure:
        return failure.code
    return None


def test_only_skill_runs_count_as_calls_of_other_tools() -> None:
    assert tools_of(SKILL_TOOL, RUN) == ("skill_tool", "bash_tool")
    assert tools_of(SKILL_TOOL, {"name": "a", "action": "run", "args": {}}) == ("skill_tool", "bash_tool", "a"), (
        "it is the tool that the skill is"
    )
    assert [tools_of(SKILL_TOOL, {"action": action}) for action in ("load", "read", "list")] == [("skill_tool",)] * 3
    assert tools_of(build_spec("read_tool"), RUN) == ("read_tool",)


@pytest.mark.parametrize("off", ["echo", "skill_tool", "bash_tool"])
def test_installed_skill_is_judged_as_skill_tool_and_bash_tool_too(off: str) -> None:
    spec = build_spec("echo").model_copy(update={"is_installed_skill": True})
    others = tuple({"echo", "skill_tool", "bash_tool"} - {off})
    with pytest.raises(ToolFailure) as refusal:
        check_call(TenantPolicy(tools=others), "acme", spec, {})
    assert refusal.value.code is ErrorCode.PERMISSION_DENIED
    check_call(TenantPolicy(tools=(*others, off)), "acme", spec, {})
    with pytest.raises(ToolFailure) as disabled:
        refuse_before_approval({off: Switch(by="ops")}, TenantPolicy(), "acme", spec, {})
    assert disabled.value.code is ErrorCode.TOOL_DISABLED
    assert ApprovalPolicy((Rule("ask", tool=off),)).decide("acme", spec, {}).action == "ask"
    assert not is_offered({off: Switch(by="ops")}, TenantPolicy(), spec)
    assert not is_offered({}, TenantPolicy(tools=others), spec)
    assert is_offered({}, TenantPolicy(), spec)


@pytest.mark.parametrize(
    ("policy", "arguments", "code"),
    [
        (NO_BASH, RUN, ErrorCode.PERMISSION_DENIED),
        (NO_BASH, LOAD, None),
        (TenantPolicy(tools=("skill_tool", "bash_*")), RUN, None),
        (TenantPolicy(commands=(CommandRule(action="deny", tool="bash_tool"),)), RUN, ErrorCode.PERMISSION_DENIED),
        (TenantPolicy(commands=(CommandRule(action="deny", tool="bash_tool"),)), LOAD, None),
        # A rule about commands of bash is not about scripts.
        (TenantPolicy(commands=(CommandRule(action="deny", tool="bash_tool", argv_prefix=("rm",)),)), RUN, None),
    ],
    ids=["no bash", "load without bash", "bash", "no commands", "load without commands", "another command"],
)
def test_tenant_without_bash_can_load_but_not_run_skills(
    policy: TenantPolicy, arguments: dict[str, Any], code: ErrorCode | None
) -> None:
    assert find_refusal(policy, arguments) is code


@pytest.mark.parametrize(
    ("rules", "run", "load"),
    [
        ((), "allow", "allow"),
        ((Rule("ask", tool="bash_tool"),), "ask", "allow"),
        ((Rule("deny", tool="bash_*"),), "deny", "allow"),
        ((Rule("ask", tool="bash_tool", argv_prefix=("rm",)),), "allow", "allow"),
        # What lets bash through says nothing of skills, which have to be asked about.
        ((Rule("allow", tool="bash_tool"), Rule("ask", tool="skill_tool")), "ask", "ask"),
        ((Rule("allow", tool="skill_tool"), Rule("ask", tool="bash_tool")), "ask", "allow"),
    ],
)
def test_approval_policy_judges_a_skill_run_as_both_tools(rules: tuple[Rule, ...], run: str, load: str) -> None:
    policy = ApprovalPolicy(rules)
    assert policy.decide("acme", SKILL_TOOL, RUN).action == run
    assert policy.decide("acme", SKILL_TOOL, LOAD).action == load


def test_tenant_command_rules_apply_to_skill_runs() -> None:
    own = TenantPolicy(commands=(CommandRule(action="ask", tool="bash_tool"),))
    assert with_tenant_rules(ApprovalPolicy(), own, "acme").decide("acme", SKILL_TOOL, RUN).action == "ask"


def test_refused_skill_run_asks_no_approver() -> None:
    aliased = {"skill": "a", "action": "run", "script": "a.sh"}
    for arguments in (RUN, aliased):
        with pytest.raises(ToolFailure) as off:
            refuse_before_approval(
                {"bash_tool": Switch(by="op", at=1.0)}, TenantPolicy(), "acme", SKILL_TOOL, arguments
            )
        assert off.value.code is ErrorCode.TOOL_DISABLED
        with pytest.raises(ToolFailure) as denied:
            refuse_before_approval({}, NO_BASH, "acme", SKILL_TOOL, arguments)
        assert denied.value.code is ErrorCode.PERMISSION_DENIED
    refuse_before_approval({"bash_tool": Switch(by="op", at=1.0)}, NO_BASH, "acme", SKILL_TOOL, LOAD)


class _BashOffSwitches:
    """A board of switches on which bash_tool is off."""

    def find(self, name: str, tenant: str) -> Switch | None:
        return Switch(by="op", at=1.0) if name == "bash_tool" else None


def test_worker_runs_no_skill_script_while_bash_is_off(tmp_path: Path) -> None:
    write_skill(tmp_path, "a", files={"scripts/a.sh": "true"})
    client = FakeSandboxClient(build_exec_response())
    registry = ToolRegistry((build_skill_tool(load_skills([tmp_path])),))
    executor = build_executor(
        registry,
        client,
        MemoryLedger(),
        MemoryBlobs(),
        {"host": "h1", "queue": "host.h1.b00t"},
        policy=CallPolicy(registry, _BashOffSwitches()),
    )
    results = [
        executor.execute(ToolCall(id=f"call-{number}", name="skill_tool", arguments=arguments), build_context())
        for number, arguments in enumerate((RUN, LOAD, {"name": "a"}))
    ]
    assert [result.error_code for result in results] == [ErrorCode.TOOL_DISABLED, None, None]
    assert "bash_tool" in (results[0].error or "")
    assert client.requests == []
