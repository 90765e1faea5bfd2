"""Closes the sessions that the logs of runs name, when no process continues these runs."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, EnvelopeRefused
from contract.signing import SigningKeys
from store.run_keys import run_key, run_log_key
from store.run_log import entry_purpose
from store.sessions import SessionStore
from telemetry.logs import get_logger

log = get_logger(__name__)

AT_ONCE = 100
PAGE = 16
"""Entries of a log that are read at a time: those of its session come first, and there are two, unless processes died while they opened it."""


async def close_left_sessions(client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, tenant: str, runs: Iterable[str]) -> int:
    """Close the sessions of these runs; return how many their logs name. Their hosts remove the sandboxes. Raises BrokerUnavailable."""
    names, places = list(runs), SessionStore(client, deployment)
    count = 0
    for at in range(0, len(names), AT_ONCE):
        for session in await _find_sessions(client, deployment, keys, tenant, names[at : at + AT_ONCE]):
            await places.close(tenant, session)
            count += 1
    return count


async def _find_sessions(client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, tenant: str, runs: Sequence[str]) -> list[str]:
    """Return all sessions that were opened, or were about to be opened."""
    found: list[str] = []
    first = 0
    while runs:
        pages = await _read(client, deployment, tenant, runs, first)
        sessions = [
            [_session_of(keys, tenant, run, attempt, first + at, item) for at, item in enumerate(items)]
            for run, (attempt, items) in zip(runs, pages, strict=True)
        ]
        found += [session for page in sessions for session in page if session is not None]
        # A page of nothing but sessions may be followed by more of them.
        runs = [run for run, page in zip(runs, sessions, strict=True) if len(page) == PAGE and None not in page]
        first += PAGE
    return list(dict.fromkeys(found))


async def _read(
    client: "redis.asyncio.Redis", deployment: str, tenant: str, runs: Sequence[str], first: int
) -> list[tuple[int, list[bytes]]]:
    """Return a page of each run's log, with the run's attempt."""
    try:
        async with client.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.hget(run_key(deployment, tenant, run), "attempt")
                pipe.lrange(run_log_key(deployment, tenant, run), first, first + PAGE - 1)
            answers: list[Any] = list(await pipe.execute())
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"Redis does not say which sessions runs had ({error}): see that it is up") from error
    return [(int(attempt or 1), items) for attempt, items in zip(answers[::2], answers[1::2], strict=True)]


def _session_of(keys: SigningKeys, tenant: str, run: str, attempt: int, index: int, item: bytes) -> str | None:
    """Return the session that an entry of a log is about. An entry that this process cannot verify closes no session."""
    try:
        entry: Any = json.loads(keys.unseal(entry_purpose(tenant, run, attempt, index), item))
    except EnvelopeRefused as error:
        if not item.startswith(b'{"part"'):
            log.error("run_log_entry_refused", tenant=tenant, run=run, error=str(error))
        return None
    is_of_session = isinstance(entry, dict) and str(entry.get("type")) in ("session_opening", "session_opened")
    session = entry.get("session") if is_of_session else None
    return session if isinstance(session, str) else None
