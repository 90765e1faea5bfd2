"""The models that runs of this process use. Each model is opened once and shared."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.dialects.model import Model
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.models.choice import LOCAL, ChosenModel, choose_model
from toolcrew.orchestrator.runs.endpoints import EndpointClients, EndpointModel

MAX_IDLE_MODELS = 8
"""Maximum number of open models of a service that no run uses now. Each model has its own connections, and tenants may
name any number of models.
"""


class Models:
    """Open models by name. An async context manager that closes all models on exit.

    `default`: model of runs that name no model, in place of the model of the environment. `is_service`: the runs belong
    to tenants, who cannot change the settings of this process.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: PoolConnection,
        default: Model | ChosenModel | None = None,
        *,
        is_service: bool = False,
    ) -> None:
        self._settings = settings
        self._default = default
        self._is_service = is_service
        self._clients = EndpointClients(settings, pool.redis, pool.keys, pool.tenants)
        self._open: dict[str | None, tuple[ChosenModel, AsyncExitStack]] = {}
        self._opening = asyncio.Lock()
        self._users: dict[str, int] = {}
        """Number of runs that use each model, by name. The least recently used name is first."""

    async def get(self, tenant: str, name: str | None) -> ChosenModel:
        """Return the model that a run of the tenant uses for `name`: the configured endpoint of that name, or else the
        model of that name at the endpoint that the environment variables set. None: the default model.

        Raises ConfigError, ModelUnavailable. Raises ToolFailure(PERMISSION_DENIED): the tenant's policy does not allow
        the model. Raises ToolFailure(INVALID_ARGUMENTS) in a service: there is no such model.
        """
        if name is None and self._default is not None:
            return await self._get(None)
        requested = name or self._settings.model
        await self._clients.check(tenant, requested or LOCAL)
        stored = await self._clients.find(tenant, requested) if requested is not None else None
        if stored is None:
            if self._is_service and name is not None:
                await self._clients.check_name(tenant, name)
            return await self._get(name)
        return ChosenModel(
            EndpointModel(self._clients, tenant, stored),
            endpoint=stored.id,
            prices=stored.endpoint.prices,
            context_tokens=stored.endpoint.context_tokens,
        )

    async def _get(self, name: str | None) -> ChosenModel:
        if name not in self._open:
            async with self._opening:
                if name not in self._open:
                    source = self._default if name is None and self._default is not None else name
                    stack = AsyncExitStack()
                    chosen = choose_model(self._settings, source, open_limits=self._clients.open_limits)
                    self._open[name] = await stack.enter_async_context(chosen), stack
        return self._open[name][0]

    @property
    def names(self) -> set[str | None]:
        """Return the names of the open models at the endpoint that the environment variables set; None: the default
        model.
        """
        return set(self._open)

    @asynccontextmanager
    async def use(self, model: str | None) -> AsyncIterator[None]:
        """Context manager around a run that uses the model of its line or batch. Afterwards it closes the least
        recently used models that no run uses. None: the default model, which stays open.
        """
        if model is None:
            yield
            return
        self._users[model] = self._users.pop(model, 0) + 1
        try:
            yield
        finally:
            self._users[model] -= 1
            idle = [name for name, users in self._users.items() if users == 0]
            for name in idle[: max(0, len(idle) - MAX_IDLE_MODELS)]:
                del self._users[name]
                await self.close(name)

    async def close(self, name: str | None) -> None:
        """Close a model that no run uses. A later `get` opens the model again."""
        opened = self._open.pop(name, None)
        if opened is not None:
            await opened[1].aclose()

    async def __aenter__(self) -> "Models":
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._open):
            await self.close(name)
        await self._clients.aclose()
