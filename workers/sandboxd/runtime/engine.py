"""The container engine through its SDK. Every call goes through EngineGate (engine_gate.py) and has a time limit.

A start that the engine does not answer may still create a container later. So the container's name is remembered, and
the container is removed when it appears. The name was recorded on disk before the call, so this also works after kill
-9.
"""

import asyncio
import contextlib
import math
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final, TypeVar

import docker
import docker.errors
import requests.exceptions
import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import advise_missing
from toolcrew.workers.sandboxd.runtime.accounts import read_accounts
from toolcrew.workers.sandboxd.runtime.base import (
    LABEL_DEPLOYMENT,
    LABEL_PRODUCT,
    PRODUCT,
    PRODUCT_PIN,
    AttachedContainer,
    ListedContainer,
)
from toolcrew.workers.sandboxd.runtime.containerd import (
    DEFAULT_ADDRESS,
    SNAPSHOTTER,
    SNAPSHOTTER_TYPE,
    Containerd,
)
from toolcrew.workers.sandboxd.runtime.engine_gate import LANES, EngineCallKinds, EngineGate, EngineSilent, Lane
from toolcrew.workers.sandboxd.runtime.hardening import AccountFiles, AccountVolume, ImageFacts
from toolcrew.workers.sandboxd.runtime.image_faults import explain_unfit
from toolcrew.workers.sandboxd.runtime.volumes import (
    PRODUCT_GUEST,
    AccountVolumes,
    GuestVolumes,
    fill_volume,
    filler,
    list_volumes,
    make_volume,
    remove_old_fillers,
    remove_volume,
)

log = structlog.get_logger(__name__)

PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses before each attempt to remove a late container, in seconds; the last value repeats."""
ABSENT_ENOUGH: Final = 5
"""Number of consecutive attempts that the engine answered and that found no container. After them, the container counts
as never created. A container that appears even later is removed at its deadline.
"""
_REMOVAL_S: Final = 20
"""Time limit of the engine for the removal of a container, in seconds."""
_TIMEOUT_TEXTS: Final = ("timeout", "timed out", "deadline exceeded")
T = TypeVar("T")


class LateContainerRemover:
    """Removes, in the background, containers that appear after their start has failed. `remove`: a function that
    removes the container with a name and returns whether it existed; it may raise SandboxUnavailable.
    """

    def __init__(self, remove: Callable[[str], Awaitable[bool]], pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._remove = remove
        self._pauses_s = pauses_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Return the number of containers that are still searched for."""
        return len(self._tasks)

    def remove_later(self, name: str) -> None:
        """Remove the container when it appears. A running search for this name starts again."""
        if name in self._tasks:
            self._tasks.pop(name).cancel()
        task = asyncio.get_running_loop().create_task(self._find_and_remove(name))
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._drop(name, done))

    def close(self) -> None:
        """End all searches."""
        for task in list(self._tasks.values()):
            task.cancel()

    def _drop(self, name: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _find_and_remove(self, name: str) -> None:
        absent, attempt = 0, 0
        while absent < ABSENT_ENOUGH:
            await asyncio.sleep(self._pauses_s[min(attempt, len(self._pauses_s) - 1)])
            attempt += 1
            try:
                was_there = await self._remove(name)
            except SandboxUnavailable:
                absent = 0
                continue
            if was_there:
                log.info("late_container_removed", container=name)
                return
            absent += 1


@dataclass(frozen=True)
class EngineFacts:
    """The engine's description of itself. `components`: versions by name, such as `runc`; empty when it
    reports none. `product`: `Docker` or `containerd`.
    """

    version: str
    cgroup_version: int
    seccomp: bool
    runtimes: tuple[str, ...]
    kernel: str
    components: Mapping[str, str] = field(default_factory=dict)
    security: frozenset[str] = frozenset()
    """Active security options: a subset of apparmor, selinux, userns, rootless, cgroupns, seccomp."""
    storage_driver: str = ""
    data_root: str = ""
    """The folder where the engine keeps its data, such as /var/lib/docker."""
    layer_root: str = ""
    """The folder below which the layers of images are folders. Empty: the engine keeps them in another way, or in a
    containerd that this process does not reach.
    """
    containerd: str = ""
    """The socket of the containerd that keeps the images. Empty: the engine keeps them itself."""
    has_memory_limit: bool = True
    has_swap_limit: bool = True
    has_pids_limit: bool = True
    product: str = "Docker"


class Engine:
    """Creates, attaches, starts, pauses, inspects and removes containers. Raises SandboxUnavailable with the engine's
    error text, or with the reason why the engine was not called.
    """

    def __init__(self, lanes: EngineCallKinds = LANES, late_pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._lanes = lanes
        self._clients: deque[docker.APIClient] = deque()
        self._volumes = GuestVolumes()
        self._accounts = AccountVolumes()
        self._late_containers = LateContainerRemover(self._remove_by_name, late_pauses_s)
        self.gate = EngineGate(lambda: self._work(lambda api: api.ping(), lanes.probe_s), probe_s=lanes.probe_s)

    async def facts(self) -> EngineFacts:
        """Return version, cgroup version, seccomp and runtimes of the engine."""
        return await self._run(self._lanes.start_check, lambda api: _build_facts(api.info(), api.version()))

    async def image_id(self, image: str) -> str | None:
        """Return the image's content id, or None when the engine does not have it."""
        attributes = await self._run(self._lanes.start_check, lambda api: _find_image(api, image))
        return None if attributes is None else str(attributes["Id"])

    async def find_image(self, image: str) -> ImageFacts:
        """Return the engine's description of an image (ImageFacts); an empty one when the engine does not have the
        image. Raises SandboxUnavailable for an image whose settings would weaken the profile.
        """
        attributes = await self._run(self._lanes.start_check, lambda api: _find_image(api, image)) or {}
        fault = explain_unfit(attributes, image)
        if fault is not None:
            raise SandboxUnavailable(fault)
        facts = _build_image_facts(attributes)
        if not facts.id:
            return facts
        layers = len((attributes.get("RootFS") or {}).get("Layers") or ())
        return await self._run(self._lanes.fills, lambda api: _read_content(api, facts, layers))

    async def volume_path(self, volume: str) -> str:
        """Return the folder of a volume on this host."""
        return await self._run(self._lanes.start_check, lambda api: str(api.inspect_volume(volume)["Mountpoint"]))

    async def start(self, config: Mapping[str, Any], name: str) -> AttachedContainer:
        """Create a container from a raw configuration, attach to it, and start it.

        After a failure nothing remains: the container is removed at once if the engine has refused, and when the engine
        answers again if it did not answer.
        """
        begun = threading.Event()

        def work(api: docker.APIClient) -> AttachedContainer:
            begun.set()
            return _create_attach_start(api, dict(config), name)

        def late(container: AttachedContainer) -> None:
            container.sock.close()
            self._late_containers.remove_later(name)

        try:
            return await self._run(self._lanes.starts, work, late)
        except (EngineSilent, asyncio.CancelledError):
            if begun.is_set():
                self._late_containers.remove_later(name)
            raise
        except SandboxUnavailable:
            if begun.is_set():
                await self._remove_refused(name)
            raise

    async def open_program(self, container: str, command: Sequence[str]) -> socket.socket:
        """Start another program in a container. Return the socket to its stdin and its multiplexed stdout."""

        def work(api: docker.APIClient) -> socket.socket:
            program = api.exec_create(container, list(command), stdin=True, stderr=False)
            return _duplicate(api.exec_start(program["Id"], socket=True))

        return await self._run(self._lanes.starts, work, socket.socket.close)

    async def inspect(self, container: str) -> dict[str, Any]:
        """Return the engine's description of a container."""
        return await self._run(self._lanes.start_check, lambda api: dict(api.inspect_container(container)))

    async def pause(self, container: str) -> None:
        """Freeze all processes of a container. A frozen container is not changed. Raises SandboxUnavailable when the
        container does not exist or does not run.
        """
        await self._run(self._lanes.freezes, lambda api: _freeze(api, container, is_wanted=True))

    async def unpause(self, container: str) -> None:
        """Thaw a container. A running container is not changed. Raises SandboxUnavailable when the container does
        not exist or does not run.
        """
        await self._run(self._lanes.freezes, lambda api: _freeze(api, container, is_wanted=False))

    async def remove(self, container: str) -> None:
        """Kill and remove a container, frozen or not, and return when the engine no longer has it. Ignores a container
        that does not exist.
        """
        await self._remove_by_name(container)

    async def list_containers(self, deployment: str, product: str = PRODUCT) -> list[ListedContainer]:
        """Return all containers of that product and deployment, in any state, of any sandboxd."""
        filters = {"label": [f"{LABEL_PRODUCT}={product}", f"{LABEL_DEPLOYMENT}={deployment}"]}

        def work(api: docker.APIClient) -> list[ListedContainer]:
            return [_build_listed(container) for container in api.containers(all=True, filters=filters)]

        return await self._run(self._lanes.start_check, work)

    async def pin(self, name: str, image: str, labels: Mapping[str, str], volumes: Mapping[str, str]) -> None:
        """Create a container that is never started. While it exists, the engine refuses to remove the image and the
        volumes. `volumes`: mount point -> name of the volume.
        """
        mounts = [{"Type": "volume", "Source": name, "Target": place} for place, name in volumes.items()]
        config = {
            "Image": image,
            "Cmd": ["pin"],
            "NetworkDisabled": True,
            "Labels": {**labels, LABEL_PRODUCT: PRODUCT_PIN},
            "HostConfig": {
                "NetworkMode": "none",
                "Mounts": [{**mount, "VolumeOptions": {"NoCopy": True}} for mount in mounts],
            },
        }
        await self._run(self._lanes.fills, lambda api: api.create_container_from_config(config, name))  # type: ignore[no-untyped-call]

    async def ensure_guest_volume(self, image: str) -> str:
        """Return the name of a volume with the toolkit of that toolcrew image. Creates and fills the volume if needed.

        Raises SandboxUnavailable when the image is missing or has no guest, and when the volume holds something else
        and is in use.
        """
        return await self._run(self._lanes.fills, lambda api: self._volumes.ensure(api, image))

    async def ensure_account_volume(self, image: str, accounts: AccountFiles) -> AccountVolume:
        """Return a volume with these files. Creates and fills it if needed. `image`: any image of the engine."""
        return await self._run(self._lanes.fills, lambda api: self._accounts.ensure(api, image, accounts))

    async def make_skill_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Create an empty volume for skills."""
        await self._run(self._lanes.fills, lambda api: make_volume(api, name, labels))

    async def fill_skill_volume(self, name: str, image: str, archive: IO[bytes]) -> None:
        """Unpack a tar archive into the volume. `image`: any image of the engine."""
        await self._run(self._lanes.fills, lambda api: fill_volume(api, name, image, archive))

    async def list_skill_volumes(self, label: str) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of all skill volumes with that label (`name=value`), by volume name."""
        return await self._run(self._lanes.start_check, lambda api: list_volumes(api, label))

    async def remove_skill_volume(self, name: str) -> None:
        """Remove a volume. A missing volume is ignored. Raises SandboxUnavailable while a
        container uses the volume.
        """
        await self._run(self._lanes.removals, lambda api: remove_volume(api, name))

    async def run_query(self, work: Callable[[docker.APIClient], T]) -> T:
        """Run a short blocking call that changes nothing, through the gate. Return its result."""
        return await self._run(self._lanes.start_check, work)

    async def run_removal(self, work: Callable[[docker.APIClient], T]) -> T:
        """Run a blocking call that removes something, through the gate. Return its result."""
        return await self._run(self._lanes.removals, work)

    def describe(self) -> dict[str, Any]:
        """Return the state of the engine for `status`: calls in progress and waiting, and the state of the breaker."""
        return {**self.gate.describe(), "late_starts": len(self._late_containers)}

    def close(self) -> None:
        """Close the clients. Running threads end with the process."""
        self._late_containers.close()
        while self._clients:
            self._clients.popleft().close()

    async def _run(
        self, lane: Lane, work: Callable[[docker.APIClient], T], late: Callable[[T], None] | None = None
    ) -> T:
        return await self.gate.run(lane, lambda: self._work(work, lane.deadline_s), late)

    def _work(self, work: Callable[[docker.APIClient], T], timeout_s: float) -> T:
        """Run `work` with a client in the current thread. A single wait on the engine's socket lasts at most
        `timeout_s`.
        """
        try:
            with self._client(timeout_s) as api:
                return work(api)
        except docker.errors.APIError as error:
            message = str(error.explanation or error)
            if error.is_server_error() and any(text in message.lower() for text in _TIMEOUT_TEXTS):
                raise EngineSilent(
                    f"the Docker engine reported an internal timeout: {message}; see its log (`journalctl -u docker`)"
                ) from error
            raise SandboxUnavailable(
                f"the Docker engine refused: {message}; see its log (`journalctl -u docker`)"
            ) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise EngineSilent(
                f"the Docker engine does not answer ({error}): start it, or check DOCKER_HOST and your rights"
            ) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineSilent(
                f"the Docker engine's response cannot be read ({error!r}): set DOCKER_HOST to a Docker engine"
            ) from error

    @contextlib.contextmanager
    def _client(self, timeout_s: float) -> Iterator[docker.APIClient]:
        # One client per call at a time, because a requests session is not guaranteed to be thread-safe. A client is
        # dropped after a transport error.
        try:
            api = self._clients.popleft()
        except IndexError:
            api = docker.from_env(timeout=math.ceil(timeout_s)).api
        api.timeout = math.ceil(timeout_s)
        try:
            yield api
        except (docker.errors.APIError, SandboxUnavailable):
            self._put_back(api)
            raise
        except BaseException:
            api.close()
            raise
        self._put_back(api)

    def _put_back(self, api: docker.APIClient) -> None:
        """Keep the client for the next call. Over a local socket, close its connections first. Otherwise the client
        would keep one open connection for each URL.
        """
        if not str(api.base_url).startswith(("http://", "https://")):
            api.close()
        self._clients.append(api)

    async def _remove_by_name(self, name: str) -> bool:
        return await self._run(self._lanes.removals, lambda api: _remove(api, name))

    async def _remove_refused(self, name: str) -> None:
        try:
            await self.remove(name)
        except SandboxUnavailable as error:
            log.warning("refused_container_not_removed", container=name, error=str(error))
            self._late_containers.remove_later(name)


def _find_containerd(info: Mapping[str, Any]) -> Containerd | None:
    """Return the containerd that keeps the engine's images; None when the engine keeps them itself."""
    kind = dict(pair for pair in info.get("DriverStatus") or () if len(pair) == 2).get("driver-type")
    address = str((info.get("Containerd") or {}).get("Address") or DEFAULT_ADDRESS)
    return Containerd(address) if kind == SNAPSHOTTER_TYPE else None


def _find_layer_root(info: Mapping[str, Any], containerd: Containerd | None) -> str:
    driver = info.get("Driver")
    if containerd is None:
        return f"{info.get('DockerRootDir')}/overlay2" if driver == "overlay2" else ""
    return containerd.find_root() if driver == SNAPSHOTTER and containerd.is_reachable else ""


def _build_facts(info: Mapping[str, Any], version: Mapping[str, Any]) -> EngineFacts:
    containerd = _find_containerd(info)
    options = [str(option) for option in info.get("SecurityOptions") or []]
    components = {str(part.get("Name", "?")): str(part.get("Version", "?")) for part in version.get("Components") or []}
    return EngineFacts(
        version=str(info.get("ServerVersion", "?")),
        cgroup_version=int(info.get("CgroupVersion", "1") or 1),
        seccomp=any("name=seccomp" in option for option in options),
        runtimes=tuple(info.get("Runtimes") or {}),
        kernel=str(info.get("KernelVersion", "?")),
        components=components,
        security=frozenset(option.partition("name=")[2].partition(",")[0] for option in options) - {""},
        storage_driver=str(info.get("Driver") or ""),
        data_root=str(info.get("DockerRootDir") or ""),
        layer_root=_find_layer_root(info, containerd),
        containerd="" if containerd is None else containerd.address,
        has_memory_limit=info.get("MemoryLimit") is not False,
        has_swap_limit=info.get("SwapLimit") is not False,
        has_pids_limit=info.get("PidsLimit") is not False,
    )


def _build_listed(container: Mapping[str, Any]) -> ListedContainer:
    names = container.get("Names") or [""]
    return ListedContainer(
        id=str(container["Id"]),
        name=str(names[0]).lstrip("/"),
        state=str(container.get("State") or "?").lower(),
        labels={str(name): str(value) for name, value in (container.get("Labels") or {}).items()},
        created_at=float(container.get("Created") or 0),
    )


def _find_image(api: docker.APIClient, image: str) -> Mapping[str, Any] | None:
    try:
        return dict(api.inspect_image(image))  # type: ignore[no-untyped-call]
    except docker.errors.ImageNotFound:
        return None


def _build_image_facts(attributes: Mapping[str, Any]) -> ImageFacts:
    folders = (attributes.get("GraphDriver") or {}).get("Data") or {}
    layers = [folders.get("UpperDir"), *str(folders.get("LowerDir") or "").split(":")]
    return ImageFacts(
        id=str(attributes.get("Id") or ""),
        variables=tuple((attributes.get("Config") or {}).get("Env") or ()),
        layers=tuple(folder for folder in layers if folder),
    )


def _read_content(api: docker.APIClient, facts: ImageFacts, layers: int) -> ImageFacts:
    """Add the user database for sandboxes of an image, and the folders of its `layers` layers if containerd keeps
    them. Both are read from a container that is never started: it also protects the layers meanwhile, and a killed
    sandboxd leaves nothing but this container, which the next one removes.
    """
    remove_old_fillers(api, PRODUCT_GUEST)
    with filler(api, facts.id, f"toolcrew-accounts-{secrets.token_hex(8)}", None) as container:
        facts = replace(facts, accounts=read_accounts(api, container))
        if facts.layers:
            return facts
        info = api.info()
        containerd = _find_containerd(info)
        if containerd is None or not _find_layer_root(info, containerd):
            return facts
        return replace(facts, layers=containerd.find_layers(container, layers))


def _create_attach_start(api: docker.APIClient, config: dict[str, Any], name: str) -> AttachedContainer:
    try:
        container = str(api.create_container_from_config(config, name)["Id"])  # type: ignore[no-untyped-call]
    except docker.errors.ImageNotFound as error:
        raise SandboxUnavailable(
            f"the engine has no image {config['Image']}: {advise_missing(config['Image'])}"
        ) from error
    attached = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    sock = _duplicate(attached)
    try:
        api.start(container)
        process = int(api.inspect_container(container)["State"]["Pid"])
    except BaseException:
        sock.close()
        raise
    return AttachedContainer(container, sock, process)


def _duplicate(attached: Any) -> socket.socket:
    """Return the connection of the SDK's file as a socket that does not block."""
    # Duplicate the descriptor: the SDK's response can then be closed without closing the connection. Close the response
    # and not only its file: from Python 3.13 on, a response that finds its file closed reports this on stderr.
    sock = socket.socket(fileno=os.dup(attached.fileno()))
    attached._response.close()
    sock.setblocking(False)
    return sock


def _freeze(api: docker.APIClient, container: str, *, is_wanted: bool) -> None:
    try:
        (api.pause if is_wanted else api.unpause)(container)
    except docker.errors.NotFound as error:
        raise SandboxUnavailable(
            "the sandbox's container was removed: the session gets another one at its next call"
        ) from error
    except docker.errors.APIError:
        # The container may already be in the requested state; engines report this in different ways.
        state = api.inspect_container(container)["State"]
        if not state.get("Running"):
            raise SandboxUnavailable(
                "the sandbox's container has ended: the session gets another one at its next call"
            ) from None
        if bool(state.get("Paused")) is not is_wanted:
            raise


def _remove(api: docker.APIClient, container: str) -> bool:
    """Remove a container and return whether it existed."""
    try:
        api.remove_container(container, force=True, v=True)
    except docker.errors.NotFound:
        return False
    except docker.errors.APIError as error:
        if error.status_code != 409:  # 409: the engine is already removing the container
            raise
        _wait_removed(api, container)
    return True


def _wait_removed(api: docker.APIClient, container: str) -> None:
    try:
        api.wait(container, condition="removed", timeout=_REMOVAL_S)
    except docker.errors.NotFound:
        return
    except requests.exceptions.RequestException as error:
        raise SandboxUnavailable(
            f"the Docker engine has not finished removing container {container[:12]}: sandboxd tries again"
        ) from error
