"""containerd as the engine of a host, such as a node of Kubernetes: images, volumes and facts without Docker.

containerd keeps the images (CRI, namespace `k8s.io`), and sandboxd starts the sandboxes itself (oci.py). The layers of
an image in use are held by a lease of containerd. What containerd does not know is in folders of sandboxd: the guest
and the skills.
"""

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import advise_missing
from toolcrew.workers.sandboxd.cgroups import ROOT, Cgroups
from toolcrew.workers.sandboxd.disks.mounts import ROOTS, mount_overlay, open_below, run_in_private_namespace
from toolcrew.workers.sandboxd.runtime.accounts import complete_accounts, read_file
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEPLOYMENT, LABEL_PRODUCT, PRODUCT_PIN, ListedContainer
from toolcrew.workers.sandboxd.runtime.containerd import KUBERNETES, SNAPSHOTTER, Containerd
from toolcrew.workers.sandboxd.runtime.containerd_images import StoredImage, find_stored
from toolcrew.workers.sandboxd.runtime.engine import EngineFacts
from toolcrew.workers.sandboxd.runtime.folder_volumes import FolderVolumes
from toolcrew.workers.sandboxd.runtime.hardening import GUEST_FOLDER, ImageFacts
from toolcrew.workers.sandboxd.runtime.image_faults import explain_unfit

_READ_S: Final = 600
"""Seconds after which containerd itself ends the protection of layers that a killed process was reading."""
_LABEL_EXPIRE: Final = "containerd.io/gc.expire"
T = TypeVar("T")


class ContainerdEngine:
    """The same operations as those of the Docker engine (engines.py), without containers. `state`: the folder of
    sandboxd's files. Raises SandboxUnavailable.
    """

    def __init__(self, address: str, state: Path) -> None:
        self.containerd = Containerd(address, KUBERNETES)
        self._volumes = FolderVolumes(state / "volumes")
        self._guests: dict[str, str] = {}
        self._filling = asyncio.Lock()

    async def facts(self) -> EngineFacts:
        """Return version and folders of containerd, and what the kernel of this host supports."""
        return await asyncio.to_thread(_read_facts, self.containerd, self._volumes.folder)

    async def image_id(self, image: str) -> str | None:
        """Return the image's content id, or None when containerd does not have it."""
        stored = await asyncio.to_thread(find_stored, self.containerd, image)
        return None if stored is None else stored.id

    async def find_image(self, image: str) -> ImageFacts:
        """Return the description of an image; an empty one when containerd does not have it. Raises SandboxUnavailable
        for an image whose settings would weaken the profile.
        """
        return await asyncio.to_thread(self._find_image, image)

    async def pin(self, name: str, image: str, labels: Mapping[str, str], volumes: Mapping[str, str]) -> None:
        """Protect the layers of an image. The volumes need no protection, because only this process removes them."""
        await asyncio.to_thread(self._hold, name, image, {**labels, LABEL_PRODUCT: PRODUCT_PIN})

    async def remove(self, container: str) -> None:
        """Remove a pin. A missing one is ignored."""
        await asyncio.to_thread(self.containerd.release, container)

    async def list_containers(self, deployment: str, product: str) -> list[ListedContainer]:
        """Return the pins of a deployment."""
        labels = {LABEL_PRODUCT: product, LABEL_DEPLOYMENT: deployment}
        held = await asyncio.to_thread(self.containerd.list_held, labels)
        return [ListedContainer(name, name, "created", found, created_at) for name, found, created_at in held]

    async def volume_path(self, volume: str) -> str:
        """Return the folder of a volume on this host."""
        return str(self._volumes.path(volume))

    async def ensure_guest_volume(self, image: str) -> str:
        """Return the name of a volume with the toolkit of that toolcrew image. Copies it if needed."""
        async with self._filling:
            return await asyncio.to_thread(self._copy_guest, image)

    async def make_skill_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Create an empty volume for skills."""
        await asyncio.to_thread(self._volumes.make, name)

    async def fill_skill_volume(self, name: str, image: str, archive: IO[bytes]) -> None:
        """Unpack a tar archive into the volume."""
        await asyncio.to_thread(self._volumes.unpack, name, archive)

    async def list_skill_volumes(self, label: str) -> Mapping[str, Mapping[str, str]]:
        """Return nothing: the volumes of dead processes are removed without their names."""
        return {}

    async def remove_skill_volume(self, name: str) -> None:
        """Remove a volume. A missing volume is ignored."""
        await asyncio.to_thread(self._volumes.remove, name)

    def describe(self) -> dict[str, Any]:
        """Return nothing: calls of containerd have a time limit each, and no queue."""
        return {}

    def close(self) -> None:
        """Remove the volumes of this process."""
        self._volumes.close()

    def _find_image(self, image: str) -> ImageFacts:
        stored = find_stored(self.containerd, image)
        if stored is None:
            return ImageFacts()
        fault = explain_unfit({"Architecture": stored.architecture, "Config": {"Volumes": stored.volumes}}, image)
        if fault is not None:
            raise SandboxUnavailable(fault)
        with self._reading(stored) as layers:
            accounts = _in_layers(layers, lambda root: complete_accounts(partial(read_file, root)))
            return ImageFacts(stored.id, stored.variables, layers, accounts)

    def _hold(self, name: str, image: str, labels: Mapping[str, str]) -> None:
        stored = find_stored(self.containerd, image)
        if stored is None:
            raise SandboxUnavailable(f"the engine has no image {image}: {advise_missing(image)}")
        self.containerd.hold(name, stored.chains[-1], len(stored.chains), labels)

    @contextmanager
    def _reading(self, image: StoredImage) -> Iterator[tuple[str, ...]]:
        """Protect the layers of an image inside the block. Yield their folders."""
        name = f"toolcrew-read-{secrets.token_hex(8)}"
        expire = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _READ_S))
        layers = self.containerd.hold(name, image.chains[-1], len(image.chains), {_LABEL_EXPIRE: expire})
        try:
            yield layers
        finally:
            self.containerd.release(name)

    def _copy_guest(self, image: str) -> str:
        stored = find_stored(self.containerd, image)
        if stored is None:
            raise SandboxUnavailable(
                f"the engine has no image {image}, from which other images get the guest: {advise_missing(image)}"
            )
        if stored.id not in self._guests:
            name = f"guest-{secrets.token_hex(8)}"
            with self._reading(stored) as layers:
                target = self._volumes.make(name)
                _in_layers(layers, lambda root: _copy(root, image, target), target)
            self._guests[stored.id] = name
        return self._guests[stored.id]


def _copy(root: int, image: str, target: Path) -> None:
    """Copy the toolkit of an image, so that its files belong to root."""
    try:
        source = open_below(root, GUEST_FOLDER)
    except OSError as error:
        raise SandboxUnavailable(
            f"the image {image} has nothing in {GUEST_FOLDER}: build it again with scripts/build-image"
        ) from error
    try:
        shutil.copytree(f"/proc/self/fd/{source}", target, symlinks=True, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise SandboxUnavailable(f"the guest of {image} cannot be copied to {target}: {str(error)[:500]}") from error
    finally:
        os.close(source)


def _in_layers(layers: Sequence[str], work: Callable[[int], T], *needed: Path) -> T:
    """Return the result of `work` with a descriptor of the merged layers of an image. It runs in a mount namespace of
    its own, so that a killed process leaves no mount. There it sees only the `needed` folders.
    """

    def run() -> T:
        # An overlay needs two layers.
        empty = ROOTS / "empty"
        empty.mkdir()
        root = mount_overlay([*layers, str(empty)], None)
        try:
            return work(root)
        finally:
            os.close(root)

    try:
        return run_in_private_namespace(run, [Path(layers[0]), *needed])
    except OSError as error:
        raise SandboxUnavailable(
            f"the layers of an image cannot be read: {error}; run sandboxd as root, with containerd's folder at the "
            "same path as on the host"
        ) from error


def _read_facts(containerd: Containerd, volumes: Path) -> EngineFacts:
    groups = Cgroups()
    if groups.version == 2:
        controllers = set((ROOT / "cgroup.controllers").read_text(encoding="ascii").split())
        has_swap = "memory" in controllers
    else:
        controllers = {folder.name for folder in ROOT.iterdir()}
        has_swap = (ROOT / "memory" / "memory.memsw.limit_in_bytes").exists()
    return EngineFacts(
        version=containerd.find_version(),
        product="containerd",
        cgroup_version=groups.version,
        seccomp=Path("/proc/sys/kernel/seccomp/actions_avail").exists(),
        runtimes=("runc",),
        kernel=os.uname().release,
        storage_driver=SNAPSHOTTER,
        data_root=str(volumes),
        layer_root=containerd.find_root(),
        containerd=containerd.address,
        has_memory_limit="memory" in controllers,
        has_swap_limit=has_swap,
        has_pids_limit="pids" in controllers,
    )
