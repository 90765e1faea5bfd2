"""`toolcrew calls show`: what the ledger knows of a call, for people and for programs."""

import json
import os
import subprocess

from contract.names import call_key
from tests.conftest import RedisProcess
from tests.stack import TOOLCREW


def show(redis: RedisProcess, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "TOOLCREW_REDIS_URL": redis.url}
    return subprocess.run([TOOLCREW, "calls", "show", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False)


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
    told = json.loads(show(redis_server, "c1", "--tenant", "acme", "--json").stdout)
    assert (told["state"], told["attempt"], told["holder"], told["error_code"]) == ("unknown", 2, "host.a.b/w", "OUTCOME_UNKNOWN")
    assert (told["started_at"], told["ended_at"]) == ("2023-11-14T22:13:20.500Z", None)
    assert "host.a.b/w" in show(redis_server, "c1", "--tenant", "acme").stdout


def test_a_call_of_another_tenant_is_not_known(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        client.hset(call_key("default", "acme", "c1"), mapping={"state": "done"})
    done = show(redis_server, "c1")
    assert (done.returncode, "look at the id and --tenant" in done.stderr) == (1, True)
