"""The models that runs of this process use, opened once each."""

import asyncio
from contextlib import AsyncExitStack

from orchestrator.dialects.model import Model
from orchestrator.models.choice import ChosenModel, choose_model
from orchestrator.settings import OrchestratorSettings


class Models:
    """By name. An async context manager: at its end all are closed. `given`: what is used instead of the one that
    nobody names.
    """

    def __init__(self, settings: OrchestratorSettings, given: Model | ChosenModel | None = None) -> None:
        self._settings = settings
        self._given = given
        self._open: dict[str | None, tuple[ChosenModel, AsyncExitStack]] = {}
        self._opening = asyncio.Lock()

    async def get(self, name: str | None) -> ChosenModel:
        """The model of that name; None: as the environment says. Raises ConfigError, ModelUnavailable."""
        if name not in self._open:
            async with self._opening:
                if name not in self._open:
                    asked = self._given if name is None and self._given is not None else name
                    stack = AsyncExitStack()
                    self._open[name] = await stack.enter_async_context(choose_model(self._settings, asked)), stack
        return self._open[name][0]

    @property
    def names(self) -> set[str | None]:
        """Of those that are open."""
        return set(self._open)

    async def close(self, name: str | None) -> None:
        """Close one that no run uses. Whoever asks for it later has it opened again."""
        opened = self._open.pop(name, None)
        if opened is not None:
            await opened[1].aclose()

    async def __aenter__(self) -> "Models":
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._open):
            await self.close(name)
