"""The skills that are installed for tenants, in Redis: changed in one step with the audit's entry, read by whoever makes runs."""

import copy
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from contract.installed_skills import MAX_INSTALLED, MAX_INSTALLED_BYTES, InstalledSkill, parse_installed, seal_installed
from contract.names import audit_key, installed_skills_key, skill_bundle_key, tenants_key
from contract.signing import UNSEAL_LUA, SigningKeys
from contract.specs import SkillSummary, ToolSpec
from contract.tenancy import DEFAULT_TENANT, REGISTERED_LUA, VERSION_FIELD
from store.actors import Actor, local_actor
from store.audit import AUDIT_LUA, build_entry, entry_text
from telemetry.logs import get_logger

log = get_logger(__name__)

# A digest is of one name alone, which is in the content: whatever goes takes its bundle along.
_INSTALL = f"""
{AUDIT_LUA}
{REGISTERED_LUA}
-- KEYS: the tenant's skills, the bundle, audit, tenants. ARGV: name, record, bundle, entry, most skills, most bytes, 1 to replace, prefix of bundles, tenant.
-- Nothing for a tenant that was removed while the skill was examined: it would come back with one of the same name.
local is_known = ARGV[9] == '{DEFAULT_TENANT}' or is_registered(KEYS[4], ARGV[9])
local others = redis.call('HLEN', KEYS[4]) - redis.call('HEXISTS', KEYS[4], '{VERSION_FIELD}') - redis.call('HEXISTS', KEYS[4], '{DEFAULT_TENANT}')
if not is_known and others > 0 then return 'tenant' end
local old, bytes, count = nil, #ARGV[3], 1
local told = redis.call('HGETALL', KEYS[1])
for at = 1, #told, 2 do
  local is_json, record = pcall(cjson.decode, unsealed(told[at + 1]))
  local is_record = is_json and type(record) == 'table' and type(record.skill) == 'table'
  if told[at] == ARGV[1] then old = is_record and record.skill.digest or '' else
    count, bytes = count + 1, bytes + (is_record and record.bundle_bytes or 0)
  end
end
if old and ARGV[7] ~= '1' then return 'taken' end
if count > tonumber(ARGV[5]) then return 'many' end
if bytes > tonumber(ARGV[6]) then return 'large' end
audit(KEYS[3], ARGV[4])
redis.call('SET', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if old and ARGV[8] .. old ~= KEYS[2] then redis.call('DEL', ARGV[8] .. old) end
return 'done'
"""
_REMOVE = f"""
{AUDIT_LUA}
{UNSEAL_LUA}
-- KEYS: the tenant's skills, audit. ARGV: name, entry, prefix of bundles.
local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record then return 0 end
audit(KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[1], ARGV[1])
local is_json, told = pcall(cjson.decode, unsealed(record))
if is_json and type(told) == 'table' and type(told.skill) == 'table' then redis.call('DEL', ARGV[3] .. told.skill.digest) end
return 1
"""


class InstalledSkills:
    """Of one deployment. `clock`: Unix seconds. Changes are put down to whoever runs this program, or to the actor of `acting_as`."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, clock: Callable[[], float] = time.time) -> None:
        self._client, self._deployment, self._keys, self._clock = client, deployment, keys, clock
        self._actor: Actor | None = None
        self._install, self._remove = client.register_script(_INSTALL), client.register_script(_REMOVE)

    def acting_as(self, actor: Actor) -> Self:
        """The same skills, changed by `actor`."""
        mine = copy.copy(self)
        mine._actor = actor
        return mine

    async def all(self, tenant: str) -> Mapping[str, InstalledSkill]:
        """Return them by name, in order. One that cannot be verified is logged and left out. Raises BrokerUnavailable."""
        try:
            told: Any = await self._client.hgetall(installed_skills_key(self._deployment, tenant))
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not say which skills tenant {tenant} has ({error}): see that it is up") from error
        found = {name.decode(errors="replace"): text for name, text in sorted(told.items())}
        records = {name: self._parse(tenant, name, text) for name, text in found.items()}
        return {name: record for name, record in records.items() if record is not None}

    async def find(self, tenant: str, name: str) -> InstalledSkill | None:
        """Return one of them, or None if there is none or it cannot be verified. Raises BrokerUnavailable."""
        try:
            told: Any = await self._client.hget(installed_skills_key(self._deployment, tenant), name)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not say which skills tenant {tenant} has ({error}): see that it is up") from error
        return self._parse(tenant, name, told) if told is not None else None

    async def install(
        self, tenant: str, skill: SkillSummary, bundle: bytes, tool: ToolSpec | None = None, *, replace: bool = False
    ) -> InstalledSkill:
        """`bundle`: what workers.skills wrote of it; `tool`: what its sidecar makes of it. `tenant`: one that there is. Raises ToolFailure: INVALID_ARGUMENTS when the name is taken,
        QUOTA_EXCEEDED, UNKNOWN_TENANT; BrokerUnavailable."""
        if len(bundle) > MAX_INSTALLED_BYTES:
            raise _too_large(tenant)
        record = InstalledSkill(
            skill=skill,
            tool=tool,
            bundle_bytes=len(bundle),
            bundle_sha256=hashlib.sha256(bundle).hexdigest(),
            installed_at=self._clock(),
        )
        entry = build_entry(
            self._actor or local_actor(),
            "skill.install",
            skill.name,
            tenant=tenant,
            details={"digest": skill.digest, "files": str(skill.files)},
        )
        keys = [
            installed_skills_key(self._deployment, tenant),
            skill_bundle_key(self._deployment, tenant, skill.digest),
            audit_key(self._deployment),
            tenants_key(self._deployment),
        ]
        told: list[Any] = [
            skill.name,
            seal_installed(self._keys, tenant, record),
            bundle,
            entry_text(entry),
            MAX_INSTALLED,
            MAX_INSTALLED_BYTES,
            int(replace),
        ]
        try:
            verdict: Any = await self._install(keys=keys, args=[*told, self._prefix(tenant), tenant])
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the skill was not installed: Redis does not do it ({error}); try again") from error
        if verdict != b"done":
            raise _refused(verdict.decode(), tenant, skill.name)
        return record

    async def remove(self, tenant: str, name: str) -> bool:
        """Whether there was such a skill. Raises BrokerUnavailable."""
        entry = build_entry(self._actor or local_actor(), "skill.remove", name, tenant=tenant)
        keys = [installed_skills_key(self._deployment, tenant), audit_key(self._deployment)]
        try:
            return bool(await self._remove(keys=keys, args=[name, entry_text(entry), self._prefix(tenant)]))
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the skill was not removed: Redis does not do it ({error}); try again") from error

    def _parse(self, tenant: str, name: str, sealed: bytes) -> InstalledSkill | None:
        """Return the record, or None if it cannot be verified, which is logged."""
        try:
            return parse_installed(self._keys, tenant, name, sealed)
        except ConfigError as error:
            log.error("installed_skill_unreadable", tenant=tenant, skill=name, error=str(error))
            return None

    def _prefix(self, tenant: str) -> str:
        return skill_bundle_key(self._deployment, tenant, "")


def _refused(verdict: str, tenant: str, name: str) -> ToolFailure:
    if verdict == "taken":
        return ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"tenant {tenant} has a skill {name} already: replace it (--replace), or remove it first"
        )
    if verdict == "tenant":
        return ToolFailure(ErrorCode.UNKNOWN_TENANT, f"there is no tenant {tenant}: register it first (toolcrew tenants add {tenant})")
    if verdict == "many":
        return ToolFailure(ErrorCode.QUOTA_EXCEEDED, f"tenant {tenant} has {MAX_INSTALLED} skills, which is all that may be: remove some")
    return _too_large(tenant)


def _too_large(tenant: str) -> ToolFailure:
    most = MAX_INSTALLED_BYTES // 1024 // 1024
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED, f"the skills of tenant {tenant} would take more than {most} MiB: remove some, or leave out files"
    )
