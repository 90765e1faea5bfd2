"""`toolcrew calls show`: the ledger's record of a call, for people and for programs."""

import asyncio
import json

import redis.asyncio
from click.testing import Result
from typer.testing import CliRunner

from contract.names import call_key
from contract.tenancy import TenantPolicy
from orchestrator.command import app
from store.api_keys import ApiKeys
from store.tenants import RedisTenants
from tests.conftest import RedisProcess


def show(server: RedisProcess, *arguments: str, key: str = "") -> Result:
    environment = {"TOOLCREW_REDIS_URL": server.url, "TOOLCREW_API_KEY": key}
    return CliRunner().invoke(app, ["calls", "show", *arguments], env=environment)


def test_a_call_is_shown_with_its_state_who_ran_it_and_when(redis_server: RedisProcess) -> None:
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
    reply = json.loads(show(redis_server, "c1", "--tenant", "acme", "--json").stdout)
    assert (reply["state"], reply["attempt"], reply["holder"], reply["error_code"]) == (
        "unknown",
        2,
        "host.a.b/w",
        "OUTCOME_UNKNOWN",
    )
    assert (reply["started_at"], reply["ended_at"]) == ("2023-11-14T22:13:20.500Z", None)
    assert "host.a.b/w" in show(redis_server, "c1", "--tenant", "acme").stdout


def test_a_call_of_another_tenant_is_not_known_to_a_tenants_key(redis_server: RedisProcess) -> None:
    async def prepare() -> str:
        client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5)
        await RedisTenants(client, "default", redis_server.keys).add("bolt", TenantPolicy())
        await client.hset(call_key("default", "acme", "c1"), mapping={"state": "done"})
        key = (await ApiKeys(client, "default", redis_server.keys).add("bolt")).text
        await client.aclose()
        return key

    key = asyncio.run(prepare())
    done = show(redis_server, "c1", key=key)
    assert (
        done.exit_code,
        "call c1 of tenant bolt was not found: check the id and --tenant" in done.stderr,
    ) == (1, True)
    done = show(redis_server, "c1", "--tenant", "acme", key=key)
    assert (done.exit_code, "belongs to tenant bolt, not to acme" in done.stderr) == (3, True)
