"""The list of open sessions, the newest first."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.names import (
    deployment_key,
    host_of,
    location_key,
    open_sessions_key,
    session_facts_key,
    tenant_open_sessions_key,
    tenant_sessions_key,
)
from toolcrew.contract.session_locations import LOCATION_MARGIN_S, SessionLocation, open_start, show_checkpoint
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.session_views import OpenSession
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.sessions import (
    REMOVE_ENDED,
    parse_session_location,
)

MAX_PAGE = 1000
MAX_ENTRIES_READ = 5000
"""Limit of entries that are read for one page. Entries of expired sessions count too."""
AT_ONCE = 200
TIES = 8
_CURSOR = re.compile(r"([0-9]{1,16})\.([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{1,64})")
_LIST = "the open sessions were not listed"


@dataclass(frozen=True)
class SessionPage:
    """A page of sessions, the newest first. `cursor`: the start of the next page; None after the last page. A short or
    empty page is not necessarily the last one.
    """

    sessions: tuple[OpenSession, ...]
    cursor: str | None


class SessionList:
    """The open sessions of a deployment. The list omits sessions whose start is not signed with `keys`."""

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys

    async def read(self, tenant: str | None, cursor: str | None = None, limit: int = 50) -> SessionPage:
        """Return sessions of a tenant, or of all tenants (None). `cursor`: the cursor of the previous page.

        Raises ToolFailure(INVALID_ARGUMENTS): invalid cursor or limit. Raises BrokerUnavailable when Redis does not
        answer.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the limit {limit} is invalid: use 1 to {MAX_PAGE}")
        after, sessions, looked_at = _parse_cursor(cursor), list[OpenSession](), 0
        while looked_at < MAX_ENTRIES_READ:
            rows = await self._rows(tenant, after)
            locations = await self._locations(rows)
            await self._drop([row for row, location in zip(rows, locations, strict=True) if location == "expired"])
            for row, location in zip(rows, locations, strict=True):
                if len(sessions) == limit:
                    return SessionPage(tuple(sessions), _cursor(after))
                after, looked_at = row, looked_at + 1
                if isinstance(location, OpenSession):
                    sessions.append(location)
            if len(rows) < AT_ONCE:
                return SessionPage(tuple(sessions), None)
        return SessionPage(tuple(sessions), _cursor(after))

    async def counts(self, tenants: Sequence[str]) -> dict[str, int]:
        """Return how many sessions of each tenant are listed, including sessions that have just expired. Raises
        BrokerUnavailable when Redis does not answer.
        """
        pipe = self._client.pipeline(transaction=False)
        for tenant in tenants:
            pipe.zcard(tenant_open_sessions_key(self._deployment, tenant))
        with broker_errors(_LIST):
            return dict(zip(tenants, await pipe.execute(), strict=True)) if tenants else {}

    async def _rows(self, tenant: str | None, after: "_Row | None") -> list["_Row"]:
        """Return up to AT_ONCE entries of the list, starting after the entry `after`."""
        key = (
            open_sessions_key(self._deployment)
            if tenant is None
            else tenant_open_sessions_key(self._deployment, tenant)
        )
        # Redis sorts entries of the same microsecond by name. The query reads TIES additional entries, because it
        # starts again at the microsecond of the last row.
        with broker_errors(_LIST):
            entries: Any = await self._client.zrevrangebyscore(
                key, after.at if after else "+inf", "-inf", start=0, num=AT_ONCE + TIES, withscores=True
            )
        rows = [_row(member.decode(errors="replace"), int(score), tenant) for member, score in entries]
        return [
            row for row in rows if after is None or (row.at, row.member(tenant)) < (after.at, after.member(tenant))
        ][:AT_ONCE]

    async def _locations(self, rows: Sequence["_Row"]) -> list["OpenSession | Literal['expired', 'unreadable']"]:
        pipe = self._client.pipeline(transaction=False)
        for row in rows:
            pipe.hgetall(location_key(self._deployment, row.tenant, row.session))
            pipe.ttl(location_key(self._deployment, row.tenant, row.session))
        with broker_errors(_LIST):
            read: list[Any] = await pipe.execute()
        fields, lives = read[::2], read[1::2]
        late = [row for row, life in zip(rows, lives, strict=True) if 0 <= life <= LOCATION_MARGIN_S]
        ended = await self._find_ended(late)
        return [
            "expired" if row in ended else self._parse(row, location)
            for row, location in zip(rows, fields, strict=True)
        ]

    async def _find_ended(self, rows: Sequence["_Row"]) -> set["_Row"]:
        """Return the rows of sessions that no host serves any more. Their time to live is over."""
        if not rows:
            return set()
        pipe = self._client.pipeline(transaction=False)
        for row in rows:
            REMOVE_ENDED.add_to(
                pipe,
                location=location_key(self._deployment, row.tenant, row.session),
                sessions=tenant_sessions_key(self._deployment, row.tenant),
                prefix=deployment_key(self._deployment, ""),
                session=row.session,
            )
        with broker_errors(_LIST):
            return {row for row, has_ended in zip(rows, await pipe.execute(), strict=True) if has_ended}

    def _parse(self, row: "_Row", fields: Mapping[bytes, bytes]) -> "OpenSession | Literal['expired', 'unreadable']":
        """Return the session in a row. Return "unreadable" for a record of a later release or without a valid
        signature: its image and network cannot be shown correctly.
        """
        try:
            location = parse_session_location(fields)
            return (
                _listed(row, location, open_start(self._keys, row.tenant, row.session, location))
                if location is not None
                else "expired"
            )
        except (ValidationError, SandboxUnavailable):
            return "unreadable"

    async def _drop(self, rows: Sequence["_Row"]) -> None:
        """Remove expired sessions from the lists. This is safe, because no session of that name is opened again."""
        if not rows:
            return
        pipe = self._client.pipeline(transaction=False)
        for row in rows:
            pipe.zrem(open_sessions_key(self._deployment), f"{row.tenant}|{row.session}")
            pipe.zrem(tenant_open_sessions_key(self._deployment, row.tenant), row.session)
            pipe.delete(session_facts_key(self._deployment, row.tenant, row.session))
        with broker_errors(_LIST):
            await pipe.execute()


@dataclass(frozen=True)
class _Row:
    """An entry of the list. `at`: the time of the opening in microseconds."""

    at: int
    tenant: str
    session: str

    def member(self, listed_of: str | None) -> str:
        """Return the entry's member in the sorted set of one tenant, or of all tenants (`listed_of` None)."""
        return self.session if listed_of is not None else f"{self.tenant}|{self.session}"


def _row(member: str, at: int, tenant: str | None) -> _Row:
    if tenant is not None:
        return _Row(at, tenant, member)
    owner, _, session = member.partition("|")
    return _Row(at, owner, session)


def _parse_cursor(text: str | None) -> _Row | None:
    if text is None:
        return None
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "the cursor does not belong to the list of sessions: use the cursor of the previous page, or omit it",
        )
    return _Row(int(match[1]), match[2], match[3])


def _cursor(row: _Row | None) -> str | None:
    return f"{row.at}.{row.tenant}.{row.session}" if row is not None else None


def _listed(row: _Row, location: SessionLocation, spec: SessionSpec) -> OpenSession:
    return OpenSession(
        id=row.session,
        tenant=row.tenant,
        state=location.state.value,
        host=host_of(location.queue) if location.queue else "",
        queue=location.queue,
        fence=location.fence,
        image=spec.image,
        network=spec.network,
        opened_at=location.opened_at or None,
        ttl_s=location.ttl_s,
        checkpoint=show_checkpoint(location.checkpoint),
        checkpoint_at=location.checkpoint_at or None,
    )
