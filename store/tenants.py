"""The tenants and their policies. Administrators change policies. Orchestrators and workers check them for each call.

Invariant: without a verified policy, a tenant has no rights. A change takes effect everywhere within 2 seconds,
because every process compares the version of the hash with the version of its cache.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import redis.asyncio
from pydantic import TypeAdapter, ValidationError

from toolcrew.concurrency.tasks import SharedReads
from toolcrew.contract.calls import Identifier
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import (
    account_key,
    active_tenants_key,
    api_keys_key,
    audit_key,
    installed_skills_key,
    model_endpoints_key,
    secrets_key,
    skill_bundle_key,
    switches_key,
    tenants_key,
)
from toolcrew.contract.session_views import BudgetState
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import (
    DEFAULT_TENANT,
    MAX_PAUSE_REASON_CHARS,
    MAX_POLICY_BYTES,
    POLICY_FRESH_S,
    REGISTERED_LUA,
    VERSION_FIELD,
    Budgets,
    TenantPolicy,
    parse_policy,
    parse_tenants,
    seal_policy,
)
from toolcrew.store.audit import AUDIT_LUA, AuditAction, AuditedStore
from toolcrew.store.budgets import BudgetStore
from toolcrew.store.connection import SyncRedis, broker_errors
from toolcrew.store.memory import MEMORY_LUA
from toolcrew.store.scripts import Script
from toolcrew.store.stored_bytes import StoredBytes

MAX_CACHED_POLICIES = 4096
"""Limit of cached policies. Above the limit, the oldest policy is dropped, and read again when needed."""
MAX_CHANGES = 20
"""Maximum number of attempts at a change while other processes change the same tenant."""
_NAME: TypeAdapter[str] = TypeAdapter(Identifier)
_NO_BUDGETS = Budgets()

PAUSE_LUA = """
-- Returns whether the policy of the tenant pauses its work. A step reads each policy once. `key`: of all policies.
local paused_tenants = {}
local function is_paused(key, tenant)
  if paused_tenants[tenant] == nil then
    local policy = redis.call('HGET', key, tenant)
    if not policy then
      local default = redis.call('HMGET', key, 'default', '#version')
      -- Without registered tenants, the default policy is for all names.
      policy = default[1] and redis.call('HLEN', key) == (default[2] and 2 or 1) and default[1]
    end
    -- Most policies do not contain the field and need no parsing.
    local mentions_pause = string.find(policy or '', 'is_paused', 1, true)
    local is_json, fields = pcall(cjson.decode, mentions_pause and unsealed(policy) or '{}')
    paused_tenants[tenant] = is_json and type(fields) == 'table' and fields.is_paused == true
  end
  return paused_tenants[tenant]
end
"""
"""Lua function for scripts that start work. It needs UNSEAL_LUA before it. Scripts alone decide which work waits for a
paused tenant, in the step in which the work would start.
"""

_CHANGE = Script(
    f"""
{AUDIT_LUA}
-- `read_policy`: the policy that was read, '' for none. `version`: a new one.
if (redis.call('HGET', tenants, name) or '') ~= read_policy then return 0 end
audit(audit_log, entry)
redis.call('HSET', tenants, name, policy, '#version', version)
return 1
""",
    keys=("tenants", "audit_log"),
    args=("name", "read_policy", "policy", "version", "entry"),
)
_REMOVE = Script(
    AUDIT_LUA
    + REGISTERED_LUA
    + MEMORY_LUA
    + """
-- `skills`, `secrets`: keys of the tenant. `bundle_prefix`: of its skills.
if not is_registered(tenants, name) then return -1 end
local revoked, keys = 0, redis.call('HGETALL', api_keys)
audit(audit_log, entry)
redis.call('HSET', tenants, name, removed_policy, '#version', version)
for _, hash in ipairs({switches, endpoints}) do
  for _, field in ipairs(redis.call('HKEYS', hash)) do
    if string.sub(field, 1, #name + 1) == name .. '/' then redis.call('HDEL', hash, field) end
  end
end
for at = 1, #keys, 2 do
  local is_json, record = pcall(cjson.decode, unsealed(keys[at + 1]))
  if is_json and type(record) == 'table' and record.tenant == name then
    revoked = revoked + redis.call('HDEL', api_keys, keys[at])
  end
end
for _, text in ipairs(redis.call('HVALS', skills)) do
  local is_json, record = pcall(cjson.decode, unsealed(text))
  if is_json and type(record) == 'table' and type(record.skill) == 'table' then
    redis.call('DEL', bundle_prefix .. record.skill.digest)
  end
end
redis.call('DEL', skills, secrets)
set_bytes(account, read_time(), account, 'skills', 0)
return revoked
""",
    keys=("tenants", "api_keys", "switches", "audit_log", "endpoints", "account"),
    args=("name", "version", "entry", "skills", "bundle_prefix", "removed_policy", "secrets"),
)


@dataclass(frozen=True)
class StoredPolicy:
    """The fields in the hash of tenants that determine the policy of one tenant. `fields`: number of fields in the
    hash.
    """

    version: bytes | None
    own: bytes | None
    default: bytes | None
    fields: int

    @property
    def is_open(self) -> bool:
        """Return whether only the default tenant is registered. In that case every tenant name is accepted."""
        return self.fields == (self.version is not None) + (self.default is not None)

    def policy(self, tenant: str, keys: SigningKeys) -> TenantPolicy:
        """Return the tenant's policy. Raises ToolFailure(UNKNOWN_TENANT): the tenant is not registered or was removed.
        Raises ConfigError: the policy cannot be verified or read; the tenant then has no rights.
        """
        if self.own is not None:
            policy = parse_policy(keys, tenant, self.own)
            if policy.is_removed:
                raise ToolFailure(
                    ErrorCode.UNKNOWN_TENANT, f"tenant {tenant} was removed: send the call for a registered tenant"
                )
            return policy
        if tenant == DEFAULT_TENANT or self.is_open:
            return parse_policy(keys, DEFAULT_TENANT, self.default) if self.default is not None else TenantPolicy()
        raise ToolFailure(
            ErrorCode.UNKNOWN_TENANT,
            f"tenant {tenant} does not exist: send the call for a registered tenant, or ask the operator to "
            f"register it (toolcrew tenants add {tenant})",
        )


class PolicyCache:
    """The policies in the memory of a process, and their freshness. Thread-safe.

    The code that uses the cache reads Redis, and passes the time at which it sent each request. A reply to a request
    that is older than the last one changes nothing.
    """

    def __init__(self, keys: SigningKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self.clock = clock
        self._lock = threading.Lock()
        self._policies: dict[str, TenantPolicy] = {}
        self._version: bytes | None = None
        self._requested_at = float("-inf")
        self._had_tenants = False

    def is_stale(self) -> bool:
        """Return whether the version must be read before the cache may be used."""
        return self.clock() - self._requested_at >= POLICY_FRESH_S

    def find(self, tenant: str) -> TenantPolicy | None:
        """Return the cached policy of a tenant; None if the caller must read it from Redis."""
        return self._policies.get(tenant)

    def confirm(self, version: bytes | None, requested_at: float) -> None:
        """Record the version in Redis. If Redis has no version, clear the cache, because changes would go unnoticed."""
        with self._lock:
            if requested_at >= self._requested_at:
                self._turn_to(version, is_known_same=version is not None)
                self._requested_at = requested_at

    def learn(self, tenant: str, stored: StoredPolicy, requested_at: float) -> TenantPolicy:
        """Return the tenant's policy from the fields of the hash. Raises the same errors as StoredPolicy.policy. Also
        raises ConfigError: Redis has lost the tenants that this process has seen. No name then gets the default
        policy.
        """
        if stored.is_open and self._had_tenants:
            raise ConfigError(
                "Redis has lost the registered tenants, so no tenant is served: restore its data, or register the "
                "tenants again (toolcrew tenants add NAME)"
            )
        self._had_tenants = self._had_tenants or not stored.is_open
        with self._lock:
            if requested_at >= self._requested_at:
                self._turn_to(stored.version, is_known_same=True)
        policy = stored.policy(tenant, self._keys)
        with self._lock:
            # Another thread may have seen a newer version while this policy was read. The policy may then be out of
            # date.
            if stored.version == self._version:
                while len(self._policies) >= MAX_CACHED_POLICIES:
                    del self._policies[next(iter(self._policies))]
                self._policies[tenant] = policy
        return policy

    def forget(self) -> None:
        """Clear the cache after a change by this process."""
        with self._lock:
            self._policies.clear()
            self._requested_at = float("-inf")

    def _turn_to(self, version: bytes | None, *, is_known_same: bool) -> None:
        if version != self._version or not is_known_same:
            self._policies.clear()
        self._version = version


class TenantSource(Protocol):
    """A source of the tenants' policies and budgets."""

    async def policy(self, tenant: str) -> TenantPolicy:
        """Return the tenant's present policy. Raises ToolFailure(UNKNOWN_TENANT): no such tenant. Raises ConfigError:
        the policy cannot be read. Raises BrokerUnavailable when Redis does not answer.
        """
        ...

    async def check_budgets(self, tenant: str) -> None:
        """Raise ToolFailure(BUDGET_EXCEEDED) if a budget of the tenant is used up. Also raises the same errors as
        `policy`.
        """
        ...

    async def check_storage(self, tenant: str) -> None:
        """Raise ToolFailure(QUOTA_EXCEEDED) if the tenant's stored files have reached its limit. Also raises the same
        errors as `policy`.
        """
        ...


class OpenTenants:
    """TenantSource for programs without a pool. Every tenant has the default policy."""

    async def policy(self, tenant: str) -> TenantPolicy:
        return TenantPolicy()

    async def check_budgets(self, tenant: str) -> None:
        """Do nothing: the default policy has no budgets."""

    async def check_storage(self, tenant: str) -> None:
        """Do nothing: without a pool there is no shared store."""


class RedisTenants(AuditedStore):
    """The tenants in Redis. Their version is read at most once every POLICY_FRESH_S seconds. A policy is read at its
    first use and after a change. Own changes are visible at once.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._signing = keys
        self._key = tenants_key(deployment)
        self._cache = PolicyCache(keys)
        self._budgets = BudgetStore(client, deployment)
        self.stored_bytes = StoredBytes(client, deployment, self._find_storage_limit)
        self._checks = SharedReads[None]()
        self._policy_reads = SharedReads[TenantPolicy]()

    async def policy(self, tenant: str) -> TenantPolicy:
        """Return the tenant's policy, as TenantSource describes. No policy is assumed while Redis does not answer."""
        if self._cache.is_stale():
            await self._checks.read(VERSION_FIELD, self._check)
        return self._cache.find(tenant) or await self._policy_reads.read(tenant, lambda: self._read_policy(tenant))

    async def check_budgets(self, tenant: str) -> None:
        budgets = (await self.policy(tenant)).budgets
        if budgets != _NO_BUDGETS:
            await self._budgets.check(tenant, budgets)

    async def check_storage(self, tenant: str) -> None:
        await self.stored_bytes.check(tenant)

    async def budgets(self, tenant: str) -> list[BudgetState]:
        """Return the tenant's budgets with the used amounts. Raises the same errors as `policy`."""
        return await self._budgets.read(tenant, (await self.policy(tenant)).budgets)

    async def all(self) -> Mapping[str, TenantPolicy | ConfigError]:
        """Return the policy of the default tenant and of every registered tenant by name. An unreadable policy is
        replaced by its error. Raises BrokerUnavailable when Redis does not answer.
        """
        return (await self.all_with_active())[0]

    async def all_with_active(self) -> tuple[Mapping[str, TenantPolicy | ConfigError], list[str]]:
        """Return the same policies, and the names of all served tenants that this deployment knows, in order. While
        no tenant is registered, they include the tenants that have opened sessions. Raises BrokerUnavailable.
        """
        with broker_errors("the tenants were not read"):
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.hgetall(self._key)
                pipe.zrange(active_tenants_key(self._deployment), 0, -1)
                fields, active = await pipe.execute()
        policies = {DEFAULT_TENANT: TenantPolicy(), **parse_tenants(self._signing, fields)}
        is_open = not set(fields) - {VERSION_FIELD.encode(), DEFAULT_TENANT.encode()}
        seen = {name.decode(errors="replace") for name in active} if is_open else set[str]()
        return policies, sorted({*policies, *seen})

    async def add(self, name: str, policy: TenantPolicy) -> None:
        """Register a tenant. Every worker and orchestrator knows the tenant within 2 seconds.

        Raises ToolFailure(INVALID_ARGUMENTS): the name is invalid or taken, or the policy is too long. Raises
        BrokerUnavailable when Redis does not answer.
        """
        _check_name(name)
        if name == DEFAULT_TENANT:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{name} always exists: change its policy (`toolcrew tenants set --help` shows how)",
            )
        if not await self._write(name, b"", policy, "tenant.add"):
            await self._read_present(name)
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"tenant {name} is already registered: change it (`toolcrew tenants set --help` shows how)",
            )

    async def change(
        self,
        name: str,
        change: Callable[[TenantPolicy], TenantPolicy],
        *,
        action: AuditAction = "tenant.set",
        reason: str | None = None,
    ) -> TenantPolicy:
        """Apply `change` to the tenant's present policy and store the result. If another process was faster, `change`
        is called again, so that no change is lost. `action` and `reason` go to the audit log. If the policy does not
        change, no audit entry is written.

        Raises the same errors as `add`, and the errors of `change`. Raises ConfigError: the present policy cannot be
        read; use `replace`.
        """
        for _ in range(MAX_CHANGES):
            present = await self._read_present(name)
            policy = change(self._parse(name, present))
            if await self._write(name, present, policy, action, reason):
                return policy
        raise BrokerUnavailable(
            f"tenant {name} was not changed, because other processes changed it at the same time: try again"
        )

    async def replace(self, name: str, policy: TenantPolicy) -> None:
        """Replace a registered tenant's policy. A paused tenant stays paused. Raises the same errors as `change`."""
        for _ in range(MAX_CHANGES):
            present = await self._read_present(name)
            if await self._write(name, present, self._keep_pause(name, present, policy), "tenant.set"):
                return
        raise BrokerUnavailable(
            f"tenant {name} was not changed, because other processes changed it at the same time: try again"
        )

    async def pause(self, name: str, reason: str = "") -> TenantPolicy:
        """Pause a tenant. Within 2 s, no further calls and runs of the tenant start anywhere. Running ones continue.
        Return the new policy. Raises the same errors as `change`.
        """
        if len(reason) > MAX_PAUSE_REASON_CHARS:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"the reason has {len(reason)} characters, and the maximum is {MAX_PAUSE_REASON_CHARS}: shorten it",
            )
        fields = {"is_paused": True, "pause_reason": reason}
        return await self.change(
            name, lambda policy: policy.model_copy(update=fields), action="tenant.pause", reason=reason
        )

    async def resume(self, name: str) -> TenantPolicy:
        """Resume a paused tenant. The change takes effect everywhere within 2 seconds. Return the new policy. Raises
        the same errors as `change`.
        """
        fields = {"is_paused": False, "pause_reason": ""}
        return await self.change(name, lambda policy: policy.model_copy(update=fields), action="tenant.resume")

    async def remove(self, name: str) -> int:
        """Remove a tenant, its API keys and its secrets in one step. Return how many API keys were revoked. Its open
        sessions end when they are closed or expire.

        The name stays reserved. Otherwise a later tenant with the name could read the runs, files and checkpoints of
        this tenant.

        Raises ToolFailure(UNKNOWN_TENANT): no such tenant. Raises ToolFailure(INVALID_ARGUMENTS): the default tenant.
        Raises BrokerUnavailable when Redis does not answer.
        """
        _check_name(name)
        if name == DEFAULT_TENANT:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{name} cannot be removed: change its policy (`toolcrew tenants set --help` shows how)",
            )
        entry = self._entry("tenant.remove", name, tenant=name)
        with broker_errors(f"tenant {name} was not removed"):
            revoked = await _REMOVE.run(
                self._client,
                tenants=self._key,
                api_keys=api_keys_key(self._deployment),
                switches=switches_key(self._deployment),
                audit_log=audit_key(self._deployment),
                endpoints=model_endpoints_key(self._deployment),
                account=account_key(self._deployment, name),
                name=name,
                version=secrets.token_hex(8),
                entry=entry,
                skills=installed_skills_key(self._deployment, name),
                bundle_prefix=skill_bundle_key(self._deployment, name, ""),
                removed_policy=seal_policy(self._signing, name, TenantPolicy(is_removed=True)),
                secrets=secrets_key(self._deployment, name),
            )
        if int(revoked) < 0:
            raise _build_unknown_error(name)
        self._cache.forget()
        return int(revoked)

    async def _find_storage_limit(self, tenant: str) -> int:
        return (await self.policy(tenant)).stored_bytes

    async def _check(self) -> None:
        requested_at = self._cache.clock()
        with broker_errors("the version of the tenants was not read"):
            version: Any = await self._client.hget(self._key, VERSION_FIELD)
        self._cache.confirm(version, requested_at)

    async def _read_policy(self, tenant: str) -> TenantPolicy:
        requested_at = self._cache.clock()
        pipe = self._client.pipeline(transaction=True)
        pipe.hmget(self._key, [VERSION_FIELD, tenant, DEFAULT_TENANT])
        pipe.hlen(self._key)
        with broker_errors(f"the policy of tenant {tenant} was not read"):
            (version, own, default), fields = await pipe.execute()
        return self._cache.learn(tenant, StoredPolicy(version, own, default, fields), requested_at)

    async def _read_present(self, name: str) -> bytes:
        """Return the stored policy of a tenant that is about to be changed; b"" for the default tenant before its
        policy is set. Raises ToolFailure for a removed tenant.
        """
        _check_name(name)
        with broker_errors(f"tenant {name} was not changed"):
            sealed: Any = await self._client.hget(self._key, name)
        if sealed is None and name != DEFAULT_TENANT:
            raise _build_unknown_error(name)
        present = bytes(sealed or b"")
        try:
            is_removed = self._parse(name, present).is_removed
        except ConfigError:
            # The policy cannot be read. `replace` may repair it, but must never restore a removed tenant, so search the
            # text for the field. A forged field can only block the name.
            is_removed = b'"is_removed":true' in present
        if is_removed:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"tenant {name} was removed. Its runs, files and checkpoints may still be stored, so the name stays "
                "reserved: choose another name",
            )
        return present

    async def _write(
        self, name: str, present: bytes, policy: TenantPolicy, action: AuditAction, reason: str | None = None
    ) -> bool:
        """Write a policy. Return False if the stored policy is no longer `present`."""
        if policy.is_removed:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                "a policy cannot remove a tenant: omit is_removed, and use `toolcrew tenants remove NAME`",
            )
        text = seal_policy(self._signing, name, policy).encode()
        if len(text) > MAX_POLICY_BYTES:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"the policy has {len(text)} bytes, and the maximum is {MAX_POLICY_BYTES}: list fewer names, or use "
                "patterns",
            )
        entry = ""
        if present != text:
            fields = {**self._changes(name, present, policy), "reason": reason}
            entry = self._entry(action, name, tenant=name, details=fields)
        with broker_errors(f"tenant {name} was not changed"):
            written = await _CHANGE.run(
                self._client,
                tenants=self._key,
                audit_log=audit_key(self._deployment),
                name=name,
                read_policy=present,
                policy=text,
                version=secrets.token_hex(8),
                entry=entry,
            )
        self._cache.forget()
        return bool(written)

    def _parse(self, name: str, present: bytes) -> TenantPolicy:
        return parse_policy(self._signing, name, present) if present else TenantPolicy()

    def _changes(self, name: str, present: bytes, policy: TenantPolicy) -> dict[str, str | None]:
        """Return the changed fields. If the present policy cannot be read, return all fields that differ from the
        default.
        """
        try:
            old = self._parse(name, present)
        except ConfigError:
            old = TenantPolicy()
        before, after = old.model_dump(mode="json"), policy.model_dump(mode="json")
        changed = {field: value for field, value in after.items() if value != before[field]}
        return {
            field: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            for field, value in changed.items()
        }

    def _keep_pause(self, name: str, present: bytes, policy: TenantPolicy) -> TenantPolicy:
        """Return the new policy, paused if the present policy is paused. A new policy must not resume a tenant by
        accident.
        """
        try:
            old = self._parse(name, present)
        except ConfigError:
            return policy
        return (
            policy.model_copy(update={"is_paused": True, "pause_reason": old.pause_reason}) if old.is_paused else policy
        )


def _check_name(name: str) -> None:
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, "the name of the tenant is invalid: use 1 to 64 letters, digits, '-' and '_'"
        ) from error


def _build_unknown_error(name: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.UNKNOWN_TENANT,
        f"tenant {name} does not exist: see `toolcrew tenants list`, or register it (toolcrew tenants add {name})",
    )


class WorkerTenants:
    """The tenants in Redis, for workers. Their version is read at most once every POLICY_FRESH_S seconds. A policy is
    read at its first use and after a change. Thread-safe.
    """

    def __init__(
        self, client: SyncRedis, deployment: str, keys: SigningKeys, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._key = tenants_key(deployment)
        self._cache = PolicyCache(keys, clock)

    def policy(self, tenant: str) -> TenantPolicy:
        """Return the tenant's present policy.

        Raises ToolFailure(UNKNOWN_TENANT): no such tenant. Raises ConfigError: the policy cannot be verified or read.
        Raises BrokerUnavailable when Redis does not answer. After an error, the call must not run.
        """
        with broker_errors(f"the call was not run, because the policy of tenant {tenant} was not read"):
            if self._cache.is_stale():
                requested_at = self._cache.clock()
                version: Any = self._client.hget(self._key, VERSION_FIELD)
                self._cache.confirm(version, requested_at)
            return self._cache.find(tenant) or self._read_policy(tenant)

    def _read_policy(self, tenant: str) -> TenantPolicy:
        requested_at = self._cache.clock()
        pipe = self._client.pipeline(transaction=True)
        pipe.hmget(self._key, [VERSION_FIELD, tenant, DEFAULT_TENANT])
        pipe.hlen(self._key)
        (version, own, default), fields = pipe.execute()
        return self._cache.learn(tenant, StoredPolicy(version, own, default, fields), requested_at)
