"""Models at configured endpoints (store/model_endpoints.py): keys, limits, fallbacks and prices."""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.contract.errors import ConfigError, ErrorCode, ModelBlocked, ModelUnavailable, ToolFailure
from toolcrew.contract.model_endpoints import MAX_FALLBACKS, ModelEndpoint
from toolcrew.contract.schema import find_nearest
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.dialects.model import Chunk, Model, ModelRequest
from toolcrew.orchestrator.dialects.reader import read_usage
from toolcrew.orchestrator.models.capabilities import ModelFacts
from toolcrew.orchestrator.models.choice import serves_model
from toolcrew.orchestrator.models.notices import notify
from toolcrew.orchestrator.models.request_limits import RequestLimits
from toolcrew.orchestrator.models.retries import RetryPolicy
from toolcrew.store.connection import RedisClient
from toolcrew.store.model_endpoints import ModelEndpoints, StoredEndpoint
from toolcrew.store.model_limits import SharedLimits
from toolcrew.store.secrets import SecretStore, advise_setting
from toolcrew.store.tenants import RedisTenants

if TYPE_CHECKING:
    from toolcrew.orchestrator.models.openai import OpenAIModel

FALLBACK_AFTER_S = 5.0
"""Seconds that a request waits for an endpoint with a fallback: for retries after failures, or for the end of a block.
"""
DOWN_S = 30.0
"""Seconds for which all requests go to the fallback immediately, after the endpoint has answered no request."""


@dataclass
class EndpointClient:
    """An open endpoint. `answered_at`: when a reply last began to arrive, in monotonic seconds."""

    endpoint: ModelEndpoint
    key: str | None = field(repr=False)
    model: "OpenAIModel"
    limits: RequestLimits
    users: int = 0
    answered_at: float = -math.inf


class EndpointClients:
    """Clients of the configured endpoints of a pool, for one process. A client is opened at the first use of its
    endpoint, and again after a change of the endpoint.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        client: RedisClient,
        keys: SigningKeys,
        tenants: RedisTenants,
    ) -> None:
        self._settings = settings
        self._redis = client
        self._keys = keys
        self._tenants = tenants
        self._endpoints = ModelEndpoints(client, settings.deployment, keys)
        self._secrets = SecretStore(client, settings.deployment, keys)
        self._open: dict[str, EndpointClient] = {}

    async def find(self, tenant: str, name: str) -> StoredEndpoint | None:
        """Return the endpoint that the tenant means by `name`. Raises the errors of ModelEndpoints.find. Waits if Redis
        does not answer.
        """
        return await retry_until_available(lambda: self._endpoints.find(tenant, name))

    async def allows(self, tenant: str, name: str) -> bool:
        """Return whether the tenant's policy allows the model. Raises the errors of RedisTenants.policy. Waits if Redis
        does not answer.
        """
        return (await retry_until_available(lambda: self._tenants.policy(tenant))).allows_model(name)

    async def check(self, tenant: str, name: str) -> None:
        """Raise ToolFailure(PERMISSION_DENIED) unless the tenant's policy allows the model. Raises the same errors as
        `allows`.
        """
        if not await self.allows(tenant, name):
            raise refuse_model(tenant, name)

    async def check_name(self, tenant: str, name: str) -> None:
        """Raise the errors of ModelNames.check for a service with the settings of this process. Waits if Redis does
        not answer.
        """
        names = ModelNames(self._settings, self._endpoints, self._tenants)
        await retry_until_available(lambda: names.check(tenant, name))

    @asynccontextmanager
    async def use(self, stored: StoredEndpoint) -> AsyncIterator[EndpointClient]:
        """Yield the open endpoint. Raises ConfigError: its secret does not exist or cannot be read."""
        key = await self._key(stored)
        present = opened = self._open.get(stored.id)
        if opened is None or (opened.endpoint, opened.key) != (stored.endpoint, key):
            opened = self._open[stored.id] = self._build(stored, key)
        # Counted before the next await, so that no other request closes it.
        opened.users += 1
        try:
            if present is not None and present is not opened and present.users == 0:
                await present.model.aclose()
            yield opened
        finally:
            opened.users -= 1
            if opened.users == 0 and self._open.get(stored.id) is not opened:
                await opened.model.aclose()

    def open_limits(self, address: str, model: str, key: str) -> RequestLimits:
        """Return the request limits of an endpoint without a record in Redis. All processes share its rate limits, like
        those of configured endpoints.
        """
        # The key is part of the id, because servers limit the rate of each key. Without the secret of the deployment,
        # the id reveals nothing about it.
        digest = self._keys.current.sign("model endpoint", f"{address}\0{model}\0{key}".encode())
        return SharedLimits(self._redis, self._settings.deployment, f"default:{digest[:16]}")

    async def aclose(self) -> None:
        for opened in self._open.values():
            await opened.model.aclose()
        self._open.clear()

    async def _key(self, stored: StoredEndpoint) -> str | None:
        name = stored.endpoint.secret
        if name is None:
            return None
        # Read for each request, so that a revoked key is not used again.
        secret = await retry_until_available(lambda: self._secrets.get(stored.tenant, name))
        if secret is None:
            raise ConfigError(
                f"the model endpoint {stored.name} needs the secret {name}, which does not exist: "
                f"{advise_setting(stored.tenant, name)}"
            )
        return secret.value

    def _build(self, stored: StoredEndpoint, key: str | None) -> EndpointClient:
        # Imported here, because the SDK takes a second to import and most commands need no model.
        from toolcrew.orchestrator.models.openai import OpenAIModel

        attempts = 1 + self._settings.model_retries
        retries = (
            RetryPolicy(attempts)
            if stored.endpoint.fallback is None
            else RetryPolicy(attempts, max_wait_s=FALLBACK_AFTER_S, max_total_s=FALLBACK_AFTER_S)
        )
        model = OpenAIModel.at(stored.name, stored.endpoint, key, self._settings.model_timeout_s, retries)
        model.limits = SharedLimits(self._redis, self._settings.deployment, stored.id, stored.endpoint)
        return EndpointClient(stored.endpoint, key, model, model.limits)


def refuse_model(tenant: str, name: str) -> ToolFailure:
    """Return the error for a model that the policy of the tenant does not allow."""
    return ToolFailure(
        ErrorCode.PERMISSION_DENIED,
        f"tenant {tenant} may not use the model {name}: name another one (GET /v1/models, `toolcrew models list`), or "
        "ask the operator to allow it in the policy of the tenant",
    )


CheckModel = Callable[[str, str], Awaitable[None]]
"""Checks the model that a run of a tenant names, before the run is queued. Raises ToolFailure."""


async def accept_model(_tenant: str, _name: str) -> None:
    """Accept every model: the check of a process that does not know the models of the orchestrators."""


class ModelNames:
    """The names of models that runs of the tenants may use in the processes with these settings.

    `serves`: returns whether these processes can use a model for which no endpoint is configured.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        endpoints: ModelEndpoints,
        tenants: RedisTenants,
        serves: Callable[[str], bool] | None = None,
    ) -> None:
        self._default = settings.model
        self._endpoints = endpoints
        self._tenants = tenants
        self._serves = serves or partial(serves_model, settings)

    async def check(self, tenant: str, name: str) -> None:
        """Raise ToolFailure(INVALID_ARGUMENTS) with the nearest names if no model has this name for the tenant.

        Raises BrokerUnavailable when Redis does not answer.
        """
        known = await self._endpoints.of(tenant)
        if name in known or self._serves(name):
            return
        policy = await self._tenants.policy(tenant)
        default = {self._default} if self._default is not None and self._serves(self._default) else set[str]()
        names = [known_name for known_name in {*known, *default} if policy.allows_model(known_name)]
        raise _unknown_model(name, find_nearest(name, names))


def _unknown_model(name: str, nearest: list[str]) -> ToolFailure:
    """Return the error for a name that no model has. `nearest`: the names that are most similar to it, best first."""
    advice = f"use {' or '.join(nearest)}" if nearest else "no model endpoint is set: ask the operator to add one"
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"there is no model '{name}': {advice}, or name no model to use the default. GET /v1/models (`toolcrew models "
        "list`) lists the models",
        nearest=nearest,
    )


class EndpointModel:
    """A configured endpoint for one run of a tenant. A change of the endpoint or of the tenant's policy is in force
    from the next request on.

    Another endpoint answers, its fallback, if the endpoint has answered no attempt for FALLBACK_AFTER_S or its rate
    limit requests a longer wait. The run gets a notice of each such request.
    """

    def __init__(self, clients: EndpointClients, tenant: str, stored: StoredEndpoint, falls_back: bool = True) -> None:
        self._clients = clients
        self._tenant = tenant
        self._stored = stored
        self._falls_back = falls_back

    @property
    def name(self) -> str:
        return self._stored.endpoint.model

    @property
    def address(self) -> str:
        return self._stored.endpoint.base_url

    async def describe(self) -> ModelFacts | None:
        """Return what the endpoint's list of models says about the model, such as its context window."""
        async with self._clients.use(self._stored) as client:
            return await client.model.describe()

    def without_fallback(self) -> Model:
        """Return a model that never uses the fallback. The test of the endpoint's capabilities needs this, because
        those of the fallback may differ.
        """
        return EndpointModel(self._clients, self._tenant, self._stored, falls_back=False)

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """Yield the reply, with its cost in its usage if the endpoint has prices.

        Raises the same errors as OpenAIModel.stream. Raises ToolFailure(PERMISSION_DENIED): the policy does not allow
        the endpoint. Raises ConfigError: the endpoint or its secret was removed.
        """
        name = self._stored.name
        await self._clients.check(self._tenant, name)
        for _ in range(MAX_FALLBACKS + 1):
            stored = await self._clients.find(self._tenant, name)
            if stored is None:
                raise ConfigError(f"the model endpoint {name} was removed: name another model")
            async with self._clients.use(stored) as client:
                requested_at, has_started = time.monotonic(), False
                try:
                    async for chunk in client.model.stream(request):
                        client.answered_at, has_started = time.monotonic(), True
                        yield _with_cost(chunk, stored.endpoint)
                    return
                except ModelUnavailable as error:
                    fallback = await self._find_fallback(stored, error) if not has_started else None
                    if fallback is None:
                        raise
                    # If the endpoint has answered other requests since this one, it is not down: the cause may be the
                    # request.
                    if not isinstance(error, ModelBlocked) and client.answered_at < requested_at:
                        await client.limits.block(DOWN_S, "down")
                    notify(f"{error}; the model endpoint {fallback} answers instead")
            name = fallback
        raise ConfigError(f"the fallbacks of the model endpoint {self._stored.name} form a loop: change them")

    async def _find_fallback(self, stored: StoredEndpoint, error: ModelUnavailable) -> str | None:
        """Return the fallback that must answer the request; None if the error must be raised."""
        fallback = stored.endpoint.fallback
        if not self._falls_back or fallback is None or type(error) not in (ModelUnavailable, ModelBlocked):
            return None
        return fallback if await self._clients.allows(self._tenant, fallback) else None

    async def aclose(self) -> None:
        """Do nothing: EndpointClients closes its endpoints."""


def _with_cost(chunk: Chunk, endpoint: ModelEndpoint) -> Chunk:
    """Return the chunk with the cost of the reply next to its tokens. Routers use the same field for their own cost."""
    usage = read_usage(chunk)
    cost = endpoint.cost_of(usage) if usage is not None else None
    return chunk if cost is None else {**chunk, "usage": {**chunk["usage"], "cost": cost}}
