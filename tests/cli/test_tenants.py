"""`toolcrew tenants`: registering, changing, listing and removing tenants and keys."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from tests.support.records.wire_records import REPORT
from toolcrew.contract.calls import SessionUsage
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import api_keys_key, call_key, catalog_names_key, tenants_key
from toolcrew.contract.specs import Catalog
from toolcrew.contract.tenancy import Budgets, CommandRule, SandboxPolicy, TenantPolicy
from toolcrew.orchestrator.cli.policy_options import OPTIONS, apply_options, policy_lines
from toolcrew.orchestrator.command import app
from toolcrew.store.clock import SharedClock
from toolcrew.store.hosts import WorkerHostStore
from toolcrew.store.usage import WorkerUsageStore

Toolcrew = Callable[..., Result]

ALL_OPTIONS = (
    *[
        "--tools",
        "read_tool,grep_*",
        "--tools",
        "bash_tool",
        "--weight",
        "2.5",
        "--in-flight",
        "7",
        "--queued",
        "8",
        "--rate",
        "1.5",
        "--burst",
        "9",
    ],
    *[
        "--sandboxes",
        "3",
        "--stored-bytes",
        "4",
        "--class",
        "gpu",
        "--image",
        "a:1,b:2",
        "--network",
        "none",
        "--workspace-bytes",
        "2000000",
    ],
    *("--command-rule", "deny:bash_tool:git push", "--command-rule", "ask::rm '-r f'", "--command-rule", "allow"),
    *("--models", "fast,team-*", "--secret", "GIT_TOKEN,PIP_TOKEN", "--trust-skill", "a" * 64 + "," + "b" * 64),
    *[
        "--tokens-per-day",
        "1",
        "--tokens-per-month",
        "2",
        "--cost-per-day",
        "3.5",
        "--cost-per-month",
        "4",
        "--cpu-s-per-day",
        "5.5",
    ],
    *["--cpu-s-per-month", "6", "--stored-bytes-per-day", "7", "--stored-bytes-per-month", "8", "--streams", "refuse"],
)
POLICY = TenantPolicy(
    tools=("read_tool", "grep_*", "bash_tool"),
    models=("fast", "team-*"),
    weight=2.5,
    in_flight=7,
    queued=8,
    trusted_skills=("a" * 64, "b" * 64),
    rate_per_s=1.5,
    burst=9,
    sandboxes=3,
    stored_bytes=4,
    commands=(
        CommandRule(action="deny", tool="bash_tool", argv_prefix=("git", "push")),
        CommandRule(action="ask", argv_prefix=("rm", "-r f")),
        CommandRule(action="allow"),
    ),
    streams="refuse",
    sandbox=SandboxPolicy(
        tenant_class="gpu",
        images=("a:1", "b:2"),
        network="none",
        workspace_bytes=2_000_000,
        secrets=("GIT_TOKEN", "PIP_TOKEN"),
    ),
    budgets=Budgets(
        tokens_per_day=1,
        tokens_per_month=2,
        cost_per_day=3.5,
        cost_per_month=4,
        cpu_s_per_day=5.5,
        cpu_s_per_month=6,
        stored_bytes_per_day=7,
        stored_bytes_per_month=8,
    ),
)


@pytest.fixture
def toolcrew(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Toolcrew:
    """Run the command on a Redis without any worker."""
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [*(() if arguments[0] == "keys" else ("tenants",)), *arguments])


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def policy_of(result: Result) -> TenantPolicy:
    return TenantPolicy.model_validate(as_json(result)["policy"])


def failure_of(result: Result) -> tuple[int, str]:
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stderr


def test_an_unknown_sandbox_class_is_refused_with_the_known_classes(
    toolcrew: Toolcrew, redis_server: RedisProcess
) -> None:
    toolcrew("add", "acme")
    unknown = toolcrew("set", "acme", "--class", "larg")
    assert (unknown.exit_code, "the tenant class larg was not checked" in unknown.stderr) == (0, True)
    with redis_server.client() as client:
        report = REPORT.model_copy(update={"classes": ("default", "large")})
        WorkerHostStore(client, "default", SharedClock()).report(report)
    code, message = failure_of(toolcrew("set", "acme", "--class", "larg"))
    assert (code, "use one of default, large, or first add the class" in message) == (1, True)
    assert failure_of(toolcrew("add", "other", "--class", "larg"))[0] == 1
    assert policy_of(toolcrew("set", "acme", "--class", "large", "--json")).sandbox.tenant_class == "large"


def test_every_policy_field_has_an_option_that_sets_it(toolcrew: Toolcrew) -> None:
    assert policy_of(toolcrew("add", "acme", *ALL_OPTIONS, "--json")) == POLICY
    [_, acme] = as_json(toolcrew("list", "--json"))["tenants"]
    assert TenantPolicy.model_validate(acme["policy"]) == POLICY
    # Pausing and removing have commands of their own.
    fields = {*TenantPolicy.model_fields, *SandboxPolicy.model_fields, *Budgets.model_fields} - {
        "sandbox",
        "budgets",
        "is_paused",
        "pause_reason",
        "is_removed",
    }
    assert {path[-1] for path in OPTIONS.values()} == fields


def test_set_changes_only_the_given_options(toolcrew: Toolcrew) -> None:
    toolcrew("add", "acme", *ALL_OPTIONS)
    changed = policy_of(toolcrew("set", "acme", "--weight", "4", "--image", "c:3", "--json"))
    sandbox = POLICY.sandbox.model_copy(update={"images": ("c:3",)})
    assert changed == POLICY.model_copy(update={"weight": 4.0, "sandbox": sandbox})


@pytest.mark.parametrize("option", OPTIONS)
def test_unset_restores_the_default_of_one_field(option: str) -> None:
    changed = apply_options(POLICY, {}, [option])
    assert (
        policy_lines(changed)[list(OPTIONS).index(option)] == policy_lines(TenantPolicy())[list(OPTIONS).index(option)]
    )
    assert sum(one != other for one, other in zip(policy_lines(changed), policy_lines(POLICY), strict=True)) == 1


def publish_names(server: RedisProcess, pool: str, *names: str) -> None:
    """Publish the names of tools for a pool whose workers have stopped. The names remain."""
    with server.client() as client:
        client.set(catalog_names_key("default", pool), json.dumps(names))


def test_an_unknown_tool_is_refused_with_the_nearest_name(toolcrew: Toolcrew, redis_server: RedisProcess) -> None:
    publish_names(redis_server, "tools", "lookup_tool")
    code, message = failure_of(toolcrew("add", "acme", "--tools", "bash_tol"))
    assert (code, "there is no tool bash_tol" in message, "bash_tool" in message) == (1, True, True)
    assert (
        policy_of(toolcrew("add", "acme", "--tools", "lookup_tool,webfetch_tool,session.exec", "--json")).tools
        is not None
    )
    assert failure_of(toolcrew("set", "acme", "--tools", "lookup_tol"))[0] == 1
    assert toolcrew("set", "acme", "--weight", "2").exit_code == 0


def test_a_policy_file_replaces_the_policy_and_options_override_it(toolcrew: Toolcrew, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text('{"weight": 2, "sandbox": {"network": "none"}}')
    assert policy_of(toolcrew("add", "acme", "--from", str(path), "--in-flight", "5", "--json")) == TenantPolicy(
        weight=2, in_flight=5, sandbox=SandboxPolicy(network="none")
    )
    path.write_text("{}")
    assert policy_of(toolcrew("set", "acme", "--from", str(path), "--json")) == TenantPolicy()


def test_an_unreadable_policy_can_be_replaced(toolcrew: Toolcrew, redis_server: RedisProcess, tmp_path: Path) -> None:
    with redis_server.client() as client:
        client.hset(tenants_key("default"), "acme", redis_server.keys.seal("policy acme", '{"speed": 9}'))
    assert "nothing: the policy of tenant acme cannot be read (speed" in toolcrew("list").stdout
    assert as_json(toolcrew("list", "--json"))["tenants"][1]["error"].startswith(
        "the policy of tenant acme cannot be read"
    )
    assert failure_of(toolcrew("set", "acme", "--weight", "2"))[0] == 1
    (tmp_path / "p.json").write_text("{}")
    assert policy_of(toolcrew("set", "acme", "--from", str(tmp_path / "p.json"), "--json")) == TenantPolicy()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("add", "acme", "--from", "/nonexistent.json"), "--from: /nonexistent.json cannot be read"),
        (("add", "default"), "default always exists"),
        (("set", "default"), "no change was given"),
        (("remove", "default"), "default cannot be removed"),
        (("set", "unknown", "--weight", "2"), "tenant unknown does not exist: see `toolcrew tenants list`"),
        (
            ("set", "default", "--unset", "speed"),
            "--unset: there is no option 'speed': name one of tools, models, weight",
        ),
        (("set", "default", "--unset", "weight", "--weight", "2"), "--weight sets the same option"),
        (("keys", "create", "default", "--expires-in", "soon"), "--expires-in: 'soon' is not a duration: write 90d"),
        (("keys", "revoke", "0" * 16), "there is no key 0000000000000000: see `toolcrew keys list`"),
    ],
)
def test_an_invalid_argument_is_named_in_the_error(
    toolcrew: Toolcrew, arguments: tuple[str, ...], expected: str
) -> None:
    code, message = failure_of(toolcrew(*arguments))
    assert code == 1
    assert expected in message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"weight": float("inf")}, "--weight: must be a finite number"),
        ({"in-flight": 0}, "--in-flight: "),
        ({"workspace-bytes": 1}, "--workspace-bytes: "),
        ({"tools": ["a*b"]}, "--tools: "),
        ({"command-rule": ["forbid:bash_tool:x"]}, "write action:tool:words, such as deny:bash_tool:git push"),
        ({"command-rule": ["deny:bash_tool:'x"]}, "--command-rule: 'deny:bash_tool:'x': No closing quotation"),
    ],
)
def test_a_value_out_of_bounds_is_reported_with_its_option(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ToolFailure) as failed:
        apply_options(TenantPolicy(), values)
    assert failed.value.code is ErrorCode.INVALID_ARGUMENTS
    assert expected in str(failed.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not valid JSON (line 1, column 1)"),
        ("[]", "must be an object"),
        ('{"weight": "3"}', "`weight` must be a number"),
        ('{"speed": 3}', "`speed` is an unknown field"),
        ('{"sandbox": {"network": "host"}}', "`sandbox.network` must be "),
        (json.dumps({"tools": ["t" * 100] * 10_000}), "larger than"),
    ],
)
def test_an_invalid_policy_file_is_named_in_the_error(
    toolcrew: Toolcrew, tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    code, message = failure_of(toolcrew("add", "acme", "--from", str(path)))
    assert code == 1
    assert f"--from: {path}" in message
    assert expected in message


def test_a_new_key_is_printed_only_to_stdout_and_never_again(toolcrew: Toolcrew, redis_server: RedisProcess) -> None:
    toolcrew("add", "acme")
    created = toolcrew("keys", "create", "acme", "--role", "operator", "--name", "ci", "--expires-in", "90d")
    key = created.stdout.strip()
    assert key.startswith("tc_")
    assert key not in created.stderr
    [row] = as_json(toolcrew("keys", "list", "--json"))["keys"]
    assert (row["id"], row["tenant"], row["role"], row["name"]) == (key.split("_")[1], "acme", "operator", "ci")
    assert (row["tail"], row["state"]) == (key[-4:], "valid")
    assert row["created_at"][-1] == row["expires_at"][-1] == "Z"
    secret = key.split("_", 2)[2]
    with redis_server.client() as client:
        stored: Any = client.hgetall(api_keys_key("default"))
    assert secret not in toolcrew("keys", "list").stdout + str(stored)


def test_an_unverifiable_key_is_listed_and_can_be_revoked(toolcrew: Toolcrew, redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        client.hset(api_keys_key("default"), "0" * 16, '{"tenant": "default", "role": "admin"}')
    assert "cannot be verified" in toolcrew("keys", "list").stdout
    assert toolcrew("keys", "revoke", "0" * 16).exit_code == 0
    assert as_json(toolcrew("keys", "list", "--json"))["keys"] == []


def test_control_characters_in_names_are_escaped(toolcrew: Toolcrew) -> None:
    toolcrew("add", "acme", "--tools", "x\x1b[2J", "--image", "y\x07", "--command-rule", "deny::z\x1b]0;")
    toolcrew("keys", "create", "acme", "--name", "n\x1b[2J")
    output = toolcrew("list").stdout + toolcrew("set", "acme", "--weight", "2").stdout + toolcrew("keys", "list").stdout
    assert not set(output) & {"\x1b", "\x07"}


def test_usage_is_printed_with_its_total_and_budgets(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    runner = CliRunner()
    with redis_server.client() as client:
        WorkerUsageStore(client, "default").count([("acme:s1", SessionUsage(meter="m", cpu_s=90.0, read_bytes=5))])
    assert runner.invoke(app, ["tenants", "add", "acme", "--cpu-s-per-day", "120"]).exit_code == 0

    report = json.loads(runner.invoke(app, ["tenants", "usage", "--tenant", "acme", "--by", "hour", "--json"]).stdout)
    (period,) = report["data"]
    assert period["start"].startswith(time.strftime("%Y-%m-%dT%H", time.gmtime()))
    assert (period["cpu_s"], period["read_bytes"], report["total"]["cpu_s"]) == (90.0, 5, 90.0)
    (budget,) = report["budgets"]
    assert (budget["name"], budget["used"], budget["limit"]) == ("cpu_s_per_day", 90.0, 120.0)

    lines = runner.invoke(app, ["tenants", "usage", "--tenant", "acme"]).stdout.splitlines()
    assert lines[0].split()[:3] == ["from", "calls", "cpu"]
    assert lines[-1].split()[:4] == ["cpu_s_per_day", "90", "120", "75%"]
    assert runner.invoke(app, ["tenants", "usage", "--tenant", "acme", "--from", "2020-01-01"]).exit_code == 1


def test_operators_list_the_batches_of_all_tenants(
    redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    redis_server.publish_catalog(Catalog(tools=(build_spec("other"),)))
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "instruction": "act"}\n')

    def run(*arguments: str, key: str = "") -> list[str]:
        result = CliRunner().invoke(app, [*arguments], env={"TOOLCREW_API_KEY": key})
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    for tenant in ("acme", "bolt"):
        run("tenants", "add", tenant)
        run("batches", "submit", str(file), "--detach", "--tenant", tenant, "--id", f"of-{tenant}")
    key, operators = (run("keys", "create", "acme")[0], run("keys", "create", "acme", "--role", "operator")[0])

    def list_batches(*arguments: str, key: str = "") -> set[tuple[str, ...]]:
        return {tuple(line.split()[:2]) for line in run("batches", "list", *arguments, key=key)[1:]}

    assert list_batches() == list_batches(key=operators) == {("acme", "of-acme"), ("bolt", "of-bolt")}
    assert list_batches("--tenant", "bolt") == {("bolt", "of-bolt")}
    assert list_batches(key=key) == {("acme", "of-acme")}


def show_call(server: RedisProcess, *arguments: str, key: str = "") -> Result:
    environment = {"TOOLCREW_REDIS_URL": server.url, "TOOLCREW_API_KEY": key}
    return CliRunner().invoke(app, ["calls", "show", *arguments], env=environment)


def test_a_call_is_shown_with_its_state_worker_and_times(redis_server: RedisProcess) -> None:
    record = {
        "state": "unknown",
        "attempt": 2,
        "tool": "bash_tool",
        "holder": "host.a.b/w",
        "started_at": 1_700_000_000.5,
        "code": "OUTCOME_UNKNOWN",
    }
    with redis_server.client() as client:
        client.hset(call_key("default", "acme", "c1"), mapping=record)
    reply = json.loads(show_call(redis_server, "c1", "--tenant", "acme", "--json").stdout)
    assert (reply["state"], reply["attempt"], reply["holder"]) == ("unknown", 2, "host.a.b/w")
    assert reply["error_code"] == "OUTCOME_UNKNOWN"
    assert (reply["started_at"], reply["ended_at"]) == ("2023-11-14T22:13:20.500Z", None)
    assert "host.a.b/w" in show_call(redis_server, "c1", "--tenant", "acme").stdout


def test_unmatched_tool_patterns_and_unverified_tool_names_are_warned_about(
    toolcrew: Toolcrew, redis_server: RedisProcess
) -> None:
    unverified = toolcrew("add", "early", "--tools", "mine_tool")
    assert (unverified.exit_code, "mine_tool was not checked" in unverified.stderr) == (0, True)
    publish_names(redis_server, "sandbox", "bash_tool")
    unmatched = toolcrew("add", "acme", "--tools", "bash_*,mcp__git__*")
    assert (unmatched.exit_code, unmatched.stderr) == (
        0,
        "toolcrew: no tool that has been published matches the pattern mcp__git__*\n",
    )


def test_adding_the_first_tenant_warns_and_a_removed_name_stays_reserved(toolcrew: Toolcrew) -> None:
    assert "from now on only registered tenants and default are served" in toolcrew("add", "acme").stderr
    assert toolcrew("add", "zeta").stderr == ""
    assert toolcrew("remove", "zeta").stderr == ""
    removed = toolcrew("remove", "acme")
    assert removed.stdout == "acme is removed and its 0 API keys are revoked; the name cannot be registered again\n"
    assert removed.stderr == ""
    assert failure_of(toolcrew("add", "acme"))[0] == 1
