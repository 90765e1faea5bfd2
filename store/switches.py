"""The tools that are turned off in this deployment. Administrators turn tools off. Orchestrators and workers check the
switches before each call.
"""

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import redis.asyncio
from pydantic import ValidationError

from contract.errors import ErrorCode, ToolFailure
from contract.names import audit_key, switches_key
from contract.registry import (
    SWITCHES_FRESH_S,
    Switch,
    ToolRegistry,
    find_switch,
    parse_switches,
    seal_switch,
    switch_field,
)
from contract.signing import SigningKeys
from store.audit import AUDIT_LUA, Actor, AuditAction, build_entry, entry_text, local_actor
from store.connection import SyncRedis, broker_errors

_TURN = f"""
{AUDIT_LUA}
-- KEYS: switches, audit. ARGV: field, its switch ('' turns the tool on), entry. Turning on a tool
-- that is on changes nothing.
local was_off = redis.call('HEXISTS', KEYS[1], ARGV[1])
if ARGV[2] == '' and was_off == 0 then return 0 end
audit(KEYS[2], ARGV[3])
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return was_off
"""


class SwitchSource(Protocol):
    """A source of the switches."""

    async def switches(self) -> Mapping[str, Switch]:
        """Return the switches of all tools that are off, for all tenants or for one tenant. See `find_switch` and
        `switches_for`.
        """
        ...


class RedisSwitches:
    """The switches in Redis. They are read at most once every SWITCHES_FRESH_S seconds, but own changes are visible at
    once. The audit log names the system user as the actor, or the actor of `acting_as`.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client, self._keys = client, keys
        self._key, self._audit = switches_key(deployment), audit_key(deployment)
        self._turn_script = client.register_script(_TURN)
        self._actor: Actor | None = None
        self._cache = _SwitchCache(keys, time.monotonic)

    def acting_as(self, actor: Actor) -> Self:
        """Return the same switches, with changes by `actor`."""
        mine = copy.copy(self)
        mine._actor = actor
        return mine

    async def switches(self) -> Mapping[str, Switch]:
        """Return the switches. Raises BrokerUnavailable when Redis does not answer: a tool that may be off must not be
        called.
        """
        if (asked_at := self._cache.due()) is not None:
            with broker_errors("the switches were not read"):
                self._cache.learn(await self._client.hgetall(self._key), asked_at)
        return self._cache.switches

    async def turn_off(self, name: str, switch: Switch, tenant: str | None = None) -> None:
        """Turn a tool off for all tenants, or for one tenant. The change takes effect everywhere within 2 seconds.
        Raises BrokerUnavailable when Redis does not answer.
        """
        await self._turn("tool.disable", name, tenant, switch)

    async def turn_on(self, name: str, tenant: str | None = None) -> bool:
        """Turn a tool on. Return whether it was off. The tool stays off for a tenant that has a switch of its own.
        Raises BrokerUnavailable when Redis does not answer.
        """
        return await self._turn("tool.enable", name, tenant, None)

    async def _turn(self, action: AuditAction, name: str, tenant: str | None, switch: Switch | None) -> bool:
        fields = {"reason": switch.reason} if switch is not None else {}
        entry = build_entry(self._actor or local_actor(), action, name, tenant=tenant, details=fields)
        field = switch_field(name, tenant)
        args = [field, seal_switch(self._keys, field, switch) if switch is not None else "", entry_text(entry)]
        with broker_errors(f"{name} was not switched"):
            was_off = await self._turn_script(keys=[self._key, self._audit], args=args)
        self._cache.read_at = float("-inf")
        return bool(was_off)


class _SwitchCache:
    """The last read switches, shared by all copies of the same RedisSwitches."""

    def __init__(self, keys: SigningKeys, clock: Callable[[], float]) -> None:
        self._keys, self._clock = keys, clock
        self._fields: Any = {}
        self.switches: Mapping[str, Switch] = {}
        self.read_at = float("-inf")

    def due(self) -> float | None:
        """Return the present time if the switches must be read again; None if they are fresh."""
        now = self._clock()
        return now if now - self.read_at >= SWITCHES_FRESH_S else None

    def learn(self, fields: Any, asked_at: float) -> None:
        """Take the hash from Redis, which was requested at that time."""
        if fields != self._fields:
            self._fields, self.switches = fields, parse_switches(self._keys, fields)
        # The age counts from the request: a slow reply must not delay a switch.
        self.read_at = asked_at


class RegistrySwitches:
    """The switches of a registry in this process."""

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
        first = error.errors(include_url=False, include_input=False)[0]
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{first['loc'][0]}: {first['msg']}") from error


class WorkerSwitches:
    """The switches for a worker that runs calls. They are read at most once every SWITCHES_FRESH_S seconds."""

    def __init__(
        self, client: SyncRedis, deployment: str, keys: SigningKeys, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._key = client, switches_key(deployment)
        self._cache = _SwitchCache(keys, clock)

    def find(self, name: str, tenant: str) -> Switch | None:
        """Return the switch that turns the tool off for that tenant; None if the tool is on. Raises BrokerUnavailable
        when Redis does not answer: a tool that may be off must not run.
        """
        if (asked_at := self._cache.due()) is not None:
            with broker_errors(f"the call was not run, because it is not known whether {name} is turned off"):
                self._cache.learn(self._client.hgetall(self._key), asked_at)
        return find_switch(self._cache.switches, name, tenant)
