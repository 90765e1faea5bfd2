"""`toolcrew approvals` and `toolcrew changes list`: waiting questions are shown exactly and decided once, by
authorized users only. The list names the author of each change.
"""

import asyncio
import io
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from contract.run_events import ApprovalAsked
from contract.settings import BrokerSettings
from contract.tenancy import TenantPolicy
from orchestrator.command import app
from orchestrator.terminal.output import RunPrinter
from store.api_keys import ApiKeys
from store.approvals import ApprovalQueue
from store.tenants import RedisTenants
from tests.approval_harness import build_question
from tests.conftest import RedisProcess

Toolcrew = Callable[..., Result]


@pytest.fixture
def toolcrew(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Toolcrew:
    """Run the command on a Redis without any worker."""
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [*arguments])


def on(server: RedisProcess, work: Callable[["redis.asyncio.Redis", ApprovalQueue], Coroutine[Any, Any, Any]]) -> Any:
    """Run the coroutine as another process would."""

    async def run() -> Any:
        keys = BrokerSettings.model_validate({"redis_url": server.url}).signing_keys()
        async with redis.asyncio.Redis.from_url(server.url) as client:
            return await work(client, ApprovalQueue(client, "default", keys))

    return asyncio.run(run())


def ask(server: RedisProcess, *commands: str, **fields: Any) -> list[Any]:
    questions = [build_question(command, number=number, **fields) for number, command in enumerate(commands)]

    async def work(_: Any, queue: ApprovalQueue) -> None:
        for question in questions:
            await queue.ask(question, "x", 600)

    on(server, work)
    return questions


def answer_of(server: RedisProcess, id_: str) -> Any:
    return on(server, lambda _, queue: queue.answers([id_]))[id_]


def test_what_waits_is_shown_with_its_exact_arguments_and_the_warning_last(
    toolcrew: Toolcrew, redis_server: RedisProcess
) -> None:
    hostile = "ls \u202e\u200b\x1b[2J\nWARNING: none, allow it\n\x9b1mrun it? [y/N]"
    (question,) = ask(redis_server, hostile)
    shown = toolcrew("approvals", "list")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.rstrip("\n").split("\n")
    assert lines[0].startswith(f"{question.id}  until ")
    assert "\\u202e\\u200b" in shown.stdout
    assert not set("\u202e\u200b\x1b\x9b") & set(shown.stdout)
    assert lines[-1] == "WARNING: it removes files"
    # Every line of the command is marked as one.
    assert [line for line in lines if "allow it" in line and not line.startswith("  ")] == []
    assert shown.stderr == "1 wait\n"


def test_a_call_is_allowed_refused_and_changed(toolcrew: Toolcrew, redis_server: RedisProcess, tmp_path: Path) -> None:
    first, second, third = ask(redis_server, "a", "b", "c")
    other = tmp_path / "arguments.json"
    other.write_text('{"command": "ls"}')
    assert toolcrew("approvals", "decide", first.id, "allow").stdout == "bash_tool is allowed\n"
    assert toolcrew("approvals", "decide", second.id, "deny", "--reason", "no").stdout == "bash_tool is denied\n"
    reply = json.loads(toolcrew("approvals", "decide", third.id, "allow", "--arguments", f"@{other}", "--json").stdout)
    assert reply == {
        "id": third.id,
        "state": "allowed",
        "tool": "bash_tool",
        "digest": third.digest,
        "arguments_changed": True,
    }
    assert [answer_of(redis_server, one.id).is_allowed for one in (first, second, third)] == [True, False, True]
    assert answer_of(redis_server, second.id).reason == "no"
    assert answer_of(redis_server, third.id).arguments == {"command": "ls"}
    assert toolcrew("approvals", "list").stderr == "nothing waits for a decision\n"
    again = toolcrew("approvals", "decide", first.id, "deny")
    assert again.exit_code == 1
    assert "allowed by" in again.stderr
    rows = json.loads(toolcrew("changes", "list", "--json").stdout)
    assert [row["action"] for row in rows] == ["approval.allow", "approval.deny", "approval.allow"]
    assert {row["tenant"] for row in rows} == {"acme"}


@pytest.mark.parametrize(("digest", "code"), [("{0:.16}", 0), ("0" * 16, 1), ("{0:.3}", 1), ("", 1)])
def test_a_digest_that_is_not_the_calls_decides_nothing(
    toolcrew: Toolcrew, redis_server: RedisProcess, digest: str, code: int
) -> None:
    (question,) = ask(redis_server, "a")
    assert (
        toolcrew("approvals", "decide", question.id, "allow", "--digest", digest.format(question.digest)).exit_code
        == code
    )


@pytest.mark.parametrize("given", ["{}", "@/nowhere/at/all.json", "@list.json", "@junk.json"])
def test_arguments_that_cannot_be_read_decide_nothing(
    toolcrew: Toolcrew, redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]")
    Path("junk.json").write_text("{")
    (question,) = ask(redis_server, "a")
    result = toolcrew("approvals", "decide", question.id, "allow", "--arguments", given, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == "INVALID_ARGUMENTS"
    assert on(redis_server, lambda _, queue: queue.answers([question.id])) == {}


def test_without_a_pool_there_is_nothing_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    for arguments in (("approvals", "list"), ("changes", "list")):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert "TOOLCREW_REDIS_URL" in result.stderr


def test_a_run_of_a_stack_of_its_own_waits_for_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    monkeypatch.setenv("TOOLCREW_APPROVALS", "queue")
    result = CliRunner().invoke(app, ["run", "act", "--model", "scripted"])
    assert result.exit_code == 1
    assert "set TOOLCREW_REDIS_URL" in result.stderr


@pytest.mark.parametrize("asks_elsewhere", [True, False])
def test_a_run_says_where_its_questions_are_asked(asks_elsewhere: bool) -> None:
    out = io.StringIO()
    view = RunPrinter(Console(file=out, width=200, force_terminal=False), asks_elsewhere=asks_elsewhere)
    view.on_event(ApprovalAsked(run="r", call=build_question().call, digest="d", reason="", warning="", expires_at=0.0))
    assert ("toolcrew approvals list" in out.getvalue()) == asks_elsewhere


def make_key(server: RedisProcess, role: Any, tenant: str = "acme") -> str:
    async def work(client: "redis.asyncio.Redis", _: ApprovalQueue) -> str:
        tenants = RedisTenants(client, "default", server.keys)
        if tenant not in await tenants.all():
            await tenants.add(tenant, TenantPolicy())
        return (await ApiKeys(client, "default", server.keys).add(tenant, role, name=f"{role} of {tenant}")).text

    return str(on(server, work))


def test_a_tenants_key_opens_its_own_questions_and_no_audit(
    toolcrew: Toolcrew, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine,), (others,) = ask(redis_server, "a"), ask(redis_server, "b", tenant="other")
    monkeypatch.setenv("TOOLCREW_API_KEY", make_key(redis_server, "tenant"))
    assert [one["id"] for one in json.loads(toolcrew("approvals", "list", "--json").stdout)] == [mine.id]
    assert "does not exist: list the open questions" in toolcrew("approvals", "decide", others.id, "allow").stderr
    assert toolcrew("approvals", "list", "--tenant", "other").exit_code == 3
    assert toolcrew("changes", "list").exit_code == 3
    monkeypatch.setenv("TOOLCREW_APPROVERS", "operator")
    assert toolcrew("approvals", "decide", mine.id, "allow").exit_code == 3
    monkeypatch.delenv("TOOLCREW_APPROVERS")
    assert toolcrew("approvals", "decide", mine.id, "allow").exit_code == 0
    assert answer_of(redis_server, mine.id).by.name == "tenant of acme"


def test_the_audit_is_shown_a_line_an_entry_by_tenant_and_action(
    toolcrew: Toolcrew, redis_server: RedisProcess
) -> None:
    assert toolcrew("changes", "list").stdout == "no change matches\n"
    assert toolcrew("tenants", "add", "acme", "--weight", "2").exit_code == 0
    assert toolcrew("keys", "create", "acme", "--name", "a\nb\x1b[2J").exit_code == 0
    head, newest, oldest = toolcrew("changes", "list").stdout.splitlines()
    assert head.split() == ["at", "actor", "role", "action", "tenant", "target", "details"]
    assert "key.add" in newest
    assert "\x1b" not in newest
    assert "weight=2.0" in oldest
    assert len(json.loads(toolcrew("changes", "list", "--json", "-n", "1").stdout)) == 1
    assert [
        row["action"]
        for row in json.loads(toolcrew("changes", "list", "--json", "--action", "tenant.add,tool.disable").stdout)
    ] == ["tenant.add"]
    assert json.loads(toolcrew("changes", "list", "--json", "--tenant", "other").stdout) == []
    wrong = toolcrew("changes", "list", "--action", "moon.land")
    assert wrong.exit_code == 1
    assert "tool.disable" in wrong.stderr
