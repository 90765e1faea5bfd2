"""Every command acts with the role of the key in TOOLCREW_API_KEY."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from click.testing import Result
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from tests.support.redis.approval_harness import build_question
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import call_key
from toolcrew.contract.specs import Catalog
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.command import app, import_all
from toolcrew.store.api_keys import ApiKeys, Role
from toolcrew.store.approvals import ApprovalQueue
from toolcrew.store.audit import Audit, AuditEntry
from toolcrew.store.sessions import SessionStore
from toolcrew.store.tenants import RedisTenants

# Commands for operators and administrators: a tenant's key is refused.
REFUSED = {
    "changes list": ["changes", "list"],
    "doctor": ["doctor", "--only", "deployment"],
    "hosts list": ["hosts", "list"],
    "tenants pause": ["tenants", "pause", "rival"],
    "config reseal": ["config", "reseal"],
    "tenants resume": ["tenants", "resume", "rival"],
    "tenants add": ["tenants", "add", "fresh"],
    "keys create": ["keys", "create", "rival"],
    "keys list": ["keys", "list"],
    "keys revoke": ["keys", "revoke", "KEY"],
    "models remove": ["models", "remove", "fast"],
    "models set": ["models", "set", "fast", "--url", "http://127.0.0.1:1/v1", "--model", "m"],
    "tenants list": ["tenants", "list"],
    "tenants remove": ["tenants", "remove", "rival"],
    "tenants set": ["tenants", "set", "rival", "--weight", "2"],
    "tools disable": ["tools", "disable", "echo_tool"],
    "tools enable": ["tools", "enable", "echo_tool"],
    "hosts drain": ["hosts", "drain", "rival-host"],
}
# Commands that start a process of the deployment: any key is refused.
PROCESSES = {
    "serve batches": ["serve", "batches"],
    "serve api": ["serve", "api", "--port", "0"],
    "serve e2b": ["serve", "e2b", "--session", "rival-session", "--tenant", "rival"],
    "up": ["up"],
    "serve worker": ["serve", "worker"],
}
# Commands that read and write files here, and those that use the API and not Redis.
LOCAL = {
    "sessions forward": ["sessions", "forward", "rival-session", "8000"],
    "sessions processes": ["sessions", "processes", "rival-session"],
    "sessions shell": ["sessions", "shell", "rival-session"],
    "config show": ["config", "show"],
    "config users": ["config", "users", "--out", "users.acl", "--passwords", "passwords.env"],
    "traces export": ["traces", "export", "rival-run", "--to", "atif"],
    "traces show": ["traces", "show", "rival-run"],
}
# Commands for one tenant, here with names of things that are the other tenant's.
OWN = {
    "approvals decide": ["approvals", "decide", "QUESTION", "allow"],
    "approvals list": ["approvals", "list"],
    "batches cancel": ["batches", "cancel", "rival-batch"],
    "batches delete": ["batches", "delete", "rival-batch"],
    "batches list": ["batches", "list"],
    "batches export": ["batches", "export", "rival-batch"],
    "batches resume": ["batches", "resume", "rival-batch", "--output", "rows.jsonl"],
    "batches rollouts": ["batches", "rollouts", "rival-batch", "--output", "rollouts.jsonl"],
    "batches show": ["batches", "show", "rival-batch"],
    "batches submit": ["batches", "submit", "in.jsonl", "--detach", "--id", "acme-batch"],
    "call": ["call", "--session", "rival-session", "echo_tool", "text=x"],
    "calls list": ["calls", "list"],
    "calls show": ["calls", "show", "rival-call"],
    "calls kill": ["calls", "kill", "rival-call"],
    "keys show": ["keys", "show"],
    "models list": ["models", "list"],
    "run": ["run", "act", "--model", "scripted"],
    "runs cancel": ["runs", "cancel", "rival-run"],
    "runs fork": ["runs", "fork", "rival-run", "--step", "1"],
    "runs list": ["runs", "list"],
    "runs show": ["runs", "show", "rival-run"],
    "secrets list": ["secrets", "list"],
    "secrets revoke": ["secrets", "revoke", "RIVAL"],
    "secrets set": ["secrets", "set", "TOKEN"],
    "serve mcp": ["serve", "mcp"],
    "sessions copy": ["sessions", "copy", "rival-session:/workspace/x", "copied"],
    "sessions exec": ["sessions", "exec", "rival-session", "true"],
    "sessions fork": ["sessions", "fork", "rival-session"],
    "sessions list": ["sessions", "list"],
    "sessions open": ["sessions", "open"],
    "sessions close": ["sessions", "close", "rival-session"],
    "sessions ttl": ["sessions", "ttl", "rival-session", "600"],
    "skills install": ["skills", "install", "nothing"],
    "skills list": ["skills", "list"],
    "skills remove": ["skills", "remove", "rival-skill"],
    "tenants usage": ["tenants", "usage"],
    "tools list": ["tools", "list"],
    "tools show": ["tools", "show", "echo_tool"],
}
# Commands that would open a session: they are only tried for the other tenant.
NEEDS_HOST = {"run", "sessions open", "serve mcp"}
# Commands that change what is the tenant's own.
CHANGES_OWN = {"batches submit", "calls kill"}


def list_commands(command: TyperCommand | TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            assert isinstance(below, TyperCommand | TyperGroup)
            yield from list_commands(below, (*path, name))
    else:
        yield " ".join(path), command


ALL = dict(list_commands(import_all()))


@dataclass
class Pool:
    """A Redis with two tenants; `keys` are of acme, by role; `question` is of rival."""

    server: RedisProcess
    keys: dict[Role, str] = field(default_factory=dict)
    key_id: str = ""
    question: str = ""

    def invoke(self, arguments: list[str], key: str) -> Result:
        names = {"QUESTION": self.question, "KEY": self.key_id}
        environment = {"TOOLCREW_REDIS_URL": self.server.url, "TOOLCREW_API_KEY": key, "TOOLCREW_QUEUE_WAIT_S": "1"}
        return CliRunner().invoke(app, [names.get(one, one) for one in arguments], env=environment)

    def content(self) -> dict[bytes, Any]:
        """Return everything in Redis. The dump of a hash is not stable, because its fields have no order."""
        with self.server.client() as client:
            keys: Any = client.keys()
            return {key: client.hgetall(key) if client.type(key) == b"hash" else client.dump(key) for key in keys}

    def audit(self) -> list[AuditEntry]:
        async def read() -> list[AuditEntry]:
            async with redis.asyncio.Redis.from_url(self.server.url) as client:
                return [*(await Audit(client, "default").read()).entries]

        return asyncio.run(read())


@pytest.fixture
def pool(redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"id": "a", "instruction": "act"}\n')
    opened = Pool(redis_server)

    async def prepare() -> None:
        keys = BrokerSettings.model_validate({"redis_url": redis_server.url}).signing_keys()
        async with redis.asyncio.Redis.from_url(redis_server.url) as client:
            tenants, api_keys, queue = (
                RedisTenants(client, "default", keys),
                ApiKeys(client, "default", keys),
                ApprovalQueue(client, "default", keys),
            )
            for tenant in ("acme", "rival"):
                await tenants.add(tenant, TenantPolicy())
            for role in ("tenant", "operator", "admin"):
                opened.keys[role] = (await api_keys.add("acme", role, name=f"an {role}")).text
            opened.key_id = (await api_keys.add("rival")).id
            question = build_question("rm -rf rival", tenant="rival")
            await queue.ask(question, "x", 600)
            opened.question = question.id
            redis_server.publish_catalog(Catalog(tools=(build_spec("echo_tool"),)))
            await client.hset(
                call_key("default", "rival", "rival-call"), mapping={"state": "done", "tool": "echo_tool"}
            )
            await SessionStore(client, "default").open(
                "rival", "rival-session", "host.rival-host.b", start="{}", ttl_s=600, limit=9
            )

    asyncio.run(prepare())
    submitted = opened.invoke(
        ["batches", "submit", "in.jsonl", "--detach", "--id", "rival-batch", "--tenant", "rival"], ""
    )
    assert submitted.exit_code == 0, submitted.output
    return opened


def test_every_command_has_a_role_test() -> None:
    lists = [set(one) for one in (REFUSED, PROCESSES, LOCAL, OWN)]
    assert sorted(name for one in lists for name in one) == sorted(ALL)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_operator_commands_refuse_a_tenant_key(name: str, pool: Pool) -> None:
    before = pool.content()
    result = pool.invoke(REFUSED[name], pool.keys["tenant"])
    assert (result.exit_code, "role operator or admin" in result.output or "role admin" in result.output) == (
        3,
        True,
    ), result.output
    assert "rival" not in result.output
    assert pool.content() == before


@pytest.mark.parametrize(
    "name", ["keys create", "keys list", "keys revoke", "tenants add", "tenants remove", "tenants set"]
)
def test_admin_commands_refuse_an_operator_key(name: str, pool: Pool) -> None:
    before = pool.content()
    assert pool.invoke(REFUSED[name], pool.keys["operator"]).exit_code == 3
    assert pool.content() == before


@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_a_deployment_process_does_not_start_with_an_api_key(name: str, pool: Pool) -> None:
    result = pool.invoke(PROCESSES[name], pool.keys["tenant"])
    assert (result.exit_code, "TOOLCREW_API_KEY is set" in result.output, "unset" in result.output) == (
        1,
        True,
        True,
    ), result.output


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_a_local_file_command_does_not_connect_to_redis(name: str, pool: Pool) -> None:
    with pool.server.client() as client:
        before: Any = client.info("stats")
        pool.invoke(LOCAL[name], pool.keys["tenant"])
        after: Any = client.info("stats")
    assert after["total_connections_received"] == before["total_connections_received"]


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_tenant_key_cannot_reach_another_tenant(name: str, pool: Pool) -> None:
    before = pool.content()
    command, arguments = ALL[name], OWN[name]
    count = len(name.split())
    if any("--tenant" in parameter.opts for parameter in command.params) and name != "skills install":
        named = pool.invoke([*arguments[:count], "--tenant", "rival", *arguments[count:]], pool.keys["tenant"])
        assert (named.exit_code, "belongs to tenant acme, not to rival" in named.output) in ((3, True), (125, True)), (
            named.output
        )
    if name not in NEEDS_HOST:
        result = pool.invoke(arguments, pool.keys["tenant"])
        if any("rival" in word or word == "QUESTION" for word in arguments):
            assert result.exit_code != 0, result.output
        else:
            assert "rival" not in result.output
            assert pool.question not in result.output
    after = pool.content()
    if name in CHANGES_OWN:
        before, after = ({key: value for key, value in one.items() if b"rival" in key} for one in (before, after))
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        (["tenants", "set", "rival", "--weight", "2"], "tenant.set"),
        (["keys", "create", "rival"], "key.add"),
        (["tenants", "pause", "rival"], "tenant.pause"),
    ],
)
def test_the_audit_names_the_key_of_the_command(arguments: list[str], action: str, pool: Pool) -> None:
    result = pool.invoke(arguments, pool.keys["admin"])
    assert result.exit_code == 0, result.output
    entry = pool.audit()[0]
    assert (entry.action, entry.actor.name, entry.actor.role) == (action, "an admin", "admin")
    assert entry.actor.tenant == "acme"
    assert entry.actor.key in pool.keys["admin"]


def test_every_connecting_command_refuses_a_revoked_key(pool: Pool) -> None:
    assert pool.invoke(["tenants", "remove", "acme"], "").exit_code == 0
    for name, arguments in {**REFUSED, **OWN}.items():
        if name == "skills install":
            continue
        result = pool.invoke(arguments, pool.keys["admin"])
        assert (result.exit_code in (1, 125), "the API key is invalid or was revoked" in result.output) == (
            True,
            True,
        ), (
            name,
            result.output,
        )
