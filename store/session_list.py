"""Which sessions are open: those of a tenant, or of all, the newest first."""

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.clock import format_instant
from contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable, ToolFailure
from contract.names import host_of, open_sessions_key, place_key, session_facts_key, tenant_open_sessions_key
from contract.places import SessionPlace, open_start, parse_place
from contract.signing import SigningKeys

MAX_PAGE = 1000
MAX_LOOKED_AT = 5000
"""For one page: of very many that have expired some are passed over each time."""
AT_ONCE = 200
TIES = 8
_CURSOR = re.compile(r"([0-9]{1,16})\.([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{1,64})")


@dataclass(frozen=True)
class OpenSession:
    """One session. `host` and `queue` are empty while it moves; `image` None: the one of the tenant's class; `network` None: what its class says.

    `checkpoint`: the last one, taken at `checkpoint_at`; None for none. Instants in Unix seconds.
    """

    id: str
    tenant: str
    state: str
    host: str
    queue: str
    fence: int
    image: str | None
    network: str | None
    opened_at: float
    ttl_s: float
    checkpoint: str | None
    checkpoint_at: float | None

    def to_json(self) -> dict[str, Any]:
        """For programs: instants in ISO 8601."""
        at = self.checkpoint_at
        return asdict(self) | {
            "opened_at": format_instant(self.opened_at) if self.opened_at else None,
            "checkpoint_at": format_instant(at) if at else None,
        }


@dataclass(frozen=True)
class SessionPage:
    """Sessions, the newest first. `cursor`: where older ones begin, None when there are none; a page may be short, or empty, and not be the last."""

    sessions: tuple[OpenSession, ...]
    cursor: str | None


class SessionList:
    """The open sessions of a deployment. Not listed: those that an earlier release opened, and those whose start is not signed with `keys`."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys

    async def read(self, tenant: str | None, cursor: str | None = None, limit: int = 50) -> SessionPage:
        """Those of a tenant, or of all (None). `cursor`: as the page before gave it.

        Raises ToolFailure(INVALID_ARGUMENTS) for a cursor or limit that is none, BrokerUnavailable.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the limit is 1 to {MAX_PAGE}, not {limit}")
        place_of, found, looked_at = _parse_cursor(cursor), list[OpenSession](), 0
        while looked_at < MAX_LOOKED_AT:
            rows = await self._rows(tenant, place_of)
            places = await self._places(rows)
            await self._drop([row for row, place in zip(rows, places, strict=True) if place == "gone"])
            for row, place in zip(rows, places, strict=True):
                if len(found) == limit:
                    return SessionPage(tuple(found), _cursor(place_of))
                place_of, looked_at = row, looked_at + 1
                if isinstance(place, OpenSession):
                    found.append(place)
            if len(rows) < AT_ONCE:
                return SessionPage(tuple(found), None)
        return SessionPage(tuple(found), _cursor(place_of))

    async def counts(self, tenants: Sequence[str]) -> dict[str, int]:
        """How many sessions of each are listed, those among them that have just expired. Raises BrokerUnavailable."""
        pipe = self._client.pipeline(transaction=False)
        for tenant in tenants:
            pipe.zcard(tenant_open_sessions_key(self._deployment, tenant))
        return dict(zip(tenants, await _told(pipe.execute()), strict=True)) if tenants else {}

    async def _rows(self, tenant: str | None, after: "_Row | None") -> list["_Row"]:
        """Up to AT_ONCE of the list, behind `after`."""
        key = open_sessions_key(self._deployment) if tenant is None else tenant_open_sessions_key(self._deployment, tenant)
        # Those of the very same microsecond stand in the order of their names.
        asked = self._client.zrevrangebyscore(key, after.at if after else "+inf", "-inf", start=0, num=AT_ONCE + TIES, withscores=True)
        told: Any = await _told(asked)
        rows = [_row(member.decode(errors="replace"), int(score), tenant) for member, score in told]
        return [row for row in rows if after is None or (row.at, row.member(tenant)) < (after.at, after.member(tenant))][:AT_ONCE]

    async def _places(self, rows: Sequence["_Row"]) -> list["OpenSession | Literal['gone', 'unreadable']"]:
        pipe = self._client.pipeline(transaction=False)
        for row in rows:
            pipe.hgetall(place_key(self._deployment, row.tenant, row.session))
        read: list[Mapping[bytes, bytes]] = await _told(pipe.execute())
        return [self._parse(row, fields) for row, fields in zip(rows, read, strict=True)]

    def _parse(self, row: "_Row", fields: Mapping[bytes, bytes]) -> "OpenSession | Literal['gone', 'unreadable']":
        """Return "unreadable" for a record of a later release or without a valid signature: its image and network cannot be shown truly."""
        try:
            place = parse_place(fields)
            return _listed(row, place, open_start(self._keys, row.tenant, row.session, place)) if place is not None else "gone"
        except (ValidationError, SandboxUnavailable):
            return "unreadable"

    async def _drop(self, rows: Sequence["_Row"]) -> None:
        """Sessions that have expired: none of that name comes again."""
        if not rows:
            return
        pipe = self._client.pipeline(transaction=False)
        for row in rows:
            pipe.zrem(open_sessions_key(self._deployment), f"{row.tenant}|{row.session}")
            pipe.zrem(tenant_open_sessions_key(self._deployment, row.tenant), row.session)
            pipe.delete(session_facts_key(self._deployment, row.tenant, row.session))
        await _told(pipe.execute())


@dataclass(frozen=True)
class _Row:
    """One entry of the list. `at`: microseconds."""

    at: int
    tenant: str
    session: str

    def member(self, listed_of: str | None) -> str:
        """As the sorted set of one tenant, or of all, has it."""
        return self.session if listed_of is not None else f"{self.tenant}|{self.session}"


def _row(member: str, at: int, tenant: str | None) -> _Row:
    if tenant is not None:
        return _Row(at, tenant, member)
    owner, _, session = member.partition("|")
    return _Row(at, owner, session)


def _parse_cursor(text: str | None) -> _Row | None:
    if text is None:
        return None
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, "that is no cursor of a list of sessions: give one as a page gave it, or leave it out"
        )
    return _Row(int(found[1]), found[2], found[3])


def _cursor(row: _Row | None) -> str | None:
    return f"{row.at}.{row.tenant}.{row.session}" if row is not None else None


def _listed(row: _Row, place: SessionPlace, start: Mapping[str, Any]) -> OpenSession:
    return OpenSession(
        id=row.session,
        tenant=row.tenant,
        state=place.state.value,
        host=host_of(place.queue) if place.queue else "",
        queue=place.queue,
        fence=place.fence,
        image=start.get("image"),
        network=start.get("network"),
        opened_at=place.opened_at,
        ttl_s=place.ttl_s,
        checkpoint=place.checkpoint or None,
        checkpoint_at=place.checkpoint_at or None,
    )


async def _told(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"Redis does not say which sessions are open ({error}): see that it is up") from error
