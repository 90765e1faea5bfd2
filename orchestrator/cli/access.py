"""Connections for commands that read or change a whole deployment. Such a command has the rights of the key in
TOOLCREW_API_KEY.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import load_settings
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.operations.command_actor import find_actor
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.audit import Actor, Role
from toolcrew.store.connection import RedisClient, check_redis, open_redis
from toolcrew.store.hosts import HostStore
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.secrets import SecretStore
from toolcrew.store.tenants import RedisTenants


@dataclass(frozen=True)
class Deployment:
    """The deployment that TOOLCREW_REDIS_URL names. The audit records `actor`, who runs the command."""

    redis: RedisClient
    broker: BrokerSettings
    actor: Actor

    @cached_property
    def signing_keys(self) -> SigningKeys:
        return self.broker.signing_keys()

    @property
    def tenants(self) -> RedisTenants:
        return RedisTenants(self.redis, self.broker.deployment, self.signing_keys).acting_as(self.actor)

    @property
    def hosts(self) -> HostStore:
        return HostStore(self.redis, self.broker.deployment)

    @property
    def keys(self) -> ApiKeys:
        return ApiKeys(self.redis, self.broker.deployment, self.signing_keys).acting_as(self.actor)

    @property
    def models(self) -> ModelEndpoints:
        return ModelEndpoints(self.redis, self.broker.deployment, self.signing_keys).acting_as(self.actor)

    @property
    def secrets(self) -> SecretStore:
        return SecretStore(self.redis, self.broker.deployment, self.signing_keys).acting_as(self.actor)


def is_over_http() -> bool:
    """Return whether commands use the HTTP API: TOOLCREW_URL is set, and TOOLCREW_REDIS_URL is not."""
    settings = load_settings()
    return settings.url is not None and settings.redis_url is None


def refuse_over_http(what: str) -> None:
    """Raise ConfigError if commands use the HTTP API. `what`: the command or option that needs the pool's Redis."""
    if is_over_http():
        raise ConfigError(
            f"{what} needs the pool's Redis: set TOOLCREW_REDIS_URL. docs/commands.md lists the commands that need "
            "only TOOLCREW_URL, and docs/http-api.md the requests that an operator's key may send"
        )


@asynccontextmanager
async def open_deployment(needed: Role) -> AsyncIterator[Deployment]:
    """Connect to Redis; no worker is needed. `needed`: the lowest role that may run the command.

    Raises ConfigError, BrokerUnavailable, ToolFailure(UNAUTHENTICATED, PERMISSION_DENIED).
    """
    refuse_over_http("this command")
    settings = load_settings()
    broker = settings.broker()
    client = open_redis(broker)
    try:
        await check_redis(client, broker)
        yield Deployment(client, broker, await find_actor(client, settings, needed))
    finally:
        await client.aclose()
