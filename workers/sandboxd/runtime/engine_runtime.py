"""Sandboxes that the Docker engine starts."""

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime.base import AttachedContainer, ListedContainer
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.hardening import (
    SandboxSpec,
    build_container_config,
    find_drift,
    image_variables,
)
from toolcrew.workers.sandboxd.runtime.image_faults import check_variables


class EngineRuntime:
    """A sandbox runtime over the engine's API (runtime/base.py)."""

    stacks_layers = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.pause = engine.pause
        self.unpause = engine.unpause
        self.remove = engine.remove

    async def start(self, spec: SandboxSpec, name: str) -> AttachedContainer:
        if spec.workspace.layers:
            raise SandboxUnavailable(
                "the Docker engine cannot start a forked session: run sandboxd with TOOLCREW_SANDBOX_START=oci"
            )
        check_variables(image_variables(spec), spec.image)
        return await self._engine.start(await self._build_config(spec), name)

    async def find_drift(self, container: str, spec: SandboxSpec) -> list[str]:
        config = await self._build_config(spec)
        return find_drift(config, await self._engine.inspect(container), spec.image_facts.variables)

    def open_changes(self, container: str, spec: SandboxSpec) -> None:
        """Return None: the root file system is read-only."""

    async def list_sandboxes(self, deployment: str) -> list[ListedContainer]:
        return await self._engine.list_containers(deployment)

    async def _build_config(self, spec: SandboxSpec) -> dict[str, object]:
        accounts = spec.image_facts.accounts
        volume = await self._engine.ensure_account_volume(spec.image, accounts) if accounts else None
        return build_container_config(spec, volume)
