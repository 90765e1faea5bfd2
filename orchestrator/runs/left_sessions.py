"""The sessions of runs that end without being worked: those that their logs tell of are closed, wherever their sandboxes are."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable
from orchestrator.places import Places
from orchestrator.runs.keys import run_log_key

AT_ONCE = 100
PAGE = 16
"""Entries of a log that are read at a time: those of its session come first, and there are two, unless processes died while they opened it."""


async def close_left_sessions(client: "redis.asyncio.Redis", deployment: str, tenant: str, runs: Iterable[str]) -> int:
    """Close the sessions of runs that nobody goes on with; how many their logs tell of. Their hosts remove the sandboxes. Raises BrokerUnavailable."""
    names, places = list(runs), Places(client, deployment)
    count = 0
    for at in range(0, len(names), AT_ONCE):
        for session in await _find_sessions(client, deployment, tenant, names[at : at + AT_ONCE]):
            await places.close(tenant, session)
            count += 1
    return count


async def _find_sessions(client: "redis.asyncio.Redis", deployment: str, tenant: str, runs: Sequence[str]) -> list[str]:
    """All that were opened, or were about to be."""
    keys = [run_log_key(deployment, tenant, run) for run in runs]
    found: list[str] = []
    first = 0
    while keys:
        pages = await _read(client, keys, first)
        sessions = [[_session_of(item) for item in page] for page in pages]
        found += [session for page in sessions for session in page if session is not None]
        # A page of nothing but sessions may be followed by more of them.
        keys = [key for key, page in zip(keys, sessions, strict=True) if len(page) == PAGE and None not in page]
        first += PAGE
    return list(dict.fromkeys(found))


async def _read(client: "redis.asyncio.Redis", keys: Sequence[str], first: int) -> list[list[bytes]]:
    try:
        async with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.lrange(key, first, first + PAGE - 1)
            return list(await pipe.execute())
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"Redis does not say which sessions runs had ({error}): see that it is up") from error


def _session_of(item: bytes) -> str | None:
    """The session that an entry of a log is about; another release may have written it."""
    told: Any = json.loads(item)
    is_of_session = isinstance(told, dict) and str(told.get("type")) in ("session_opening", "session_opened")
    session = told.get("session") if is_of_session else None
    return session if isinstance(session, str) else None
