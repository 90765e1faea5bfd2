"""Which tools an administrator has turned off, as a worker knows it when it runs a call."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import redis

from contract.errors import BrokerUnavailable
from contract.names import switches_key
from contract.registry import SWITCHES_FRESH_S, Switch, find_switch, parse_switches
from contract.signing import SigningKeys


class Switches:
    """The switches in Redis, read again at most every SWITCHES_FRESH_S seconds."""

    def __init__(self, client: "redis.Redis", deployment: str, keys: SigningKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._keys = client, keys
        self._key = switches_key(deployment)
        self._clock = clock
        self._told: Mapping[Any, Any] = {}
        self._known: Mapping[str, Switch] = {}
        self._read_at = float("-inf")

    def find(self, name: str, tenant: str) -> Switch | None:
        """Why the tool is off for that tenant; None when it is on. Raises BrokerUnavailable: what may have been turned off is not run."""
        if self._clock() - self._read_at >= SWITCHES_FRESH_S:
            try:
                told: Any = self._client.hgetall(self._key)
            except redis.RedisError as error:
                raise BrokerUnavailable(
                    f"the call was not run: Redis did not say whether {name} is turned off ({error}); see that Redis is up"
                ) from error
            if told != self._told:
                self._told, self._known = told, parse_switches(self._keys, told)
            self._read_at = self._clock()
        return find_switch(self._known, name, tenant)
