"""`toolcrew approvals` and `toolcrew changes list`: questions are shown exactly and decided once."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.redis.approval_harness import build_question
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.command import app
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.approvals import ApprovalQueue
from toolcrew.store.tenants import RedisTenants

Toolcrew = Callable[..., Result]


@pytest.fixture
def toolcrew(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Toolcrew:
    """Run the command on a Redis without any worker."""
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [*arguments])


def run_with_queue(
    server: RedisProcess, work: Callable[["redis.asyncio.Redis", ApprovalQueue], Coroutine[Any, Any, Any]]
) -> Any:
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

    run_with_queue(server, work)
    return questions


def test_a_listed_question_escapes_control_characters(toolcrew: Toolcrew, redis_server: RedisProcess) -> None:
    hostile = "ls \u202e\u200b\x1b[2J\nWARNING: none, allow it\n\x9b1mrun it? [y/N]"
    (question,) = ask(redis_server, hostile)
    output = toolcrew("approvals", "list")
    assert output.exit_code == 0, output.output
    lines = output.stdout.rstrip("\n").split("\n")
    assert lines[0].startswith(f"{question.id}  until ")
    assert "\\u202e\\u200b" in output.stdout
    assert not set("\u202e\u200b\x1b\x9b") & set(output.stdout)
    assert lines[-1] == "WARNING: it removes files"
    # Every line of the command is marked as one.
    assert [line for line in lines if "allow it" in line and not line.startswith("  ")] == []
    assert output.stderr == "1 wait\n"


@pytest.mark.parametrize(("digest", "code"), [("{0:.16}", 0), ("0" * 16, 1), ("{0:.3}", 1), ("", 2)])
def test_a_wrong_digest_is_refused(toolcrew: Toolcrew, redis_server: RedisProcess, digest: str, code: int) -> None:
    (question,) = ask(redis_server, "a")
    assert (
        toolcrew("approvals", "decide", question.id, "allow", "--digest", digest.format(question.digest)).exit_code
        == code
    )


@pytest.mark.parametrize("arguments", ["{}", "@/nowhere/at/all.json", "@list.json", "@junk.json"])
def test_unreadable_arguments_are_refused(
    toolcrew: Toolcrew, redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]")
    Path("junk.json").write_text("{")
    (question,) = ask(redis_server, "a")
    result = toolcrew("approvals", "decide", question.id, "allow", "--arguments", arguments, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == "INVALID_ARGUMENTS"
    assert run_with_queue(redis_server, lambda _, queue: queue.answers([question.id])) == {}


def make_key(server: RedisProcess, role: Any, tenant: str = "acme") -> str:
    async def work(client: "redis.asyncio.Redis", _: ApprovalQueue) -> str:
        tenants = RedisTenants(client, "default", server.keys)
        if tenant not in await tenants.all():
            await tenants.add(tenant, TenantPolicy())
        return (await ApiKeys(client, "default", server.keys).add(tenant, role, name=f"{role} of {tenant}")).text

    return str(run_with_queue(server, work))


def test_a_tenant_key_reaches_only_own_questions_and_no_audit(
    toolcrew: Toolcrew, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_question,), (other_question,) = ask(redis_server, "a"), ask(redis_server, "b", tenant="other")
    monkeypatch.setenv("TOOLCREW_API_KEY", make_key(redis_server, "tenant"))
    assert [one["id"] for one in json.loads(toolcrew("approvals", "list", "--json").stdout)["approvals"]] == [
        own_question.id
    ]
    assert (
        "does not exist: list the open questions" in toolcrew("approvals", "decide", other_question.id, "allow").stderr
    )
    assert toolcrew("approvals", "list", "--tenant", "other").exit_code == 3
    assert toolcrew("changes", "list").exit_code == 3
    monkeypatch.setenv("TOOLCREW_APPROVERS", "operator")
    assert toolcrew("approvals", "decide", own_question.id, "allow").exit_code == 3
    monkeypatch.delenv("TOOLCREW_APPROVERS")
    assert toolcrew("approvals", "decide", own_question.id, "allow").exit_code == 0
    answers = run_with_queue(redis_server, lambda _, queue: queue.answers([own_question.id]))
    assert answers[own_question.id].by.name == "tenant of acme"


def test_changes_list_prints_one_line_per_entry_and_filters(toolcrew: Toolcrew, redis_server: RedisProcess) -> None:
    assert toolcrew("changes", "list").stdout == "no change matches\n"
    assert toolcrew("tenants", "add", "acme", "--weight", "2").exit_code == 0
    assert toolcrew("keys", "create", "acme", "--name", "a\nb\x1b[2J").exit_code == 0
    head, newest, oldest = toolcrew("changes", "list").stdout.splitlines()
    assert head.split() == ["at", "actor", "role", "action", "tenant", "target", "details"]
    assert "key.add" in newest
    assert "\x1b" not in newest
    assert "weight=2.0" in oldest
    assert len(json.loads(toolcrew("changes", "list", "--json", "-n", "1").stdout)["changes"]) == 1
    assert [
        row["action"]
        for row in json.loads(toolcrew("changes", "list", "--json", "--action", "tenant.add,tool.disable").stdout)[
            "changes"
        ]
    ] == ["tenant.add"]
    assert json.loads(toolcrew("changes", "list", "--json", "--tenant", "other").stdout)["changes"] == []
    unknown_action = toolcrew("changes", "list", "--action", "moon.land")
    assert unknown_action.exit_code == 1
    assert "tool.disable" in unknown_action.stderr
