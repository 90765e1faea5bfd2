"""The engine of a host, which keeps images: the Docker engine, or containerd on nodes without Docker."""

from collections.abc import Mapping
from typing import IO, Any, Protocol, cast

import structlog
from docker.utils import kwargs_from_env

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.workers.sandboxd.runtime.base import ListedContainer, SandboxRuntime
from toolcrew.workers.sandboxd.runtime.containerd import DEFAULT_ADDRESS, Containerd
from toolcrew.workers.sandboxd.runtime.containerd_engine import ContainerdEngine
from toolcrew.workers.sandboxd.runtime.containerd_images import ContainerdImages
from toolcrew.workers.sandboxd.runtime.engine import Engine, EngineFacts
from toolcrew.workers.sandboxd.runtime.engine_images import EngineImages
from toolcrew.workers.sandboxd.runtime.engine_runtime import EngineRuntime
from toolcrew.workers.sandboxd.runtime.hardening import ImageFacts

log = structlog.get_logger(__name__)


class ContainerEngine(Protocol):
    """What sandboxd needs of an engine to start sandboxes itself. All methods raise SandboxUnavailable."""

    async def facts(self) -> EngineFacts: ...

    async def image_id(self, image: str) -> str | None: ...

    async def find_image(self, image: str) -> ImageFacts: ...

    async def pin(self, name: str, image: str, labels: Mapping[str, str], volumes: Mapping[str, str]) -> None:
        """Protect an image and volumes from removal, until `remove` with the same name."""
        ...

    async def remove(self, container: str) -> None: ...

    async def list_containers(self, deployment: str, product: str) -> list[ListedContainer]: ...

    async def volume_path(self, volume: str) -> str: ...

    async def ensure_guest_volume(self, image: str) -> str: ...

    async def make_skill_volume(self, name: str, labels: Mapping[str, str]) -> None: ...

    async def fill_skill_volume(self, name: str, image: str, archive: IO[bytes]) -> None: ...

    async def list_skill_volumes(self, label: str) -> Mapping[str, Mapping[str, str]]: ...

    async def remove_skill_volume(self, name: str) -> None: ...

    def describe(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


async def open_engine(settings: SandboxdSettings) -> ContainerEngine:
    """Return the containerd of the settings. Without one, return the Docker engine; or the containerd of a Kubernetes
    node, if DOCKER_HOST is not set, no Docker engine answers, and this containerd does. Does not raise.
    """
    if settings.containerd_socket is not None:
        return ContainerdEngine(str(settings.containerd_socket), settings.state())
    engine = Engine()
    if "base_url" in kwargs_from_env() or not Containerd(DEFAULT_ADDRESS).is_reachable:
        return engine
    try:
        await engine.facts()
    except SandboxUnavailable as error:
        containerd = ContainerdEngine(DEFAULT_ADDRESS, settings.state())
        try:
            await containerd.image_id(settings.sandbox_image)
        except SandboxUnavailable:
            return engine
        engine.close()
        log.warning("containerd_used", reason=str(error))
        return containerd
    return engine


def open_images(engine: ContainerEngine) -> ContainerdImages | EngineImages:
    """Return the operations on images of an engine."""
    if isinstance(engine, ContainerdEngine):
        return ContainerdImages(engine.containerd)
    return EngineImages(cast(Engine, engine))


def open_runtime(engine: ContainerEngine) -> SandboxRuntime | None:
    """Return the runtime with which the engine itself starts sandboxes; None: it starts none."""
    return None if isinstance(engine, ContainerdEngine) else EngineRuntime(cast(Engine, engine))
