"""Who the tenants are and what each may have: asked before a call is sent, set by administrators."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import redis.asyncio
from pydantic import TypeAdapter, ValidationError
from redis.exceptions import RedisError

from contract.calls import Identifier
from contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from contract.known_tenants import KnownTenants
from contract.names import api_keys_key, tenants_key
from contract.tenancy import (
    DEFAULT_TENANT,
    MAX_POLICY_BYTES,
    VERSION_FIELD,
    TenantLook,
    TenantPolicy,
    parse_policy,
    parse_tenants,
)
from orchestrator.shared_reads import SharedReads

MAX_CHANGES = 20
"""How often a change is tried when others change the same tenant meanwhile."""
_NAME: TypeAdapter[str] = TypeAdapter(Identifier)

_CHANGE = """
-- KEYS: tenants. ARGV: name, what was read of it ('' for nothing), what it is to be, a new version.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3], '#version', ARGV[4])
return 1
"""
_REMOVE = """
-- KEYS: tenants, API keys. ARGV: name, a new version. The tenant's keys go with it: they must not come back with one of the same name.
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return {-1, 0} end
redis.call('HSET', KEYS[1], '#version', ARGV[2])
local revoked, keys = 0, redis.call('HGETALL', KEYS[2])
for at = 1, #keys, 2 do
  local is_json, record = pcall(cjson.decode, keys[at + 1])
  if is_json and type(record) == 'table' and record.tenant == ARGV[1] then revoked = revoked + redis.call('HDEL', KEYS[2], keys[at]) end
end
return {revoked, redis.call('HLEN', KEYS[1]) - 1 - redis.call('HEXISTS', KEYS[1], 'default')}
"""


class TenantSource(Protocol):
    """Where policies come from."""

    async def policy(self, tenant: str) -> TenantPolicy:
        """What the tenant may have now. Raises ToolFailure(UNKNOWN_TENANT), BrokerUnavailable, ConfigError for a policy that cannot be read."""
        ...


class OpenTenants:
    """For programs without a pool: every tenant has the default policy."""

    async def policy(self, tenant: str) -> TenantPolicy:
        return TenantPolicy()


@dataclass(frozen=True)
class Removal:
    """What went with a tenant. `is_open`: none is registered any more, so that any name is served."""

    keys: int
    is_open: bool


class RedisTenants:
    """The tenants in Redis. Their version is read at most every POLICY_FRESH_S seconds, a policy when it is first needed or something has
    changed; one's own changes are seen at once."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._keys = [tenants_key(deployment), api_keys_key(deployment)]
        self._known = KnownTenants()
        self._checks, self._looks = SharedReads[None](), SharedReads[TenantPolicy]()
        self._change_script = client.register_script(_CHANGE)
        self._remove_script = client.register_script(_REMOVE)

    async def policy(self, tenant: str) -> TenantPolicy:
        """As TenantSource promises. What Redis does not say is not assumed."""
        if self._known.is_stale():
            await self._checks.read(VERSION_FIELD, self._check)
        return self._known.find(tenant) or await self._looks.read(tenant, lambda: self._look(tenant))

    async def all(self) -> Mapping[str, TenantPolicy | ConfigError]:
        """Every registered tenant by name; in place of a policy that cannot be read: why. Raises BrokerUnavailable."""
        try:
            told: Any = await self._client.hgetall(self._keys[0])
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not say which tenants there are ({error}): see that it is up") from error
        return parse_tenants(told)

    async def add(self, name: str, policy: TenantPolicy) -> None:
        """Register a tenant; every worker and orchestrator knows within 2 seconds.

        Raises ToolFailure(INVALID_ARGUMENTS) for a name that cannot be one or is taken, or a policy that is too long; BrokerUnavailable.
        """
        _check_name(name)
        if name == DEFAULT_TENANT:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"{name} is always there: set what it may have (toolcrew tenants set {name} ...)"
            )
        if not await self._write(name, b"", policy):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"tenant {name} is registered already: change it (toolcrew tenants set {name} ...)"
            )

    async def change(self, name: str, change: Callable[[TenantPolicy], TenantPolicy]) -> TenantPolicy:
        """What `change` makes of the tenant's present policy; it is called again when somebody else was faster, so that no change is lost.

        Raises as `add` does, and what `change` raises; ConfigError when the present policy cannot be read: `replace` it.
        """
        for _ in range(MAX_CHANGES):
            present = await self._read_present(name)
            policy = change(parse_policy(name, present) if present else TenantPolicy())
            if await self._write(name, present, policy):
                return policy
        raise BrokerUnavailable(f"tenant {name} was not changed: others change it all the time; try again")

    async def replace(self, name: str, policy: TenantPolicy) -> None:
        """Give a registered tenant this policy, whatever it has. Raises as `change` does."""
        for _ in range(MAX_CHANGES):
            if await self._write(name, await self._read_present(name), policy):
                return
        raise BrokerUnavailable(f"tenant {name} was not changed: others change it all the time; try again")

    async def remove(self, name: str) -> Removal:
        """Forget a tenant and revoke its API keys, in one step. What it has open goes when it is closed, or by its own time to live.

        Raises ToolFailure: UNKNOWN_TENANT, INVALID_ARGUMENTS for the default one; BrokerUnavailable.
        """
        _check_name(name)
        if name == DEFAULT_TENANT:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"{name} cannot be removed: set what it may have (toolcrew tenants set {name} ...)"
            )
        try:
            revoked, others = await self._remove_script(keys=self._keys, args=[name, secrets.token_hex(8)])
        except (RedisError, OSError) as error:
            raise _unchanged(name, error) from error
        if revoked < 0:
            raise _missing(name)
        self._known.forget()
        return Removal(int(revoked), is_open=int(others) == 0)

    async def _check(self) -> None:
        asked_at = self._known.clock()
        try:
            version: Any = await self._client.hget(self._keys[0], VERSION_FIELD)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not say what the tenants may have ({error}): see that it is up") from error
        self._known.confirm(version, asked_at)

    async def _look(self, tenant: str) -> TenantPolicy:
        asked_at = self._known.clock()
        pipe = self._client.pipeline(transaction=True)
        pipe.hmget(self._keys[0], [VERSION_FIELD, tenant, DEFAULT_TENANT])
        pipe.hlen(self._keys[0])
        try:
            (version, own, default), fields = await pipe.execute()
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not say what tenant {tenant} may have ({error}): see that it is up") from error
        return self._known.learn(tenant, TenantLook(version, own, default, fields), asked_at)

    async def _read_present(self, name: str) -> bytes:
        """What is kept of a tenant that can be changed; b"" for the default one before it is set."""
        _check_name(name)
        try:
            kept: Any = await self._client.hget(self._keys[0], name)
        except (RedisError, OSError) as error:
            raise _unchanged(name, error) from error
        if kept is None and name != DEFAULT_TENANT:
            raise _missing(name)
        return bytes(kept or b"")

    async def _write(self, name: str, present: bytes, policy: TenantPolicy) -> bool:
        """False when the tenant is not what it was."""
        # Only what is not as by default: a release with one more field can still be read by its neighbour until somebody uses it.
        text = policy.model_dump_json(exclude_defaults=True).encode()
        if len(text) > MAX_POLICY_BYTES:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"the policy is {len(text)} bytes; at most {MAX_POLICY_BYTES} are kept: name less, or use patterns",
            )
        try:
            written = await self._change_script(keys=self._keys[:1], args=[name, present, text, secrets.token_hex(8)])
        except (RedisError, OSError) as error:
            raise _unchanged(name, error) from error
        self._known.forget()
        return bool(written)


def _check_name(name: str) -> None:
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "that is no name of a tenant: write 1 to 64 letters, digits, '-' and '_'") from error


def _missing(name: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.UNKNOWN_TENANT, f"there is no tenant {name}: see toolcrew tenants ls, or register it (toolcrew tenants add {name})"
    )


def _unchanged(name: str, error: Exception) -> BrokerUnavailable:
    return BrokerUnavailable(f"tenant {name} was not changed: Redis does not do it ({error}); see that it is up and may be written")
