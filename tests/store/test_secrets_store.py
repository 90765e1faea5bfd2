"""Stored secrets: encrypted, bound to their tenant and name, and never part of a listing, an audit entry or an error."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import redis.asyncio
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_context
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import audit_key, secrets_key
from toolcrew.contract.secrets import MAX_VALUE_CHARS, build_placeholder
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.command import app
from toolcrew.store import secrets as stored
from toolcrew.store.secrets import SecretStore, WorkerSecrets
from toolcrew.store.tenants import RedisTenants
from toolcrew.workers.executor import Executor
from toolcrew.workers.tools.builtin import build_registry

VALUE = "ghp-canary-value-1234"


@dataclass
class Harness:
    client: "redis.asyncio.Redis"
    secrets: SecretStore
    worker: WorkerSecrets

    async def texts(self) -> bytes:
        """Return everything in Redis."""
        dumps = [await self.client.dump(key) async for key in self.client.scan_iter()]
        hashes = [await self.client.hgetall(secrets_key("d", owner)) for owner in (None, "acme", "rival")]
        return b"".join(dumps) + repr(hashes).encode()


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=2) as client:
        sync = redis.Redis.from_url(redis_server.url, socket_timeout=2)
        worker = WorkerSecrets(sync, "d", KEY)
        yield Harness(client, SecretStore(client, "d", KEY), worker)
        sync.close()


async def test_secret_is_read_back_and_its_value_is_in_no_listing(harness: Harness) -> None:
    first = await harness.secrets.set("acme", "TOKEN", VALUE, hosts=("api.example", "git.example:8443"), place="basic")
    assert (first.revision, first.hosts, first.place) == (1, ("api.example", "git.example:8443"), "basic")
    second = await harness.secrets.set("acme", "TOKEN", VALUE + "2", hosts=("api.example",))
    assert (second.revision, second.created_at, second.place) == (2, first.created_at, "header:Authorization")
    found = await harness.secrets.get("acme", "TOKEN")
    assert (found.value, found.info, VALUE in repr(found)) == (VALUE + "2", second, False)
    assert await harness.secrets.all("acme") == {"TOKEN": second}
    entries = await harness.client.xrange(audit_key("d"))
    assert [json.loads(fields[b"entry"])["action"] for _, fields in entries] == ["secret.set", "secret.set"]
    assert VALUE.encode() not in await harness.texts()


async def test_moved_or_forged_secret_record_is_refused(harness: Harness) -> None:
    await harness.secrets.set("acme", "TOKEN", VALUE, hosts=("api.example",))
    sealed = await harness.client.hget(secrets_key("d", "acme"), "TOKEN")  # type: ignore[misc]
    forged = sealed.replace(b"api.example", b"bad.example")
    for owner, name, record in (("rival", "TOKEN", sealed), ("acme", "OTHER", sealed), ("acme", "TOKEN", forged)):
        await harness.client.hset(secrets_key("d", owner), name, record)  # type: ignore[misc]
        with pytest.raises(ConfigError, match="cannot be verified"):
            await harness.secrets.get(owner, name)
        assert isinstance((await harness.secrets.all(owner))[name], ConfigError)
    assert harness.worker.all("acme") == harness.worker.all("rival") == {}
    assert "TOKEN" in harness.worker.all("acme").unreadable
    with pytest.raises(ConfigError):
        await SecretStore(harness.client, "d", SigningKeys.of("x", deployment="d")).get("acme", "TOKEN")
    await harness.secrets.set("acme", "TOKEN", VALUE)
    assert isinstance((await harness.secrets.all("acme"))["TOKEN"], stored.SecretInfo), "a new value repairs the record"


async def test_worker_sees_every_secret_change_immediately(harness: Harness) -> None:
    assert harness.worker.all("acme") == {}
    await harness.secrets.set("acme", "TOKEN", VALUE)
    assert harness.worker.all("acme")["TOKEN"].value == VALUE
    await harness.secrets.set("acme", "TOKEN", VALUE + "2")
    assert harness.worker.all("acme")["TOKEN"].value == VALUE + "2"
    assert await harness.secrets.revoke("acme", "TOKEN")
    assert not await harness.secrets.revoke("acme", "TOKEN")
    assert harness.worker.all("acme") == {}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"value": "7-chars"}, ErrorCode.INVALID_ARGUMENTS),
        ({"value": "two\nlines-of-it"}, ErrorCode.INVALID_ARGUMENTS),
        ({"value": "x" * 4097}, ErrorCode.INVALID_ARGUMENTS),
        ({"name": "lower"}, ErrorCode.INVALID_ARGUMENTS),
        ({"hosts": ("*.example",)}, ErrorCode.INVALID_ARGUMENTS),
        ({"hosts": ("127.0.0.1",)}, ErrorCode.INVALID_ARGUMENTS),
        ({"place": "body"}, ErrorCode.INVALID_ARGUMENTS),
        ({"place": "header:Host"}, ErrorCode.INVALID_ARGUMENTS),
        ({"place": "header:Content-Length"}, ErrorCode.INVALID_ARGUMENTS),
        ({"tenant": "unknown"}, ErrorCode.UNKNOWN_TENANT),
        ({"name": "SECOND"}, ErrorCode.QUOTA_EXCEEDED),
    ],
    ids=repr,
)
async def test_invalid_secret_is_refused_without_its_value(
    fields: dict[str, object], code: ErrorCode, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_SECRETS", 1)
    await RedisTenants(harness.client, "d", KEY).add("acme", TenantPolicy())
    for _ in range(2):
        # A stored secret can be replaced, even at the maximum.
        await harness.secrets.set("acme", "FIRST", VALUE)
    fields_to_store = {"tenant": "acme", "name": "FIRST", "value": VALUE, "hosts": (), "place": "basic", **fields}
    with pytest.raises(ToolFailure) as refused:
        await harness.secrets.set(**fields_to_store)  # type: ignore[arg-type]
    assert refused.value.code is code
    assert str(fields_to_store["value"]) not in refused.value.message


async def test_removing_a_tenant_removes_its_secrets(harness: Harness) -> None:
    tenants = RedisTenants(harness.client, "d", KEY)
    await tenants.add("acme", TenantPolicy())
    await harness.secrets.set("acme", "TOKEN", VALUE)
    await harness.secrets.set(None, "TOKEN", VALUE)
    await tenants.remove("acme")
    assert not await harness.client.exists(secrets_key("d", "acme"))
    assert list(await harness.secrets.all(None)) == ["TOKEN"]


def test_placeholder_is_unique_per_session_and_secret() -> None:
    owners = [("acme", "s1", "A"), ("acme", "s2", "A"), ("rival", "s1", "A"), ("acme", "s1", "B")]
    assert len({build_placeholder(*owner) for owner in owners}) == len(owners)


def invoke(server: RedisProcess, *arguments: str, stdin: str = "") -> Result:
    environment = {"TOOLCREW_REDIS_URL": server.url, "TOOLCREW_API_KEY": ""}
    return CliRunner().invoke(app, ["secrets", *arguments], env=environment, input=stdin)


def test_secrets_command_reads_stdin_or_a_file_and_prints_no_value(redis_server: RedisProcess, tmp_path: Path) -> None:
    (tmp_path / "value").write_text(f"{VALUE}-file\n")
    outputs = [
        invoke(redis_server, "set", "TOKEN", "--host", "api.example", "--json", stdin=f"{VALUE}\n"),
        invoke(redis_server, "set", "KEY", "--deployment", "--from", str(tmp_path / "value")),
        invoke(redis_server, "list", "--json"),
        invoke(redis_server, "list", "--deployment"),
        invoke(redis_server, "revoke", "TOKEN"),
        invoke(redis_server, "list", "--json"),
    ]
    assert [done.exit_code for done in outputs] == [0] * len(outputs), [done.output for done in outputs]
    assert VALUE not in "".join(done.output for done in outputs)
    rows = json.loads(outputs[2].stdout)["secrets"]
    assert [(row["name"], row["hosts"], row["state"]) for row in rows] == [("TOKEN", ["api.example"], "valid")]
    assert "KEY" in outputs[3].stdout
    assert json.loads(outputs[5].stdout) == {"secrets": [], "next_cursor": None}
    assert invoke(redis_server, "revoke", "TOKEN").exit_code != 0


def build_secret_executor(harness: Harness) -> Executor:
    """Return the executor of a worker that reads the secrets of the harness."""
    return build_executor(
        build_registry(),
        FakeSandboxClient(),
        MemoryLedger(),
        MemoryBlobs(),
        {"host": "h", "queue": "q"},
        find_secrets=harness.worker.all,
    )


@pytest.mark.parametrize(("name", "code"), [("TOKEN", "CONFIG_MISSING"), ("OTHER", "INVALID_ARGUMENTS")])
async def test_open_tells_a_forged_secret_record_from_a_missing_secret(harness: Harness, name: str, code: str) -> None:
    await harness.secrets.set("acme", "TOKEN", VALUE, hosts=("api.example",))
    key = secrets_key("d", "acme")
    sealed = await harness.client.hget(key, "TOKEN")  # type: ignore[misc]
    await harness.client.hset(key, "TOKEN", sealed.replace(b"api.example", b"bad.example"))  # type: ignore[misc]
    executor = build_secret_executor(harness)
    call = build_call("session.open", ttl_s=60, secrets=[name])
    result = executor.execute(call, build_context())
    assert (result.error_code, name in str(result.error)) == (code, True)


async def test_secrets_of_a_session_that_are_too_long_together_are_refused(harness: Harness) -> None:
    names = [f"S{number}" for number in range(9)]
    for name in names:
        await harness.secrets.set("acme", name, "a" * MAX_VALUE_CHARS)
    executor = build_secret_executor(harness)
    for count in (8, 9):
        call = build_call("session.open", call_id=f"c{count}", ttl_s=60, secrets=names[:count])
        result = executor.execute(call, build_context())
        assert (result.error_code == "INVALID_ARGUMENTS") == (count == 9), result.error
    assert "32768" in str(result.error)
