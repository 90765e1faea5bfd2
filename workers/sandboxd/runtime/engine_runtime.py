"""Sandboxes that the Docker engine starts."""

from contract.errors import SandboxUnavailable
from workers.sandboxd.runtime.base import AttachedContainer, ListedContainer
from workers.sandboxd.runtime.engine import Engine
from workers.sandboxd.runtime.hardening import SandboxSpec, build_container_config, find_drift


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
        return await self._engine.start(build_container_config(spec), name)

    async def find_drift(self, container: str, spec: SandboxSpec) -> list[str]:
        return find_drift(
            build_container_config(spec), await self._engine.inspect(container), spec.image_facts.variables
        )

    def open_changes(self, container: str, spec: SandboxSpec) -> None:
        """Return None: the root file system is read-only."""

    async def list_sandboxes(self, deployment: str) -> list[ListedContainer]:
        return await self._engine.list_containers(deployment)
