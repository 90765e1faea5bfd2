"""Check the usage of the tenant after rounds: no amount is counted twice, and none is missing."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from tests.chaos.leftovers import is_call
from toolcrew.contract.names import call_key
from toolcrew.store.usage import AMOUNTS, session_usage_key, sum_packed, usage_prefix

TENANT = "default"
METERED = AMOUNTS[1:6]
"""Amounts of which sandboxd reports totals. The totals of a session cannot be counted twice: a later one replaces an
earlier one.
"""
ROUNDING_S = 0.001


@dataclass(frozen=True)
class StoredUsage:
    """Usage in Redis at one moment. `sessions`: by session, from the totals of sandboxd. `ended`: the calls of tools
    that have ended once: a call that is sent again has no result if its sender dies. Opening and closing sessions are no calls of a tenant.
    """

    tenant: Mapping[str, int]
    sessions: Mapping[str, Mapping[str, int]]
    ended: frozenset[str]


def read_usage(client: "redis.Redis", deployment: str) -> StoredUsage:
    """Return the usage since the start of Redis. Raises RedisError."""
    days = list(client.scan_iter(f"{usage_prefix(deployment, TENANT)}[0-9]*", count=1000))
    sessions = list(client.scan_iter(session_usage_key(deployment, TENANT, "*"), count=1000))
    calls = [key for key in client.scan_iter(call_key(deployment, TENANT, "*"), count=1000) if is_call(key)]
    # One transaction: workers count between the calls as well.
    with client.pipeline(transaction=True) as pipe:
        for key in [*days, *sessions]:
            pipe.hvals(key)
        for key in calls:
            pipe.hmget(key, "is_counted", "tool")
        replies = iter(pipe.execute())
    return StoredUsage(
        sum_packed([packed for _ in days for packed in next(replies)]),
        {_id_of(key): sum_packed(next(replies)) for key in sessions},
        frozenset(_id_of(key) for key in calls if _is_ended_tool(*next(replies))),
    )


def judge_usage(stored: StoredUsage, lines: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a sentence for each wrong amount. `lines`: the records of the drivers."""
    if stored.tenant.get("calls", 0) != len(stored.ended):
        yield f"{stored.tenant.get('calls', 0)} calls were counted, and {len(stored.ended)} have a result"
    for name in METERED:
        total = sum(amounts.get(name, 0) for amounts in stored.sessions.values())
        if stored.tenant.get(name, 0) != total:
            yield f"{name}: {stored.tenant.get(name, 0)} of the tenant, and {total} of its sessions"
    sessions, used = dict[str, str](), Counter[str]()
    for line in lines:
        if line["event"] == "sent":
            sessions[line["call"]] = line["session"]
        elif line["event"] == "result":
            used[sessions[line["call"]]] += line["cpu_s"]
            if line["success"] and line["call"] not in stored.ended:
                yield f"{line['call']} succeeded, and its result is not counted"
    for session, cpu_s in used.items():
        counted_s = stored.sessions.get(session, {}).get("cpu_us", 0) / 1e6
        if counted_s < cpu_s - ROUNDING_S:
            yield f"session {session}: {counted_s} CPU seconds are counted, and its results have {cpu_s}"


def _is_ended_tool(is_counted: bytes | None, tool: bytes | None) -> bool:
    """Names of session operations contain a dot. Those of tools do not."""
    return is_counted is not None and b"." not in (tool or b"")


def _id_of(key: bytes) -> str:
    """Return the id in `<prefix>:call.<id>` or `<prefix>:session.<id>:usage`."""
    return key.decode().rpartition(".")[2].partition(":")[0]
