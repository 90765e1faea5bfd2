"""Models that runs of this process use. Each model is opened once."""

import asyncio
from contextlib import AsyncExitStack

from orchestrator.dialects.model import Model
from orchestrator.models.choice import ChosenModel, choose_model
from orchestrator.settings import OrchestratorSettings


class Models:
    """Open models by name. An async context manager that closes all models on exit.

    `default`: model of runs that name no model, in place of the model of the environment.
    """

    def __init__(self, settings: OrchestratorSettings, default: Model | ChosenModel | None = None) -> None:
        self._settings = settings
        self._default = default
        self._open: dict[str | None, tuple[ChosenModel, AsyncExitStack]] = {}
        self._opening = asyncio.Lock()

    async def get(self, name: str | None) -> ChosenModel:
        """Return the model of that name; None: the default model. Raises ConfigError, ModelUnavailable."""
        if name not in self._open:
            async with self._opening:
                if name not in self._open:
                    source = self._default if name is None and self._default is not None else name
                    stack = AsyncExitStack()
                    self._open[name] = await stack.enter_async_context(choose_model(self._settings, source)), stack
        return self._open[name][0]

    @property
    def names(self) -> set[str | None]:
        """Return the names of the open models."""
        return set(self._open)

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
