"""Images of containerd, through the image service that the kubelet uses too (CRI): find, list, pull and remove them.

containerd's own services could pull only with a client that speaks to the registry itself (Transfer exists since
containerd 1.7). CRI does it inside containerd, with the mirrors and certificates of the node.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from toolcrew.concurrency.tasks import in_thread
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import ImageName
from toolcrew.workers.sandboxd.runtime.containerd import MAX_LIST_BYTES, Containerd, ContainerdRefused
from toolcrew.workers.sandboxd.runtime.engine_images import (
    PULL_S,
    EngineImage,
    PullFailed,
    PullProgress,
    RegistryAccount,
)

_IMAGES: Final = "runtime.v1.ImageService"
_MAX_LAYERS: Final = 1000


@dataclass(frozen=True)
class StoredImage:
    """What the configuration of an image says. `chains`: the chain ids of its layers, that of the top one last."""

    id: str
    architecture: str
    variables: tuple[str, ...]
    volumes: tuple[str, ...]
    chains: tuple[str, ...]


def find_stored(containerd: Containerd, name: str) -> StoredImage | None:
    """Return the image of a name or content id; None when containerd does not have it. Raises SandboxUnavailable."""
    try:
        reply = containerd.call(f"{_IMAGES}/ImageStatus", {"image": {"image": name}, "verbose": True})
        if not reply.HasField("image"):
            return None
        info = next((entry.value for entry in reply.info if entry.key == "info"), "")
        return _parse(reply.image.id, json.loads(info)["imageSpec"])
    except ContainerdRefused as error:
        if error.status != "RESOURCE_EXHAUSTED":
            raise
        fault = "it is too large"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fault = str(error)[:200]
    raise SandboxUnavailable(
        f"image {name} cannot be a sandbox: its configuration cannot be read ({fault}); build it again"
    )


def _parse(image_id: str, spec: Any) -> StoredImage:
    """Return an image from its configuration, which is foreign data. Raises ValueError, LookupError, TypeError and
    AttributeError.
    """
    config, digests = spec.get("config") or {}, spec["rootfs"]["diff_ids"]
    variables, volumes = config.get("Env") or [], config.get("Volumes") or {}
    if not 0 < len(digests) <= _MAX_LAYERS or not all(
        isinstance(text, str) for text in (*digests, *variables, *volumes)
    ):
        raise ValueError("it has no list of layers")
    chains = digests[:1]
    for digest in digests[1:]:
        chains.append("sha256:" + hashlib.sha256(f"{chains[-1]} {digest}".encode()).hexdigest())
    built_for = str(spec.get("architecture") or "")
    return StoredImage(image_id, built_for, tuple(variables), tuple(volumes), tuple(chains))


def _build(image: Any) -> EngineImage:
    return EngineImage(image.id, tuple(image.repo_tags), tuple(image.repo_digests), int(image.size))


class ContainerdImages:
    """Finds, lists, pulls and removes images. Raises SandboxUnavailable with containerd's error text."""

    def __init__(self, containerd: Containerd) -> None:
        self._containerd = containerd
        self._unpacked: dict[str, int] = {}
        """Content id -> bytes of the unpacked layers."""

    async def find(self, name: str) -> EngineImage | None:
        """Return the image of a complete name or a content id; None when containerd does not have it."""
        return await asyncio.to_thread(self._find, name)

    async def list(self) -> Sequence[EngineImage]:
        """Return all images."""
        return await asyncio.to_thread(self._list)

    async def used(self) -> frozenset[str]:
        """Return the content ids of the images of all containers of pods, in any state."""
        return await asyncio.to_thread(self._list_used)

    async def remove(self, name: str) -> bool:
        """Remove an image with all of its names. Returns False when a container of a pod uses it."""
        return await asyncio.to_thread(self._remove, name)

    async def pull(self, name: ImageName, account: RegistryAccount | None, progress: PullProgress) -> None:
        """Pull an image. Raises PullFailed. The pull continues when the caller is cancelled; `progress.stop` ends
        it.
        """
        await in_thread(lambda: self._pull(name.full, account, progress), "image-pull")

    async def check_access(self, name: ImageName, account: RegistryAccount | None) -> None:
        """Ask the registry whether it lets the account read an image that containerd has. Raises PullFailed."""
        # A pull asks the registry for the manifest, and then fetches only what is missing. By its digest, the name of
        # the image cannot move to other content.
        image = await self.find(name.full)
        repository = f"{name.registry}/{name.repository}@"
        digest = next((text for text in image.digests if text.startswith(repository)), None) if image else None
        if digest is None:
            raise PullFailed(f"{name.short} has no digest: remove the image from containerd, and try again")
        await in_thread(lambda: self._pull(digest, account, PullProgress()), "image-check")

    def _find(self, name: str) -> EngineImage | None:
        reply = self._containerd.call(f"{_IMAGES}/ImageStatus", {"image": {"image": name}})
        return self._measure(_build(reply.image)) if reply.HasField("image") else None

    def _list(self) -> Sequence[EngineImage]:
        reply = self._containerd.call(f"{_IMAGES}/ListImages", max_bytes=MAX_LIST_BYTES)
        images = [_build(image) for image in reply.images]
        present = {image.id for image in images}
        self._unpacked = {image: size for image, size in self._unpacked.items() if image in present}
        return [self._measure(image) for image in images]

    def _measure(self, image: EngineImage) -> EngineImage:
        """Add the size of the unpacked layers. CRI counts only the layers as they were downloaded."""
        if image.id not in self._unpacked:
            try:
                stored = find_stored(self._containerd, image.id)
            except ContainerdRefused:
                raise
            except SandboxUnavailable:
                stored = None  # no sandbox can have this image, and it must be possible to remove it
            self._unpacked[image.id] = sum(map(self._containerd.measure, stored.chains)) if stored else 0
        return replace(image, size_bytes=image.size_bytes + self._unpacked[image.id])

    def _list_used(self) -> frozenset[str]:
        reply = self._containerd.call("runtime.v1.RuntimeService/ListContainers", max_bytes=MAX_LIST_BYTES)
        return frozenset(
            name for container in reply.containers for name in (container.image_ref, container.image_id) if name
        )

    def _remove(self, name: str) -> bool:
        image = self._find(name)
        if image is not None and image.id in self._list_used():
            return False
        self._containerd.call(f"{_IMAGES}/RemoveImage", {"image": {"image": name}})
        return True

    def _pull(self, name: str, account: RegistryAccount | None, progress: PullProgress) -> None:
        login = {} if account is None else {"auth": {"username": account.user, "password": account.password}}
        request = {"image": {"image": name}, **login}
        try:
            self._containerd.call(
                f"{_IMAGES}/PullImage", request, timeout_s=PULL_S, is_stopped=lambda: progress.is_stopped
            )
        except ContainerdRefused as error:
            raise PullFailed(error.reason) from error
