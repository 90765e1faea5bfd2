"""The tools of a deployment: the catalogs that workers publish, and the switches that turn tools off.

Administrators turn tools off. Orchestrators and workers check the switches before each call.
"""

import difflib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import redis.asyncio
from pydantic import ValidationError

from toolcrew.concurrency.tasks import SharedReads
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.names import (
    BUILTIN_TOOLS,
    CATALOG_POOLS,
    audit_key,
    catalog_key,
    catalog_names_key,
    installed_skills_key,
    switches_key,
)
from toolcrew.contract.registry import (
    SWITCHES_FRESH_S,
    Switch,
    ToolRegistry,
    find_switch,
    parse_switches,
    seal_switch,
    switch_field,
)
from toolcrew.contract.signing import SigningKeys, readable
from toolcrew.contract.specs import Catalog, SkillSummary, ToolSpec, open_catalog, seal_catalog
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.audit import AUDIT_LUA, AuditAction, AuditedStore
from toolcrew.store.connection import SyncRedis, broker_errors
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=_Named)

FRESH_S = 1.0
CATALOG_TTL_S = 15
NAMES_TTL_S = 7 * 24 * 3600
STARTED_BY = {
    "sandbox": "`toolcrew serve worker` next to a sandboxd",
    "web": "`toolcrew serve worker --kind web`",
    "tools": "`toolcrew serve worker --kind web` with TOOLCREW_TOOL_MODULES or the tools' package",
}
"""The command that starts the worker of each pool."""


class CatalogSource(Protocol):
    """A source of tools and skills. Each tuple stays the same object until its content changes."""

    async def specs(self) -> tuple[ToolSpec, ...]: ...

    async def skills(self) -> tuple[SkillSummary, ...]: ...

    def explain_missing(self, name: str) -> str | None:
        """Return why an existing tool cannot be called now, with advice; None if there is no such tool. Uses the
        result of the last `specs`.
        """
        ...


class RedisCatalog:
    """The catalogs of all pools in Redis. The catalogs are read in one round trip,
    at most once every FRESH_S seconds.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._signing = keys
        self._keys = [key(deployment, pool) for key in (catalog_key, catalog_names_key) for pool in CATALOG_POOLS]
        self._specs: tuple[ToolSpec, ...] = ()
        self._lost: dict[str, str] = {}
        self._clashes: set[str] = set()
        self._read_at = float("-inf")
        self._reads = SharedReads[None]()
        # Catalogs rarely change, so the parsed form of the last text is cached.
        self._parsed: dict[str, tuple[str | bytes, Catalog]] = {}
        self._skills: tuple[SkillSummary, ...] = ()

    async def specs(self) -> tuple[ToolSpec, ...]:
        """Return all specs, including the session verbs. Raises ConfigError: no worker has published tools, or a
        catalog cannot be verified or read. Raises BrokerUnavailable when Redis does not answer.
        """
        if time.monotonic() - self._read_at > FRESH_S:
            await self._reads.read("catalog", self._refresh)
        return self._specs

    async def skills(self) -> tuple[SkillSummary, ...]:
        """Return the skills of the workers with sandboxes, by name. Raises the same errors as `specs`."""
        await self.specs()
        return self._skills

    def explain_missing(self, name: str) -> str | None:
        pool = self._lost.get(name)
        return None if pool is None else f"no worker serves {name} now: start one with {STARTED_BY[pool]}"

    async def pools(self) -> dict[str, tuple[ToolSpec, ...]]:
        """Return the tools of each pool that has a worker now. Raises the same errors as `specs`, except for missing
        workers.
        """
        texts, _ = await self._fetch()
        return {pool: self._parse(pool, text).tools for pool, text in texts.items() if text is not None}

    async def served_before(self) -> dict[str, list[str] | None]:
        """Return the names of the tools that each pool published last; None for an unreadable list. Raises
        BrokerUnavailable when Redis does not answer.
        """
        _, names = await self._fetch()
        return {pool: _parse_names(text) for pool, text in names.items()}

    async def _refresh(self) -> None:
        self._specs = await self._read()
        self._read_at = time.monotonic()

    def _parse(self, pool: str, text: str | bytes) -> Catalog:
        cached = self._parsed.get(pool)
        if cached is None or cached[0] != text:
            with readable(f"the tools that workers of pool {pool} publish", "run the same release everywhere"):
                cached = self._parsed[pool] = text, open_catalog(self._signing, pool, text)
        return cached[1]

    async def _read(self) -> tuple[ToolSpec, ...]:
        texts, names = await self._fetch()
        if not any(texts.values()):
            raise ConfigError(
                "no worker has published its tools: start one with `toolcrew serve worker`, or everything with "
                "`toolcrew up`"
            )
        tools: dict[str, ToolSpec] = {}
        lost: dict[str, str] = {"session.open": "sandbox"}
        for pool, text in texts.items():
            if text is None:
                lost.update((name, pool) for name in _parse_names(names[pool]) or () if name not in lost)
                continue
            for spec in self._parse(pool, text).tools:
                self._report_clash(tools.setdefault(spec.name, spec), spec)
        sandbox = texts["sandbox"]
        self._skills = (
            tuple(sorted(self._parse("sandbox", sandbox).skills, key=lambda skill: skill.name))
            if sandbox is not None
            else ()
        )
        self._lost = {name: pool for name, pool in lost.items() if name not in tools}
        return tuple(sorted(tools.values(), key=lambda spec: spec.name))

    async def _fetch(self) -> tuple[dict[str, str | bytes | None], dict[str, str | bytes | None]]:
        """Return for each pool the text of its catalog, and the text of the names that it published last."""
        with broker_errors("the tool catalog was not read"):
            values = await self._client.mget(self._keys)
        count = len(CATALOG_POOLS)
        return dict(zip(CATALOG_POOLS, values[:count], strict=True)), dict(
            zip(CATALOG_POOLS, values[count:], strict=True)
        )

    def _report_clash(self, tool: ToolSpec, hidden: ToolSpec) -> None:
        """Log once that a tool is hidden by another tool with its name."""
        if tool is hidden or tool.name in self._clashes:
            return
        self._clashes.add(tool.name)
        log.error("tool_published_twice", tool=tool.name, served_by=tool.pool, hidden=hidden.pool)


def find_skill(name: str, skills: Sequence[S]) -> S:
    """Return the skill with that name. Raises ToolFailure(FILE_NOT_FOUND) with the nearest names: there is no such
    skill.
    """
    match = next((skill for skill in skills if skill.name == name), None)
    if match is None:
        nearest = difflib.get_close_matches(name, [skill.name for skill in skills], n=3, cutoff=0.0)
        raise ToolFailure(ErrorCode.FILE_NOT_FOUND, f"Skill not found: {name}", nearest=nearest)
    return match


def _parse_names(text: str | bytes | None) -> list[str] | None:
    """Return the names; None for a text that is not JSON. The names only explain why a tool is missing, so they are
    not signed.
    """
    try:
        names = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


class WorkerCatalogStore:
    """Publishes the catalogs of a worker's pools."""

    def __init__(self, client: SyncRedis, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._keys = keys
        self._deployment = deployment

    def publish(self, catalogs: Mapping[str, Catalog]) -> None:
        """Store the catalog of each pool on this worker. A catalog expires after CATALOG_TTL_S seconds. Raises
        BrokerUnavailable when Redis does not answer.
        """
        with broker_errors("the catalog was not published"), self._client.pipeline(transaction=False) as pipe:
            for key, text, ttl_s in self._build_entries(catalogs):
                pipe.set(key, text, ex=ttl_s)
            pipe.execute()

    def _build_entries(self, catalogs: Mapping[str, Catalog]) -> list[tuple[str, str, int]]:
        """Return the key, the text and the lifetime in seconds of each entry."""
        entries: list[tuple[str, str, int]] = []
        for pool, catalog in catalogs.items():
            # Every tenant may see these names, so tools of single tenants are omitted.
            names = json.dumps([spec.name for spec in catalog.tools if spec.tenants is None])
            entries.append(
                (catalog_key(self._deployment, pool), seal_catalog(self._keys, pool, catalog), CATALOG_TTL_S)
            )
            entries.append((catalog_names_key(self._deployment, pool), names, NAMES_TTL_S))
        return entries


async def check_tools(client: "redis.asyncio.Redis", deployment: str, tenant: str, policy: TenantPolicy) -> list[str]:
    """Return warnings about patterns that match no tool. Tools that no worker offers now count too, if a worker has
    offered them before.

    Raises ToolFailure(INVALID_ARGUMENTS) with the nearest names: no tool has the given name. Raises BrokerUnavailable
    when Redis does not answer.
    """
    if policy.tools is None:
        return []
    with broker_errors("the tools of the policy were not checked"):
        texts: Any = await client.mget([catalog_names_key(deployment, pool) for pool in CATALOG_POOLS])
        skills: Any = await client.hkeys(installed_skills_key(deployment, tenant))
    published = {name for text in texts if text is not None for name in json.loads(text)}
    names = sorted({*BUILTIN_TOOLS, *published, *(skill.decode(errors="replace") for skill in skills)})
    warnings = list[str]()
    for pattern in policy.tools:
        if pattern in names or pattern.startswith("session."):
            continue
        if pattern.endswith("*"):
            if not any(name.startswith(pattern[:-1]) for name in names):
                warnings.append(f"no tool that has been published matches the pattern {pattern}")
        elif published:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"there is no tool {pattern}: see `toolcrew tools list`; start the workers of a new tool once "
                "before you allow it",
                nearest=difflib.get_close_matches(pattern, names, n=3),
            )
        else:
            warnings.append(f"the tool {pattern} was not checked: no worker has published its tools yet")
    return warnings


# --- Switches ---------------------------------------------------------------------------------------------------------

_TURN = Script(
    f"""
{AUDIT_LUA}
-- `switch` '' turns the tool on. Turning on a tool that is on changes nothing.
local was_off = redis.call('HEXISTS', switches, field)
if switch == '' and was_off == 0 then return 0 end
audit(audit_log, entry)
if switch == '' then redis.call('HDEL', switches, field) else redis.call('HSET', switches, field, switch) end
return was_off
""",
    keys=("switches", "audit_log"),
    args=("field", "switch", "entry"),
)


class SwitchSource(Protocol):
    """Interface that returns the switches, the records that turn tools off."""

    async def switches(self) -> Mapping[str, Switch]:
        """Return the switches of all tools that are off, for all tenants or for one tenant. See `find_switch` and
        `switches_for`.
        """
        ...


class RedisSwitches(AuditedStore):
    """The switches in Redis. The switches are read at most once every SWITCHES_FRESH_S seconds, but own changes are
    visible at once.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._keys = keys
        self._key = switches_key(deployment)
        self._audit = audit_key(deployment)
        self._cache = _SwitchCache(keys, time.monotonic)

    async def switches(self) -> Mapping[str, Switch]:
        """Return the switches. Raises BrokerUnavailable when Redis does not answer, because a tool that may be off must
        not be called.
        """
        if (requested_at := self._cache.find_due_check()) is not None:
            with broker_errors("the switches were not read"):
                self._cache.learn(await self._client.hgetall(self._key), requested_at)
        return self._cache.switches

    async def turn_off(self, name: str, switch: Switch, tenant: str | None = None) -> None:
        """Turn a tool off for all tenants, or for one tenant. The change takes effect everywhere within 2 seconds.
        Raises BrokerUnavailable when Redis does not answer.
        """
        await self._turn("tool.disable", name, tenant, switch)

    async def turn_on(self, name: str, tenant: str | None = None) -> bool:
        """Turn a tool on. Return whether it was off. A tool that is also turned off for one tenant stays off for that
        tenant. Raises BrokerUnavailable when Redis does not answer.
        """
        return await self._turn("tool.enable", name, tenant, None)

    async def _turn(self, action: AuditAction, name: str, tenant: str | None, switch: Switch | None) -> bool:
        fields = {"reason": switch.reason} if switch is not None else {}
        entry = self._entry(action, name, tenant=tenant, details=fields)
        field = switch_field(name, tenant)
        with broker_errors(f"{name} was not enabled or disabled"):
            was_off = await _TURN.run(
                self._client,
                switches=self._key,
                audit_log=self._audit,
                field=field,
                switch=seal_switch(self._keys, field, switch) if switch is not None else "",
                entry=entry,
            )
        self._cache.read_at = float("-inf")
        return bool(was_off)


class _SwitchCache:
    """The last read switches, shared by all copies of the same RedisSwitches."""

    def __init__(self, keys: SigningKeys, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._clock = clock
        self._fields: Any = {}
        self.switches: Mapping[str, Switch] = {}
        self.read_at = float("-inf")

    def find_due_check(self) -> float | None:
        """Return the present time if the switches must be read again; None if they are fresh."""
        now = self._clock()
        return now if now - self.read_at >= SWITCHES_FRESH_S else None

    def learn(self, fields: Any, requested_at: float) -> None:
        """Cache the hash of switches from Redis. `requested_at`: the time at which it was requested."""
        if fields != self._fields:
            self._fields, self.switches = fields, parse_switches(self._keys, fields)
        # The age of the cache counts from the request and not from the reply, so that a slow reply does not delay a
        # switch.
        self.read_at = requested_at


class RegistrySwitches:
    """SwitchSource that reads the switches of a ToolRegistry in this process."""

    def __init__(self, registry: ToolRegistry[Any]) -> None:
        self._registry = registry

    async def switches(self) -> Mapping[str, Switch]:
        return {state.name: state.switch for state in self._registry.describe() if state.switch is not None}


def build_switch(by: str, reason: str | None) -> Switch:
    """Return a switch with the present time. Raises ToolFailure(INVALID_ARGUMENTS): the name or the reason is too
    long.
    """
    try:
        return Switch(by=by, at=time.time(), reason=reason)
    except ValidationError as error:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, describe_invalid(error)) from error


class WorkerSwitches:
    """The switches for a worker that runs calls. The switches are read at most once every SWITCHES_FRESH_S seconds."""

    def __init__(
        self, client: SyncRedis, deployment: str, keys: SigningKeys, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._key = switches_key(deployment)
        self._cache = _SwitchCache(keys, clock)

    def find(self, name: str, tenant: str) -> Switch | None:
        """Return the switch that turns the tool off for that tenant; None if the tool is on. Raises BrokerUnavailable
        when Redis does not answer, because a tool that may be off must not run.
        """
        if (requested_at := self._cache.find_due_check()) is not None:
            with broker_errors(f"the call was not run, because it is not known whether {name} is disabled"):
                self._cache.learn(self._client.hgetall(self._key), requested_at)
        return find_switch(self._cache.switches, name, tenant)
