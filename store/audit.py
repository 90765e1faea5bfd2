"""The audit log: one entry in Redis for every change by an administrator or an approver.

Invariant: no change without its entry. The same atomic step writes the change and the entry.

The changes of operators and administrators are in one stream. The changes by holders of a tenant's keys are in a
stream of that tenant. A tenant can therefore displace only its own entries.
"""

import copy
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

import redis.asyncio
from pydantic import Field, TypeAdapter, ValidationError

from toolcrew.contract.calls import Identifier, Record
from toolcrew.contract.clock import Instant
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.names import audit_key, tenant_audit_key, tenants_key
from toolcrew.contract.tenancy import DEFAULT_TENANT, VERSION_FIELD
from toolcrew.store.connection import SyncRedis, broker_errors
from toolcrew.store.scripts import Script

Role = Literal["tenant", "operator", "admin"]
"""The role of an actor. tenant: may call tools for its own tenant. operator: may call tools for any tenant. admin: may
also change the policies of tenants.
"""
_ROLES: tuple[Role, ...] = get_args(Role)
LOCAL = "local"
SANDBOX = "sandbox"
MAX_NAME_CHARS = 128
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
    "batch.delete",
    "batch.retry",
    "run.cancel",
    "session.close",
    "session.fork",
    "session.use",
    "stream.open",
    "stream.end",
    "file.delete",
    "skill.install",
    "skill.remove",
    "model.set",
    "model.remove",
    "secret.set",
    "secret.use",
    "secret.remove",
    "budget.warn",
    "budget.exceed",
]
ACTIONS: tuple[AuditAction, ...] = get_args(AuditAction)
MAX_ENTRIES = 100_000
"""Number of newest entries that the operators' stream keeps at least. Older entries may be removed."""
MAX_TENANT_ENTRIES = 5_000
"""Number of newest entries that a tenant's stream keeps at least. Older entries may be removed."""
MAX_TARGET_CHARS = 256
MAX_DETAILS = 16
MAX_DETAIL_CHARS = 1024
MAX_PAGE = 1000
MAX_ENTRIES_READ = 10_000
"""Limit of entries that are read for one page. The limit keeps a page fast even if few entries match the filters."""
_AT_ONCE = 500
_WHAT = "the audit was not read"
_CURSOR = re.compile(r"([0-9]{1,20})-([0-9]{1,20})(?:-([A-Za-z0-9_-]{1,64}))?")
_LEAST_AT_ONCE = 20

AUDIT_LUA = f"""
-- Scripts call this function after their last check and before their first write, so that an error changes nothing.
local function audit(key, entry)
  if entry == '' then return end
  local actor, max_entries = cjson.decode(entry).actor, {MAX_ENTRIES}
  -- `key` ends with 'audit'; this is tenant_audit_key.
  if actor.role == 'tenant' then
    key, max_entries = string.sub(key, 1, -6) .. 't:' .. actor.tenant .. ':audit', {MAX_TENANT_ENTRIES}
  end
  redis.call('XADD', key, 'MAXLEN', '~', max_entries, '*', 'entry', entry)
end
"""
"""Lua function for scripts that change something. `audit(audit_key, entry as text)` writes the entry to the stream of
the actor who made the change. With the entry '', it writes nothing.
"""

_ADD = Script(
    f"{AUDIT_LUA}\naudit(audit_log, entry)\n",
    keys=("audit_log",),
    args=("entry",),
)


class Actor(Record):
    """The author of a change. `key`: the id of an API key, "local" for a system user with the pool's own secrets, or
    "sandbox" for a program of a session.
    `name`: the name of the key or of the system user. `tenant`: the tenant of the key; null for a system user.
    """

    key: str = Field(max_length=64)
    role: Role
    name: str = Field(default="", max_length=MAX_NAME_CHARS)
    tenant: Identifier | None = None

    def may_act_for(self, tenant: str | None) -> bool:
        """Return whether the actor may act for the tenant; None stands for all tenants."""
        return self.role != "tenant" or (tenant is not None and tenant == self.tenant)

    def has_role(self, needed: Role) -> bool:
        """Return whether the role has all rights of `needed`."""
        return _ROLES.index(self.role) >= _ROLES.index(needed)

    def label(self) -> str:
        """Return a short name for display."""
        return self.name or self.key


class NewAuditEntry(Record):
    """A change and its author. `tenant`: the affected tenant, None for all tenants. `target`: the tool, tenant, key,
    approval, call, host, batch, run, session, skill, model endpoint or secret.

    `details`: other facts about the change. They never contain a secret or the content of a call.
    """

    actor: Actor
    action: AuditAction
    tenant: Identifier | None = None
    target: str = Field(default="", max_length=MAX_TARGET_CHARS)
    details: dict[str, str] = Field(default_factory=dict, max_length=MAX_DETAILS)


class AuditEntry(NewAuditEntry):
    """A stored change. `id`: unique in the deployment. `at`: the time of Redis's clock, in ISO 8601. `tenant`: the
    tenant that the change is about; null: all tenants. `target`: the tool, tenant, key, approval, call, host, batch or
    run. `details`: other facts about the change, such as its reason.
    """

    id: str
    at: Instant


@dataclass(frozen=True)
class AuditPage:
    """A page of entries, the newest first. `cursor`: the start of the older entries; None if there are none. A short
    or empty page is not necessarily the last one.
    """

    entries: tuple[AuditEntry, ...]
    cursor: str | None


def local_actor() -> Actor:
    """Return the system user that runs this program."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"uid {os.getuid()}"
    return Actor(key=LOCAL, role="admin", name=name[:MAX_NAME_CHARS])


def build_entry(
    actor: Actor,
    action: AuditAction,
    target: str,
    *,
    tenant: str | None = None,
    details: Mapping[str, str | None] | None = None,
) -> NewAuditEntry:
    """Return an entry. Empty details (None or "") are omitted; long details are shortened visibly.

    Raises ToolFailure(INVALID_ARGUMENTS): the target or the tenant is invalid. Build the entry before the change, so
    that an error prevents the change.
    """
    fitting = {name: _fit_text(value) for name, value in (details or {}).items() if value}
    try:
        return NewAuditEntry(actor=actor, action=action, tenant=tenant, target=target, details=fitting)
    except ValidationError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"nothing was changed, because {describe_invalid(error)}: correct it"
        ) from error


def entry_text(entry: NewAuditEntry) -> str:
    """Return the text of an entry for AUDIT_LUA."""
    return entry.model_dump_json(exclude_defaults=True)


class AuditedStore:
    """Base of the stores whose changes are in the audit log. The actor of each change is the argument of `acting_as`,
    or the system user if `acting_as` was not called.
    """

    _actor: Actor | None = None

    def acting_as(self, actor: Actor) -> Self:
        """Return a copy of the store whose changes are attributed to `actor`."""
        mine = copy.copy(self)
        mine._actor = actor
        return mine

    def _entry(
        self,
        action: AuditAction,
        target: str,
        *,
        tenant: str | None = None,
        details: Mapping[str, str | None] | None = None,
    ) -> str:
        """Return the text of an entry for AUDIT_LUA. Raises like `build_entry`."""
        return entry_text(build_entry(self._actor or local_actor(), action, target, tenant=tenant, details=details))


def add_entry(pipe: "redis.asyncio.client.Pipeline", deployment: str, entry: NewAuditEntry) -> None:
    """Add an operator's entry to a change in a MULTI transaction."""
    pipe.xadd(audit_key(deployment), {"entry": entry_text(entry)}, maxlen=MAX_ENTRIES, approximate=True)


class Audit:
    """The audit log of a deployment."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def add(self, entry: NewAuditEntry) -> None:
        """Write an entry before a change outside of Redis. For changes in Redis, use AUDIT_LUA or `add_entry`.

        Raises BrokerUnavailable: the entry was not written, so the caller must not make the change.
        """
        with broker_errors("nothing was done, because the audit entry was not written"):
            await _ADD.run(self._client, audit_log=audit_key(self._deployment), entry=entry_text(entry))

    async def count(self) -> int:
        """Return the number of stored entries in the operators' stream. Raises BrokerUnavailable when Redis does not
        answer.
        """
        with broker_errors("the audit log was not read"):
            return int(await self._client.xlen(audit_key(self._deployment)))

    async def read(
        self,
        after: str | None = None,
        limit: int = 50,
        *,
        tenant: str | None = None,
        actions: tuple[AuditAction, ...] = (),
        target: str | None = None,
    ) -> AuditPage:
        """Return entries, the newest first. `after`: the cursor of the previous page. `tenant`, `actions` and `target`
        are optional filters.

        Raises ToolFailure(INVALID_ARGUMENTS): invalid cursor or limit. Raises BrokerUnavailable when Redis does not
        answer.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the limit {limit} is invalid: use 1 to {MAX_PAGE}")
        cursor, entries, count_read = _parse_cursor(after) if after is not None else None, list[AuditEntry](), 0
        owners = await self._owners(tenant)
        while count_read < MAX_ENTRIES_READ:
            rows, is_last = await self._rows(cursor, owners)
            count_read += len(rows)
            for position, fields in rows:
                cursor = position
                stored = _parse(position, fields)
                if stored is not None and _fits(stored, tenant, actions, target):
                    entries.append(stored)
                    if len(entries) == limit:
                        return AuditPage(tuple(entries), str(cursor))
            if is_last:
                return AuditPage(tuple(entries), None)
        return AuditPage(tuple(entries), str(cursor))

    async def _owners(self, tenant: str | None) -> list[str]:
        """Return the owners of the streams that may have entries about that tenant, or about any tenant (None). The
        owner "" stands for the operators.
        """
        if tenant is not None:
            return ["", tenant]
        with broker_errors(_WHAT):
            # Only registered tenants and the default tenant have keys.
            fields: Any = await self._client.hkeys(tenants_key(self._deployment))
        return ["", *sorted({DEFAULT_TENANT, *(field.decode(errors="replace") for field in fields)} - {VERSION_FIELD})]

    async def _rows(self, after: "_Position | None", owners: Sequence[str]) -> tuple[list["_Row"], bool]:
        """Return the next entries of these streams, merged and with the newest first. Also return whether they are the
        last ones.
        """
        count = max(_AT_ONCE // len(owners), min(_AT_ONCE, _LEAST_AT_ONCE))
        pipe = self._client.pipeline(transaction=False)
        for owner in owners:
            key = tenant_audit_key(self._deployment, owner) if owner else audit_key(self._deployment)
            pipe.xrevrange(key, after.before_in(owner) if after is not None else "+", "-", count=count)
        with broker_errors(_WHAT):
            streams: Any = await pipe.execute()
        of_streams = [
            [(_Position.of(id_.decode(), owner), fields) for id_, fields in rows]
            for owner, rows in zip(owners, streams, strict=True)
        ]
        # A stream that returned as many rows as were requested has more rows. Rows of other streams that are older than
        # its last row wait for the next read, because its remaining rows may be newer.
        oldest = [rows[-1][0] for rows in of_streams if len(rows) == count]
        merged = sorted((row for rows in of_streams for row in rows), key=lambda row: row[0], reverse=True)
        return [row for row in merged if not oldest or row[0] >= max(oldest)], not oldest


class SecretUse(Record):
    """Number and target of the requests of a session that contained a secret. `run` is empty for calls outside of
    runs. `masked`: number of responses in which the secret was masked.
    """

    tenant: Identifier
    session: Identifier
    run: Identifier | Literal[""]
    secret: Identifier
    host: str = Field(max_length=300)
    count: int = Field(ge=0)
    masked: int = Field(default=0, ge=0)


def parse_uses(rows: object) -> list[SecretUse]:
    """Parse the uses of secrets that sandboxd reports."""
    return TypeAdapter(list[SecretUse]).validate_python(rows)


class SecretAudit:
    """Writes uses of secrets to the streams of their tenants, for workers."""

    def __init__(self, client: SyncRedis, deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    def write(self, uses: Sequence[SecretUse]) -> None:
        """Write an audit entry for each use. Raises BrokerUnavailable."""
        if not uses:
            return
        pipe = self._client.pipeline(transaction=False)
        for use in uses:
            actor = Actor(key=SANDBOX, role="tenant", name=use.session, tenant=use.tenant)
            details = {"session": use.session, "run": use.run, "host": use.host, "requests": str(use.count)}
            details |= {"masked_responses": str(use.masked)} if use.masked else {}
            entry = build_entry(actor, "secret.use", use.secret, tenant=use.tenant, details=details)
            key = tenant_audit_key(self._deployment, use.tenant)
            pipe.xadd(key, {"entry": entry_text(entry)}, maxlen=MAX_TENANT_ENTRIES, approximate=True)
        with broker_errors("uses of secrets were not written to the audit log"):
            pipe.execute()


class _Position(NamedTuple):
    """The position of an entry among the entries of all streams, in order of time. `owner`: the owner of the stream;
    it orders entries with the same time.
    """

    milliseconds: int
    sequence: int
    owner: str

    @classmethod
    def of(cls, id_: str, owner: str) -> Self:
        milliseconds, _, sequence = id_.partition("-")
        return cls(int(milliseconds), int(sequence), owner)

    def before_in(self, owner: str) -> str:
        """Return the XREVRANGE bound for the entries of a stream before this position."""
        is_included = owner < self.owner
        return f"{'' if is_included else '('}{self.milliseconds}-{self.sequence}"

    def __str__(self) -> str:
        return f"{self.milliseconds}-{self.sequence}" + (f"-{self.owner}" if self.owner else "")


_Row = tuple[_Position, Mapping[bytes, bytes]]


def _fits(entry: NewAuditEntry, tenant: str | None, actions: tuple[AuditAction, ...], target: str | None) -> bool:
    return (
        tenant in (None, entry.tenant) and (not actions or entry.action in actions) and target in (None, entry.target)
    )


def _parse(position: _Position, fields: Mapping[bytes, bytes]) -> AuditEntry | None:
    """Return an entry; None for an entry of a later release, which is not shown."""
    try:
        entry = NewAuditEntry.model_validate_json(fields.get(b"entry", b""))
    except ValidationError:
        return None
    return AuditEntry(**dict(entry), id=str(position), at=position.milliseconds / 1000)


def _parse_cursor(text: str) -> _Position:
    match = _CURSOR.fullmatch(text)
    position = _Position(int(match[1]), int(match[2]), match[3] or "") if match is not None else None
    if position is None or max(position.milliseconds, position.sequence) >= 2**64:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "the cursor does not belong to the audit log: use the cursor of the previous page, or omit it",
        )
    return position


def _fit_text(text: str) -> str:
    """Return a detail in a form that JSON can encode."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_DETAIL_CHARS else f"{text[: MAX_DETAIL_CHARS - 32]}... ({len(text)} characters)"
