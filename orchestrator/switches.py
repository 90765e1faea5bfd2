"""Which tools are turned off in this deployment: asked before a call is sent, set by administrators."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import switches_key
from contract.registry import SWITCHES_FRESH_S, Switch, ToolRegistry, parse_switches


class SwitchSource(Protocol):
    """Where it is known what is off."""

    async def switches(self) -> Mapping[str, Switch]:
        """Those tools that are off, by name."""
        ...


class RedisSwitches:
    """The switches in Redis, read again at most every SWITCHES_FRESH_S seconds; one's own changes are seen at once."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._key = switches_key(deployment)
        self._known: Mapping[str, Switch] = {}
        self._read_at = float("-inf")

    async def switches(self) -> Mapping[str, Switch]:
        """Raises BrokerUnavailable when Redis does not answer: what may have been turned off is not called."""
        if time.monotonic() - self._read_at >= SWITCHES_FRESH_S:
            try:
                told: Any = await self._client.hgetall(self._key)
            except (RedisError, OSError) as error:
                raise BrokerUnavailable(f"Redis did not say which tools are turned off ({error})") from error
            self._known, self._read_at = parse_switches(told), time.monotonic()
        return self._known

    async def turn_off(self, name: str, switch: Switch) -> None:
        """Every worker and orchestrator knows within 2 seconds. Raises BrokerUnavailable."""
        try:
            await self._client.hset(self._key, name, switch.model_dump_json())
        except (RedisError, OSError) as error:
            raise _unchanged(name, error) from error
        self._read_at = float("-inf")

    async def turn_on(self, name: str) -> bool:
        """Whether it was off. Raises BrokerUnavailable."""
        try:
            was_off = bool(await self._client.hdel(self._key, name))
        except (RedisError, OSError) as error:
            raise _unchanged(name, error) from error
        self._read_at = float("-inf")
        return was_off


class RegistrySwitches:
    """The switches of a registry in this process."""

    def __init__(self, registry: ToolRegistry[Any]) -> None:
        self._registry = registry

    async def switches(self) -> Mapping[str, Switch]:
        return {state.name: state.switch for state in self._registry.describe() if state.switch is not None}


def build_switch(by: str, reason: str | None) -> Switch:
    """A switch as of now. Raises ToolFailure(INVALID_ARGUMENTS) for a name or reason that is too long."""
    try:
        return Switch(by=by, at=time.time(), reason=reason)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{first['loc'][0]}: {first['msg']}") from error


def _unchanged(name: str, error: Exception) -> BrokerUnavailable:
    return BrokerUnavailable(f"{name} was not switched: Redis does not answer ({error})")
