"""Output of commands: tables without None, audit entries in plain language, and lost calls without a
duration.
"""

import asyncio
from pathlib import Path

import pytest
import redis.asyncio
from typer.testing import CliRunner

from contract.calls import Clocks, ToolResult
from contract.errors import ErrorCode
from contract.names import catalog_key
from contract.settings import BrokerSettings
from contract.specs import Catalog, seal_catalog
from contract.tenancy import TenantPolicy
from orchestrator.command import app
from orchestrator.terminal.output import format_times
from store.tenants import RedisTenants
from tests.builders import build_call, build_spec
from tests.conftest import RedisProcess


@pytest.mark.parametrize("code", [ErrorCode.HOST_LOST, ErrorCode.OUTCOME_UNKNOWN])
def test_a_lost_call_says_when_that_was_noticed(code: ErrorCode) -> None:
    lost = ToolResult.failed(build_call(), code, "lost").model_copy(
        update={"clocks": Clocks(queued_s=0.5, transfer_s=11.5)}
    )
    assert format_times(lost) == "lost, noticed after 12.0 s"
    assert format_times(lost.model_copy(update={"error_code": ErrorCode.TIMEOUT})).endswith("transfer 11500.0 ms")


def test_the_audit_shows_what_was_changed_in_plain_words(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)

    async def change() -> None:
        keys = BrokerSettings.model_validate({"redis_url": redis_server.url}).signing_keys()
        async with redis.asyncio.Redis.from_url(redis_server.url) as client:
            tenants = RedisTenants(client, "default", keys)
            await tenants.add("acme", TenantPolicy(tools=("bash_tool", "read_tool")))
            await tenants.pause("acme", "unpaid")
            await tenants.pause("acme", 'two words\n "quoted"')

    asyncio.run(change())
    lines = CliRunner().invoke(app, ["changes", "list"]).stdout.splitlines()
    assert len(lines) == 4
    assert r'pause_reason="two words\n \"quoted\""' in lines[1]
    assert "is_paused=true  pause_reason=unpaid  reason=unpaid" in lines[2]
    assert 'tools=["bash_tool","read_tool"]' in lines[3]


def test_operators_list_the_batches_of_all_tenants(
    redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    with redis_server.client() as client:
        client.set(
            catalog_key("default", "sandbox"),
            seal_catalog(redis_server.keys, "sandbox", Catalog(tools=(build_spec("other"),))),
        )
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "instruction": "act"}\n')

    def run(*arguments: str, key: str = "") -> list[str]:
        done = CliRunner().invoke(app, [*arguments], env={"TOOLCREW_API_KEY": key})
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    for tenant in ("acme", "bolt"):
        run("tenants", "add", tenant)
        run("batches", "submit", str(file), "--detach", "--tenant", tenant, "--id", f"of-{tenant}")
    key, operators = (
        run("keys", "create", "acme")[0],
        run("keys", "create", "acme", "--role", "operator")[0],
    )

    def listed(*arguments: str, key: str = "") -> set[tuple[str, ...]]:
        return {tuple(line.split()[:2]) for line in run("batches", "list", *arguments, key=key)[1:]}

    assert listed() == listed(key=operators) == {("acme", "of-acme"), ("bolt", "of-bolt")}
    assert listed("--tenant", "bolt") == {("bolt", "of-bolt")}
    assert listed(key=key) == {("acme", "of-acme")}
