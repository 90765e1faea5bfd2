"""Who changed what: one entry of a stream in Redis for every change that an administrator or an approver makes, written in the step that makes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import redis.asyncio
from pydantic import Field, ValidationError
from redis.exceptions import RedisError

from contract.calls import Identifier, Record
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import audit_key
from orchestrator.actors import Actor

AuditAction = Literal[
    "tool.disable",
    "tool.enable",
    "approval.allow",
    "approval.deny",
    "tenant.add",
    "tenant.set",
    "tenant.remove",
    "tenant.pause",
    "tenant.resume",
    "key.add",
    "key.remove",
    "call.kill",
    "host.drain",
    "batch.cancel",
    "batch.retry",
    "run.cancel",
    "session.close",
    "skill.install",
    "skill.remove",
]
ACTIONS: tuple[AuditAction, ...] = get_args(AuditAction)
MAX_ENTRIES = 100_000
"""So many are kept at least; older ones go."""
MAX_TARGET_CHARS = 256
MAX_DETAILS = 16
MAX_DETAIL_CHARS = 1024
MAX_PAGE = 1000
MAX_LOOKED_AT = 10_000
"""Of one page: an answer is quick also when next to nothing fits the filters."""
_AT_ONCE = 500

AUDIT_LUA = f"""
-- To be called after the last look at what is changed and before the first change: when it fails, nothing was changed.
local function audit(key, entry)
  if entry ~= '' then redis.call('XADD', key, 'MAXLEN', '~', {MAX_ENTRIES}, '*', 'entry', entry) end
end
"""
"""For scripts that change something: `audit(key of the audit, entry as text)`. An entry '' is none."""

_ADD = f"{AUDIT_LUA}\naudit(KEYS[1], ARGV[1])\n"


class AuditEntry(Record):
    """One change. `tenant`: whom it is about, None when that is everybody. `target`: the tool, tenant, key, approval, call, host, batch, run, session or skill.

    `details` never hold a secret, nor what a call says."""

    actor: Actor
    action: AuditAction
    tenant: Identifier | None = None
    target: str = Field(default="", max_length=MAX_TARGET_CHARS)
    details: dict[str, str] = Field(default_factory=dict, max_length=MAX_DETAILS)


@dataclass(frozen=True)
class Audited:
    """An entry as it is kept. `at`: Unix seconds of Redis's clock."""

    id: str
    at: float
    entry: AuditEntry

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "at": self.at, **self.entry.model_dump(mode="json")}


@dataclass(frozen=True)
class AuditPage:
    """Entries, newest first. `cursor`: where older ones begin, None when there are none; a page may be short, or empty, and not be the last."""

    entries: tuple[Audited, ...]
    cursor: str | None


def build_entry(
    actor: Actor, action: AuditAction, target: str, *, tenant: str | None = None, details: Mapping[str, str | None] | None = None
) -> AuditEntry:
    """An entry; details that are None or "" are left out, longer ones than fit are shortened visibly.

    Raises ToolFailure(INVALID_ARGUMENTS) for a target or tenant that can be none: build it before the change.
    """
    told = {name: _fitting(value) for name, value in (details or {}).items() if value}
    try:
        return AuditEntry(actor=actor, action=action, tenant=tenant, target=target, details=told)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"nothing was changed: {where} cannot be written down: {first['msg']}") from error


def entry_text(entry: AuditEntry) -> str:
    """What AUDIT_LUA takes."""
    return entry.model_dump_json(exclude_defaults=True)


def note_entry(pipe: "redis.asyncio.client.Pipeline", deployment: str, entry: AuditEntry) -> None:
    """Put the entry beside a change that is made in MULTI."""
    pipe.xadd(audit_key(deployment), {"entry": entry_text(entry)}, maxlen=MAX_ENTRIES, approximate=True)


class Audit:
    """The audit of a deployment."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self.key = audit_key(deployment)
        self._add = client.register_script(_ADD)

    async def add(self, entry: AuditEntry) -> None:
        """For changes that are not made in Redis: before them, so that none is without its entry. Others write theirs by AUDIT_LUA or `note_entry`.

        Raises BrokerUnavailable: nothing was written, and nothing is to be done.
        """
        try:
            await self._add(keys=[self.key], args=[entry_text(entry)])
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(
                f"nothing was done, because it cannot be written down who did it: Redis does not do it ({error}); see that it is up"
            ) from error

    async def read(
        self,
        after: str | None = None,
        limit: int = 50,
        *,
        tenant: str | None = None,
        actions: tuple[AuditAction, ...] = (),
        target: str | None = None,
    ) -> AuditPage:
        """Newest first; `after`: the cursor of the page before. Only those about `tenant`, of one of `actions`, of `target`, where these are given.

        Raises ToolFailure(INVALID_ARGUMENTS) for a cursor or limit that is none, BrokerUnavailable.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the limit is 1 to {MAX_PAGE}, not {limit}")
        cursor, found, looked_at = _parse_cursor(after), list[Audited](), 0
        while looked_at < MAX_LOOKED_AT:
            rows = await self._rows(cursor)
            for id_, fields in rows:
                cursor, looked_at = id_, looked_at + 1
                kept = _parse(id_, fields)
                if kept is not None and _fits(kept.entry, tenant, actions, target):
                    found.append(kept)
                    if len(found) == limit:
                        return AuditPage(tuple(found), cursor)
            if len(rows) < _AT_ONCE:
                return AuditPage(tuple(found), None)
        return AuditPage(tuple(found), cursor)

    async def _rows(self, before: str | None) -> list[tuple[str, dict[bytes, bytes]]]:
        try:
            rows: Any = await self._client.xrevrange(self.key, f"({before}" if before else "+", "-", count=_AT_ONCE)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not say who changed what ({error}): see that it is up") from error
        return [(id_.decode(), fields) for id_, fields in rows]


def _fits(entry: AuditEntry, tenant: str | None, actions: tuple[AuditAction, ...], target: str | None) -> bool:
    return tenant in (None, entry.tenant) and (not actions or entry.action in actions) and target in (None, entry.target)


def _parse(id_: str, fields: Mapping[bytes, bytes]) -> Audited | None:
    """None for what is no entry: of a later release, or somebody else's. What can be read is shown all the same."""
    try:
        entry = AuditEntry.model_validate_json(fields.get(b"entry", b""))
    except ValidationError:
        return None
    return Audited(id_, int(id_.partition("-")[0]) / 1000, entry)


def _parse_cursor(text: str | None) -> str | None:
    if text is None:
        return None
    first, _, second = text.partition("-")
    # What Redis takes for a number, and no more: neither other scripts' digits, nor what is longer than 64 bits.
    if not all(part.isascii() and part.isdecimal() and int(part[:20]) < 2**64 and len(part) <= 20 for part in (first, second)):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "that is no cursor of the audit: give one as a page gave it, or leave it out")
    return text


def _fitting(text: str) -> str:
    """A detail, as JSON can carry it."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_DETAIL_CHARS else f"{text[: MAX_DETAIL_CHARS - 32]}... ({len(text)} characters)"
