"""API keys, and logins to the pages. A key identifies a tenant and a role.

Invariant: no API key can be read or forged in Redis. Redis stores only a digest of each key, in a signed record. The
key itself is shown once.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from pydantic import Field, ValidationError

from toolcrew.concurrency.tasks import SharedReads
from toolcrew.contract.calls import Identifier, Record
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ConfigError, EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.names import api_keys_key, audit_key, deployment_key, tenants_key
from toolcrew.contract.registry import LAST_INSTANT
from toolcrew.contract.signing import SigningKeys, readable
from toolcrew.contract.tenancy import REGISTERED_LUA
from toolcrew.store.audit import AUDIT_LUA, Actor, AuditedStore
from toolcrew.store.audit import Role as Role
from toolcrew.store.connection import broker_errors
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

KEY_FRESH_S = 1.0
"""Time for which a process uses a record from its cache, in seconds. Revoking a key takes effect everywhere within
twice this time.
"""
MAX_CACHED_KEYS = 4096
SECRET_BYTES = 32
LOGIN_S = 12 * 3600
LOGINS_PER_KEY = 100
"""Limit of logins of one API key at the same time. A further login ends the oldest one, so that one client cannot fill
Redis.
"""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
TAIL_CHARS = 4
_KEY = re.compile(r"tc_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_NOBODY = "0" * 64

_ADD = Script(
    f"""
{AUDIT_LUA}
{REGISTERED_LUA}
-- Creates no key for a removed tenant.
if tenant ~= 'default' and not is_registered(tenants, tenant) then return -1 end
if redis.call('HEXISTS', api_keys, key_id) == 1 then return 0 end
audit(audit_log, entry)
return redis.call('HSET', api_keys, key_id, record)
""",
    keys=("tenants", "api_keys", "audit_log"),
    args=("tenant", "key_id", "record", "entry"),
)
_REVOKE = Script(
    f"""
{AUDIT_LUA}
if redis.call('HEXISTS', api_keys, key_id) == 0 then return 0 end
audit(audit_log, entry)
return redis.call('HDEL', api_keys, key_id)
""",
    keys=("api_keys", "audit_log"),
    args=("key_id", "entry"),
)
_OPEN_LOGIN = Script(
    """
-- `logins`: the logins of the API key. `key_id`: signed.
redis.call('SET', login, key_id, 'EX', ttl_s)
redis.call('RPUSH', logins, login)
redis.call('EXPIRE', logins, ttl_s)
if redis.call('LLEN', logins) > tonumber(max_logins) then redis.call('DEL', redis.call('LPOP', logins)) end
""",
    keys=("login", "logins"),
    args=("key_id", "ttl_s", "max_logins"),
)


class ApiKeyRecord(Record):
    """The stored record of a key. `digest`: SHA-256 of the key, in hexadecimal. `tail`: the last characters of the key,
    by which people recognize the key. Times are Unix seconds.
    """

    tenant: Identifier
    role: Role
    name: str = Field(default="", max_length=128)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    tail: str = Field(max_length=TAIL_CHARS)
    created_at: float = Field(ge=0, lt=LAST_INSTANT)
    expires_at: float | None = Field(default=None, ge=0, lt=LAST_INSTANT)


@dataclass(frozen=True)
class Identity:
    """The tenant and the role of a key."""

    tenant: str
    role: Role
    key_id: str
    name: str = field(default="", compare=False)
    """The name that the key was given when it was created."""

    def may_act_for(self, tenant: str) -> bool:
        return self.role != "tenant" or tenant == self.tenant

    def actor(self) -> Actor:
        """Return the actor for the audit log."""
        return Actor(key=self.key_id, role=self.role, name=self.name, tenant=self.tenant)


@dataclass(frozen=True)
class NewKey:
    """A new key. `text` is the key itself, which is not stored anywhere."""

    id: str
    text: str
    record: ApiKeyRecord

    def __repr__(self) -> str:
        return f"NewKey(id={self.id!r})"


class ApiKeys(AuditedStore):
    """The keys in Redis. A record is read again after at most KEY_FRESH_S seconds. `signing` signs and verifies the
    records. `clock` returns Unix seconds.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        deployment: str,
        signing: SigningKeys,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._signing = signing
        self._tenants = tenants_key(deployment)
        self._key = api_keys_key(deployment)
        self._audit = audit_key(deployment)
        self._clock = clock
        self._cache: dict[str, tuple[ApiKeyRecord, float]] = {}
        self._reads = SharedReads[ApiKeyRecord | None]()

    async def authenticate(self, text: str) -> Identity:
        """Return the identity of a key. Raises ToolFailure(UNAUTHENTICATED): the key is unknown, revoked or expired.
        Raises BrokerUnavailable when Redis does not answer.
        """
        parts = _KEY.fullmatch(text)
        key_id = parts[1] if parts is not None else ""
        record = await self.find(key_id) if key_id else None
        # An unknown key takes the same time as a wrong one, so the time reveals no key ids.
        is_right = hmac.compare_digest(_digest(text), record.digest if record is not None else _NOBODY)
        if record is None or not is_right:
            raise ToolFailure(
                ErrorCode.UNAUTHENTICATED,
                "the API key is invalid or was revoked: check that you copied the complete key, or ask the "
                "operator for a new key (toolcrew keys create TENANT)",
            )
        return self._identity(key_id, record)

    async def recall(self, key_id: str) -> Identity:
        """Return the identity of a key that was presented earlier, by its id. Raises the same errors as
        `authenticate`.
        """
        record = await self.find(key_id)
        if record is None:
            raise ToolFailure(ErrorCode.UNAUTHENTICATED, "the API key was revoked: use another key")
        return self._identity(key_id, record)

    async def add(self, tenant: str, role: Role = "tenant", *, name: str = "", ttl_s: float | None = None) -> NewKey:
        """Create a key for a registered tenant. `ttl_s`: its lifetime in seconds; None: until the key is revoked.

        Raises ToolFailure(UNKNOWN_TENANT): the tenant is not registered. Raises ToolFailure(INVALID_ARGUMENTS): the
        name or the time is too long. Raises BrokerUnavailable when Redis does not answer.
        """
        key_id, now = secrets.token_hex(8), self._clock()
        text = f"tc_{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
        try:
            record = ApiKeyRecord(
                tenant=tenant,
                role=role,
                name=name,
                digest=_digest(text),
                tail=text[-TAIL_CHARS:],
                created_at=now,
                expires_at=now + ttl_s if ttl_s is not None else None,
            )
        except ValidationError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, describe_invalid(error)) from None
        until = format_instant(record.expires_at) if record.expires_at is not None else None
        details = {"role": role, "name": name, "tail": record.tail, "expires": until}
        entry = self._entry("key.add", key_id, tenant=tenant, details=details)
        with broker_errors("no API key was created"):
            added = await _ADD.run(
                self._client,
                tenants=self._tenants,
                api_keys=self._key,
                audit_log=self._audit,
                tenant=tenant,
                key_id=key_id,
                record=self._signing.seal(_purpose(key_id), record.model_dump_json()),
                entry=entry,
            )
        if added != 1:
            raise ToolFailure(
                ErrorCode.UNKNOWN_TENANT,
                f"tenant {tenant} does not exist: register it first (toolcrew tenants add {tenant})",
            )
        return NewKey(key_id, text, record)

    async def revoke(self, key_id: str) -> bool:
        """Revoke a key. Return whether it existed. The key is invalid everywhere within 2 seconds. Raises
        BrokerUnavailable when Redis does not answer.
        """
        with broker_errors("the API key was not revoked"):
            data: Any = await self._client.hget(self._key, key_id)
            if data is None:
                return False
            entry = self._entry("key.remove", key_id, **self._describe(key_id, data))
            was_there = await _REVOKE.run(
                self._client, api_keys=self._key, audit_log=self._audit, key_id=key_id, entry=entry
            )
        self._cache.pop(key_id, None)
        return bool(was_there)

    async def all(self) -> dict[str, ApiKeyRecord | ConfigError]:
        """Return every key by its id, the oldest first. An unreadable record is replaced by its error. Raises
        BrokerUnavailable when Redis does not answer.
        """
        with broker_errors("the API keys were not read"):
            details: Any = await self._client.hgetall(self._key)
        records: dict[str, ApiKeyRecord | ConfigError] = {}
        for raw, data in details.items():
            key_id = raw.decode(errors="replace")
            try:
                records[key_id] = self._parse(key_id, data)
            except ConfigError as error:
                records[key_id] = error
        return dict(
            sorted(records.items(), key=lambda item: item[1].created_at if isinstance(item[1], ApiKeyRecord) else 0.0)
        )

    def _identity(self, key_id: str, record: ApiKeyRecord) -> Identity:
        if record.expires_at is not None and self._clock() >= record.expires_at:
            raise ToolFailure(
                ErrorCode.UNAUTHENTICATED,
                f"the API key {key_id} has expired: ask the operator for a new key (`toolcrew keys create "
                f"{record.tenant}`)",
            )
        return Identity(record.tenant, record.role, key_id, record.name)

    async def find(self, key_id: str) -> ApiKeyRecord | None:
        """Return a key by its id, or None for an unknown or revoked key. Raises ConfigError for an unreadable record,
        and BrokerUnavailable when Redis does not answer.
        """
        record, requested_at = self._cache.get(key_id, (None, 0.0))
        if record is not None and time.monotonic() - requested_at < KEY_FRESH_S:
            return record
        return await self._reads.read(key_id, lambda: self._read(key_id))

    async def _read(self, key_id: str) -> ApiKeyRecord | None:
        requested_at = time.monotonic()
        with broker_errors("the API key was not checked"):
            data: Any = await self._client.hget(self._key, key_id)
        self._cache.pop(key_id, None)
        if data is None:
            return None
        record = self._parse(key_id, data)
        while len(self._cache) >= MAX_CACHED_KEYS:
            del self._cache[next(iter(self._cache))]
        # The age counts from the request: a slow reply must not extend the use of a revoked key.
        self._cache[key_id] = (record, requested_at)
        return record

    def _parse(self, key_id: str, data: bytes) -> ApiKeyRecord:
        advice = f"remove it (toolcrew keys revoke {key_id}) and create another"
        with readable(f"the record of API key {key_id}", advice, "the key is rejected"):
            return ApiKeyRecord.model_validate_json(self._signing.unseal(_purpose(key_id), data))

    def _describe(self, key_id: str, data: bytes) -> dict[str, Any]:
        """Return the fields of the audit entry for a removed record."""
        try:
            record = self._parse(key_id, data)
        except ConfigError:
            return {"details": {"record": "could not be read"}}
        return {"tenant": record.tenant, "details": {"role": record.role, "name": record.name, "tail": record.tail}}


class Credential:
    """The API key of a client. The key is checked before each call, because it may have been revoked since the last
    call.
    """

    def __init__(self, keys: ApiKeys, text: str) -> None:
        self._keys = keys
        self._text = text

    async def check(self, tenant: str) -> Identity:
        """Return the identity of the key. Raises ToolFailure(UNAUTHENTICATED): the key is invalid. Raises
        ToolFailure(PERMISSION_DENIED): the key is not for that tenant. Raises BrokerUnavailable when Redis does not
        answer.
        """
        identity = await self._identify()
        if not identity.may_act_for(tenant):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"the API key belongs to tenant {identity.tenant}, not to {tenant}: omit the tenant, or use a key "
                "of that tenant",
            )
        return identity

    async def _identify(self) -> Identity:
        return await self._keys.authenticate(self._text)


class ShownCredential(Credential):
    """The API key of a login to the pages. Only its id is known, because the key was presented at the login and is not
    stored.
    """

    async def _identify(self) -> Identity:
        return await self._keys.recall(self._text)


def _digest(text: str) -> str:
    """Return a fast digest, because each call needs one. Guessing is hopeless: the secret has 32 random bytes."""
    return hashlib.sha256(b"toolcrew api key v1\0" + text.encode(errors="surrogatepass")).hexdigest()


def _purpose(key_id: str) -> str:
    """Return the signing purpose. A record is valid only for its own key id."""
    return f"api-key {key_id}"


class LoginStore:
    """The logins to the pages. A login maps a random token to the id of an API key. Only the cookie contains the
    token; Redis stores its digest. A login ends LOGIN_S seconds after its start. Every method raises BrokerUnavailable
    when Redis does not answer.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, signing: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._signing = signing

    async def open(self, key_id: str) -> str:
        """Create a login for the holder of an API key, and return its token."""
        token = secrets.token_urlsafe(SECRET_BYTES)
        # The signature is bound to the token. Otherwise any process that can write to Redis could log in as the holder
        # of any key.
        sealed = self._signing.seal(self._purpose(token), key_id)
        with broker_errors("the login was not stored"):
            await _OPEN_LOGIN.run(
                self._client,
                login=self._key(token),
                logins=deployment_key(self._deployment, f"page:logins:{key_id}"),
                key_id=sealed,
                ttl_s=LOGIN_S,
                max_logins=LOGINS_PER_KEY,
            )
        return token

    async def find(self, token: str) -> str | None:
        """Return the id of the API key; None if the login does not exist or has ended."""
        if not _TOKEN.fullmatch(token):
            return None
        with broker_errors("the login was not read"):
            sealed: Any = await self._client.get(self._key(token))
        try:
            return self._signing.unseal(self._purpose(token), sealed) if sealed is not None else None
        except EnvelopeRefused as error:
            log.error("login_refused", error=str(error))
            return None

    async def close(self, token: str) -> None:
        """End a login, if there is one."""
        with broker_errors("the login was not deleted"):
            await self._client.delete(self._key(token))

    def _purpose(self, token: str) -> str:
        return f"login {login_digest('login', token)}"

    def _key(self, token: str) -> str:
        return deployment_key(self._deployment, f"page:login:{login_digest('login', token)}")


def login_digest(purpose: str, token: str) -> str:
    """Return a digest of a login's token. A fast hash is secure here, because the token has 32 random bytes."""
    return hashlib.sha256(f"toolcrew page {purpose} v1\0{token}".encode(errors="replace")).hexdigest()
