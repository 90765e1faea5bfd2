"""Limits of tenants and hosts that are checked before a run or a batch is queued."""

import json
from collections.abc import Collection
from io import BytesIO
from typing import Any

import pytest

from tests.support.records.builders import build_spec
from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.hosts import RELEASE, HostReport
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, LargestOptions
from toolcrew.contract.tenancy import SandboxPolicy, TenantPolicy
from toolcrew.orchestrator.batches.limit_check import TenantLimits, check_limits, find_sessions
from toolcrew.orchestrator.batches.lines import BadBatch, BatchFile, read_lines
from toolcrew.orchestrator.runs.tenant_limits import LimitReader

MIB = 1024 * 1024
LARGEST = LargestOptions(
    cpus=2, memory_bytes=512 * MIB, workspace_bytes=64 * MIB, pids=256, user="sandbox", timeout_s=600.0
)
HOST = HostReport.model_validate(
    {
        "kind": "sandbox", "host": "h", "queue": "q", "worker": "w", "release": RELEASE, "slots": 2, "busy": 0,
        "classes": ["default"], "largest": {"default": LARGEST.model_dump()}, "images": ["base", "ghcr.io/team/*"],
        "started_at": 0.0, "reported_at": 0.0,
    }
)  # fmt: skip
TOOLS = {
    spec.name: spec for spec in (build_spec("bash_tool", max_timeout_s=600.0), build_spec("quick", max_timeout_s=20.0))
}


def read(**fields: Any) -> BatchFile:
    line = {"id": "a", **({} if "tool" in fields else {"instruction": "x"}), **fields}
    return read_lines(BytesIO(json.dumps(line).encode()), None, "the body")


def check(file: BatchFile, policy: TenantPolicy | None = None, host: HostReport = HOST, **facts: Any) -> str:
    """Return the errors of the file; "" if it has none."""
    limits = TenantLimits(policy or TenantPolicy(), [host], TOOLS, **{"secrets": {"TOKEN"}, **facts})
    try:
        check_limits(file, "the body", limits, DEFAULT_OPTIONS)
    except BadBatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fields", "policy", "sentence"),
    [
        ({"tool": "bash_tool", "timeout_s": 5000}, {}, "line 1: `timeout_s` must be at most 600 s, not 5000"),
        ({"tool": "quick", "timeout_s": 30}, {}, "line 1: `timeout_s` must be at most 20 s, not 30"),
        ({"limits": {"tool_timeout_s": 5000}}, {}, "`limits.tool_timeout_s` must be at most 600 s"),
        ({"tool": "bash_tool"}, {"tools": ["read_tool"]}, "the tool bash_tool is not allowed for this tenant"),
        ({"tools": ["bash_tool"]}, {"tools": ["read_tool"]}, "the tool bash_tool is not allowed for this tenant"),
        ({"image": "other:1"}, {}, "`image`: 'other:1' is not allowed: use one of base, ghcr.io/team/*"),
        ({"image": "base"}, {"sandbox": {"images": ["ghcr.io/team/*"]}}, "`image`: 'base' is not allowed"),
        ({"network": "egress"}, {}, "`network` is 'egress', which this tenant does not have"),
        ({"cpus": 4}, {}, "`cpus` may be at most 2.0 in sessions of class 'default'"),
        ({"memory_bytes": 1024 * MIB}, {}, f"`memory_bytes` may be at most {512 * MIB}"),
        ({"workspace_bytes": 32 * MIB}, {"sandbox": {"workspace_bytes": 16 * MIB}}, f"at most {16 * MIB}"),
        ({"pids": 1000}, {}, "`pids` may be at most 256"),
        ({"user": "root"}, {}, "`user`: sessions of class 'default' may not run as root"),
        ({"secrets": ["TOKEN"]}, {}, "`secrets` need a session with network egress"),
        ({"fork": "gone"}, {}, "`fork`: there is no open session 'gone'"),
        ({"grader": {"command": "true", "image": "other:1"}}, {}, "`grader.image`: 'other:1' is not allowed"),
        ({"grader": {"command": "true", "cpus": 4}}, {}, "`grader.cpus` may be at most 2.0"),
    ],
)
def test_a_line_that_asks_for_more_than_its_tenant_has_is_refused(
    fields: dict[str, Any], policy: dict[str, Any], sentence: str
) -> None:
    assert sentence in check(read(**fields), TenantPolicy.model_validate(policy))


def test_secrets_must_exist_and_be_allowed_where_there_is_network() -> None:
    host = HOST.model_copy(update={"egress_classes": ("default",)})
    file = read(network="egress", secrets=["TOKEN", "OTHER"])
    assert "`secrets`: the tenant has no secret OTHER: set it first" in check(file, host=host)
    policy = TenantPolicy(sandbox=SandboxPolicy(secrets=("OTHER",)))
    assert "the tenant's policy does not allow TOKEN" in check(file, policy, host)
    assert check(file, host=host, secrets={"TOKEN", "OTHER"}) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"tool": "bash_tool", "timeout_s": 600},
        {"image": "ghcr.io/team/tool:v1", "cpus": 2, "pids": 256, "user": "sandbox", "network": "none"},
        {"fork": "open"},
        {"tools": ["all"]},
    ],
)
def test_a_line_within_the_limits_is_accepted(fields: dict[str, Any]) -> None:
    file = read(**fields)
    assert check(file, open_sessions=find_sessions(file)) == ""


def test_the_sandbox_of_a_batch_is_checked_for_lines_that_set_no_sizes() -> None:
    limits = TenantLimits(TenantPolicy(), [HOST], TOOLS)
    with pytest.raises(BadBatch, match="`cpus` may be at most"):
        check_limits(read(), "the body", limits, DEFAULT_OPTIONS.model_copy(update={"cpus": 8.0}))


def test_without_a_report_of_a_host_only_the_policy_is_checked() -> None:
    limits = TenantLimits(TenantPolicy(), (), None)
    check_limits(read(tool="bash_tool", timeout_s=5000, image="other:1", cpus=64), "the body", limits, DEFAULT_OPTIONS)


@pytest.mark.parametrize(
    "limits", [{"max_iterations": 10_001}, {"max_wall_s": 1e9}, {"max_tokens": 2**60}, {"max_cost": 1e300}]
)
def test_limits_of_a_line_have_the_bounds_of_the_api(limits: dict[str, Any]) -> None:
    with pytest.raises(BadBatch, match="must be at most"):
        read(limits=limits)


@pytest.mark.parametrize(("session", "is_open"), [("mine", True), ("gone", False)])
async def test_a_run_may_fork_an_open_session_of_its_tenant(
    session: str, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_limits(_: LimitReader, tenant: str, sessions: Collection[str] = ()) -> TenantLimits:
        assert tenant == "acme"
        return TenantLimits(TenantPolicy(), [HOST], TOOLS, {}, {"mine"} & set(sessions))

    monkeypatch.setattr(LimitReader, "read", read_limits)
    [item] = read(fork=session).items
    check_run = LimitReader.__new__(LimitReader).check_run("acme", item)
    if is_open:
        await check_run
    else:
        with pytest.raises(ToolFailure, match="no open session 'gone'"):
            await check_run
