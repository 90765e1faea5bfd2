"""The models that runs of this process use, opened once each."""

import asyncio
from contextlib import AsyncExitStack

from orchestrator.models.base import Model
from orchestrator.models.choice import ChosenModel, choose_model
from orchestrator.settings import OrchestratorSettings


class Models:
    """By name. An async context manager: at its end all are closed. `given`: what is used instead of the one that nobody names."""

    def __init__(self, settings: OrchestratorSettings, given: Model | ChosenModel | None = None) -> None:
        self._settings = settings
        self._given = given
        self._open: dict[str | None, ChosenModel] = {}
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()

    async def get(self, name: str | None) -> ChosenModel:
        """The model of that name; None: as the environment says. Raises ConfigError, ModelUnavailable."""
        if name not in self._open:
            async with self._opening:
                if name not in self._open:
                    asked = self._given if name is None and self._given is not None else name
                    self._open[name] = await self._stack.enter_async_context(choose_model(self._settings, asked))
        return self._open[name]

    async def __aenter__(self) -> "Models":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
