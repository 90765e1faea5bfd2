"""Skills that are installed for tenants. Each skill has a signed record, a bundle (its compressed files), and a count
of its uses by runs. One step changes a record and writes the audit entry.
"""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import redis.asyncio
from pydantic import Field

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import (
    account_key,
    audit_key,
    installed_skills_key,
    skill_bundle_key,
    skill_uses_key,
    tenants_key,
)
from toolcrew.contract.signing import UNSEAL_LUA, SigningKeys, readable
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.contract.tenancy import REGISTERED_LUA
from toolcrew.store.audit import AUDIT_LUA, AuditedStore
from toolcrew.store.connection import SyncRedis, broker_errors
from toolcrew.store.memory import MEMORY_LUA, no_memory
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

_WHAT = "the tenant's skills were not read"
MAX_INSTALLED = 200
"""Limit of installed skills of one tenant."""
MAX_INSTALLED_BYTES = 64 * 1024 * 1024
"""Limit of the compressed bundles of one tenant, in bytes. All tenants share the memory of Redis."""
USES_TTL_S = 90 * 24 * 3600
"""Lifetime of the counts after the last use, in seconds."""
# A digest belongs to one name only, because the content contains the name. A script that removes a skill can therefore
# delete its bundle.
_INSTALL = Script(
    f"""
{AUDIT_LUA}
{REGISTERED_LUA}
{MEMORY_LUA}
-- `prefix`, here and below: of the keys of bundles.
-- Stores nothing for a tenant that was removed meanwhile. Otherwise a new tenant with its name would get the skill.
if not is_served(tenants, tenant) then return 'tenant' end
local old, bytes, count = nil, #bundle, 1
local skills = redis.call('HGETALL', installed)
for at = 1, #skills, 2 do
  local is_json, other = pcall(cjson.decode, unsealed(skills[at + 1]))
  local is_record = is_json and type(other) == 'table' and type(other.skill) == 'table'
  if skills[at] == name then old = is_record and other.skill.digest or '' else
    count, bytes = count + 1, bytes + (is_record and other.bundle_bytes or 0)
  end
end
if old and is_replacing ~= '1' then return 'taken' end
if count > tonumber(max_skills) then return 'many' end
if bytes > tonumber(max_bytes) then return 'large' end
local now = read_time()
if not has_room(account, now, NEW_WORK) then return 'memory' end
set_bytes(account, now, account, 'skills', bytes)
audit(audit_log, entry)
redis.call('SET', bundle_key, bundle)
redis.call('HSET', installed, name, record)
if old and prefix .. old ~= bundle_key then redis.call('DEL', prefix .. old) end
return 'done'
""",
    keys=("installed", "bundle_key", "audit_log", "tenants", "account"),
    args=("name", "record", "bundle", "entry", "max_skills", "max_bytes", "is_replacing", "prefix", "tenant"),
)
_REMOVE = Script(
    f"""
{AUDIT_LUA}
{UNSEAL_LUA}
{MEMORY_LUA}
local record = redis.call('HGET', installed, name)
if not record then return 0 end
audit(audit_log, entry)
redis.call('HDEL', installed, name)
local is_json, fields = pcall(cjson.decode, unsealed(record))
if is_json and type(fields) == 'table' and type(fields.skill) == 'table' then
  local bytes = counted_bytes(account, 'skills') - redis.call('STRLEN', prefix .. fields.skill.digest)
  set_bytes(account, read_time(), account, 'skills', math.max(0, bytes))
  redis.call('DEL', prefix .. fields.skill.digest)
end
return 1
""",
    keys=("installed", "audit_log", "account"),
    args=("name", "entry", "prefix"),
)


class InstalledSkill(Record):
    """The record of an installed skill. `tool`: the tool that its file skill.tool.json describes; None without that
    file. `bundle_bytes`, `bundle_sha256`: size and hash of its compressed files in Redis. `installed_at`: Unix seconds.
    """

    skill: SkillSummary
    tool: ToolSpec | None = None
    bundle_bytes: int = Field(ge=1, le=MAX_INSTALLED_BYTES)
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    installed_at: float = Field(ge=0)


class SkillStore(AuditedStore):
    """The installed skills of one deployment."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys

    async def all(self, tenant: str) -> Mapping[str, InstalledSkill]:
        """Return the tenant's skills by name, sorted. A skill that cannot be verified is logged and omitted. Raises
        BrokerUnavailable when Redis does not answer.
        """
        with broker_errors(_WHAT):
            fields: Any = await self._client.hgetall(installed_skills_key(self._deployment, tenant))
        return _parse_all(self._keys, tenant, fields)

    async def find(self, tenant: str, name: str) -> InstalledSkill | None:
        """Return a skill; None if it does not exist or cannot be verified. Raises BrokerUnavailable when Redis does
        not answer.
        """
        with broker_errors(_WHAT):
            sealed: Any = await self._client.hget(installed_skills_key(self._deployment, tenant), name)
        return _parse(self._keys, tenant, name, sealed) if sealed is not None else None

    async def install(
        self, tenant: str, skill: SkillSummary, bundle: bytes, tool: ToolSpec | None = None, *, replace: bool = False
    ) -> InstalledSkill:
        """Install a skill for an existing tenant. `bundle`: the compressed files of the skill, from workers.skills.
        `tool`: the tool that skill.tool.json describes, if there is that file. Raises ToolFailure(INVALID_ARGUMENTS):
        the name is taken. Raises ToolFailure(QUOTA_EXCEEDED): too many skills or bytes. Raises
        ToolFailure(UNKNOWN_TENANT): no such tenant. Raises BrokerUnavailable when Redis does not answer.
        """
        if len(bundle) > MAX_INSTALLED_BYTES:
            raise _too_large(tenant)
        record = InstalledSkill(
            skill=skill,
            tool=tool,
            bundle_bytes=len(bundle),
            bundle_sha256=hashlib.sha256(bundle).hexdigest(),
            installed_at=time.time(),
        )
        entry = self._entry(
            "skill.install",
            skill.name,
            tenant=tenant,
            details={"digest": skill.digest, "files": str(skill.files)},
        )
        with broker_errors("the skill was not installed"):
            verdict = await _INSTALL.run(
                self._client,
                installed=installed_skills_key(self._deployment, tenant),
                bundle_key=skill_bundle_key(self._deployment, tenant, skill.digest),
                audit_log=audit_key(self._deployment),
                tenants=tenants_key(self._deployment),
                account=account_key(self._deployment, tenant),
                name=skill.name,
                record=seal_installed(self._keys, tenant, record),
                bundle=bundle,
                entry=entry,
                max_skills=MAX_INSTALLED,
                max_bytes=MAX_INSTALLED_BYTES,
                is_replacing=int(replace),
                prefix=skill_bundle_key(self._deployment, tenant, ""),
                tenant=tenant,
            )
        if verdict != b"done":
            raise _refused(verdict.decode(), tenant, skill.name)
        return record

    async def remove(self, tenant: str, name: str) -> bool:
        """Remove a skill. Return whether it existed. Raises BrokerUnavailable when Redis does not answer."""
        entry = self._entry("skill.remove", name, tenant=tenant)
        with broker_errors("the skill was not removed"):
            was_there = await _REMOVE.run(
                self._client,
                installed=installed_skills_key(self._deployment, tenant),
                audit_log=audit_key(self._deployment),
                account=account_key(self._deployment, tenant),
                name=name,
                entry=entry,
                prefix=skill_bundle_key(self._deployment, tenant, ""),
            )
        return bool(was_there)


class WorkerSkillStore:
    """The installed skills, for workers. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: SyncRedis, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys

    def all(self, tenant: str) -> dict[str, InstalledSkill]:
        """Return the tenant's skills by name, in order. A skill that cannot be verified is logged and omitted."""
        with broker_errors(_WHAT):
            fields: Any = self._client.hgetall(installed_skills_key(self._deployment, tenant))
        return _parse_all(self._keys, tenant, fields)

    def find(self, tenant: str, name: str) -> InstalledSkill | None:
        """Return the skill with that name; None if the tenant has none. Raises ToolFailure(STALE_FILE): the skill
        cannot be verified.
        """
        with broker_errors(_WHAT):
            sealed: Any = self._client.hget(installed_skills_key(self._deployment, tenant), name)
        try:
            return parse_installed(self._keys, tenant, name, sealed) if sealed is not None else None
        except ConfigError as error:
            log.error("installed_skill_unreadable", tenant=tenant, skill=name, error=str(error))
            raise ToolFailure(ErrorCode.STALE_FILE, str(error)) from error

    def bundle(self, tenant: str, record: InstalledSkill) -> bytes | None:
        """Return the packed files of a skill; None if Redis has lost them. The files are not signed, so the caller
        must compare them with the hash in the signed record.
        """
        with broker_errors(_WHAT):
            data = self._client.get(skill_bundle_key(self._deployment, tenant, record.skill.digest))
        assert data is None or isinstance(data, bytes)
        return data


class SkillUses:
    """Counts how often each tenant's runs use each skill. The models of later runs see the most used skills. Runs work
    without the counts.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def count(self, tenant: str, skill: str) -> None:
        """Count one use of a skill by a run of the tenant."""
        key = skill_uses_key(self._deployment, tenant)
        pipe = self._client.pipeline(transaction=False)
        pipe.hincrby(key, skill, 1)
        pipe.expire(key, USES_TTL_S)
        try:
            with broker_errors("the use of a skill was not counted"):
                await pipe.execute()
        except BrokerUnavailable as error:
            log.warning("skill_use_not_counted", skill=skill, error=str(error))

    async def of(self, tenant: str) -> Mapping[str, int]:
        """Return the number of uses of each skill; empty when Redis does not answer."""
        try:
            with broker_errors("the uses of skills were not read"):
                counts: Any = await self._client.hgetall(skill_uses_key(self._deployment, tenant))
        except BrokerUnavailable as error:
            log.warning("skill_uses_not_read", tenant=tenant, error=str(error))
            return {}
        return {name.decode(errors="replace"): int(count) for name, count in counts.items() if count.isdigit()}


def seal_installed(keys: SigningKeys, tenant: str, record: InstalledSkill) -> str:
    """Return the signed record of an installed skill. The signature is valid only for this tenant and this name."""
    return keys.seal(skill_purpose(tenant, record.skill.name), record.model_dump_json())


def parse_installed(keys: SigningKeys, tenant: str, name: str, sealed: bytes) -> InstalledSkill:
    """Return the record of a tenant's skill. Raises ConfigError with a cause and advice: the record cannot be verified
    or read.
    """
    advice = f"install it again (toolcrew skills install SOURCE --replace --tenant {tenant})"
    with readable(f"the skill {name} of tenant {tenant}", advice):
        record = InstalledSkill.model_validate_json(keys.unseal(skill_purpose(tenant, name), sealed))
    if record.skill.name != name:
        raise ConfigError(
            f"the record of skill {name} of tenant {tenant} is for skill {record.skill.name}, so it is not used: "
            f"{advice}"
        )
    return record


def skill_purpose(tenant: str, name: str) -> str:
    """Return the signing purpose of a tenant's skill."""
    return f"skill {tenant} {name}"


def _parse_all(keys: SigningKeys, tenant: str, fields: Mapping[bytes, bytes]) -> dict[str, InstalledSkill]:
    names = {name.decode(errors="replace"): sealed for name, sealed in sorted(fields.items())}
    records = {name: _parse(keys, tenant, name, sealed) for name, sealed in names.items()}
    return {name: record for name, record in records.items() if record is not None}


def _parse(keys: SigningKeys, tenant: str, name: str, sealed: bytes) -> InstalledSkill | None:
    """Return the record; None if it cannot be verified, which is logged."""
    try:
        return parse_installed(keys, tenant, name, sealed)
    except ConfigError as error:
        log.error("installed_skill_unreadable", tenant=tenant, skill=name, error=str(error))
        return None


def _refused(verdict: str, tenant: str, name: str) -> ToolFailure:
    if verdict == "taken":
        return ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"tenant {tenant} already has a skill {name}: replace it (--replace), or remove it first",
        )
    if verdict == "tenant":
        return ToolFailure(
            ErrorCode.UNKNOWN_TENANT,
            f"tenant {tenant} does not exist: register it first (toolcrew tenants add {tenant})",
        )
    if verdict == "memory":
        return no_memory("the skill was not installed")
    if verdict == "many":
        return ToolFailure(
            ErrorCode.QUOTA_EXCEEDED,
            f"tenant {tenant} has reached its limit of {MAX_INSTALLED} skills: remove some",
        )
    return _too_large(tenant)


def _too_large(tenant: str) -> ToolFailure:
    limit_mib = MAX_INSTALLED_BYTES // 1024 // 1024
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED,
        f"the skills of tenant {tenant} would take more than {limit_mib} MiB: remove skills, or omit files",
    )
