"""What the workers publish, as the orchestrator knows it."""

import time
from typing import Protocol

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ConfigError
from contract.names import catalog_key
from contract.specs import Catalog, ToolSpec

FRESH_S = 2.0


class CatalogSource(Protocol):
    """Where specs come from."""

    async def specs(self) -> tuple[ToolSpec, ...]: ...


class RedisCatalog:
    """The catalog in Redis, read again at most every FRESH_S seconds."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._key = catalog_key(deployment)
        self._specs: tuple[ToolSpec, ...] = ()
        self._read_at = float("-inf")

    async def specs(self) -> tuple[ToolSpec, ...]:
        """All specs, session verbs included. Raises ConfigError when no worker lives, BrokerUnavailable when Redis does not answer."""
        if time.monotonic() - self._read_at > FRESH_S:
            self._specs = await self._read()
            self._read_at = time.monotonic()
        return self._specs

    async def _read(self) -> tuple[ToolSpec, ...]:
        try:
            text = await self._client.get(self._key)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not give the tool catalog ({error})") from error
        if text is None:
            raise ConfigError("no worker has published its tools: start one with `toolcrew worker start`, or everything with `toolcrew up`")
        try:
            return Catalog.model_validate_json(text).tools
        except ValidationError as error:
            raise ConfigError("the workers publish a catalog of another version: run the same release on both sides") from error
