"""The container engine through its SDK. The only file that imports docker; every call runs in a thread and is bounded in time."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import docker
import docker.errors
import requests.exceptions

from contract.errors import SandboxUnavailable

ENGINE_TIMEOUT_S = 30
LABEL_PRODUCT = "toolcrew.product"
LABEL_SANDBOXD = "toolcrew.sandboxd"
LABEL_CREATED_AT = "toolcrew.created_at"

T = TypeVar("T")


@dataclass(frozen=True)
class EngineFacts:
    """What the engine says of itself."""

    version: str
    cgroup_version: int
    seccomp: bool
    runtimes: tuple[str, ...]
    kernel: str


@dataclass(frozen=True)
class AttachedContainer:
    """A started container and the raw socket to its stdin, stdout and stderr (multiplexed)."""

    id: str
    sock: socket.socket


class Engine:
    """Create, attach, start, inspect, remove. Raises SandboxUnavailable with the engine's own words."""

    def __init__(self, threads: int = 8) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="engine")
        self._local = threading.local()

    async def facts(self) -> EngineFacts:
        """Version, cgroup version, seccomp and runtimes of the engine."""
        info = await self._run(lambda api: api.info())
        return EngineFacts(
            version=str(info.get("ServerVersion", "?")),
            cgroup_version=int(info.get("CgroupVersion", "1") or 1),
            seccomp=any("name=seccomp" in option for option in info.get("SecurityOptions") or []),
            runtimes=tuple(info.get("Runtimes") or {}),
            kernel=str(info.get("KernelVersion", "?")),
        )

    async def image_id(self, image: str) -> str | None:
        """The image's content id, or None when the engine does not have it."""

        def find(api: docker.APIClient) -> str | None:
            try:
                return str(api.inspect_image(image)["Id"])  # type: ignore[no-untyped-call]
            except docker.errors.ImageNotFound:
                return None

        return await self._run(find)

    async def start(self, config: Mapping[str, Any], name: str) -> AttachedContainer:
        """Create a container of that raw configuration, attach, start it. On failure nothing is left behind."""
        return await self._run(lambda api: _create_attach_start(api, dict(config), name))

    async def inspect(self, container: str) -> dict[str, Any]:
        """The engine's description of a container."""
        return dict(await self._run(lambda api: api.inspect_container(container)))

    async def remove(self, container: str) -> None:
        """Kill and remove; returns when the engine no longer has it. A container that is already gone is fine."""
        await self._run(lambda api: _remove(api, container))

    async def list_ours(self, sandboxd: str) -> list[str]:
        """Ids of all containers that carry our product label and were made by the sandboxd of that name."""
        filters = {"label": [f"{LABEL_PRODUCT}=sandbox", f"{LABEL_SANDBOXD}={sandboxd}"]}
        found = await self._run(lambda api: api.containers(all=True, filters=filters))
        return [str(container["Id"]) for container in found]

    async def list_never_started(self, older_than_s: float) -> list[str]:
        """Ids of sandboxes of any sandboxd that were created that long ago and not started: whoever made them was killed in between."""
        filters = {"label": [f"{LABEL_PRODUCT}=sandbox"], "status": ["created"]}
        found = await self._run(lambda api: api.containers(all=True, filters=filters))
        before = time.time() - older_than_s
        return [str(container["Id"]) for container in found if _created_at(container) < before]

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[docker.APIClient], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._work, work)

    def _work(self, work: Callable[[docker.APIClient], T]) -> T:
        try:
            return work(self._api())
        except docker.errors.APIError as error:
            raise SandboxUnavailable(f"the Docker engine refused: {error.explanation or error}") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise SandboxUnavailable(
                f"the Docker engine does not answer ({error}): start it, or check DOCKER_HOST and your rights"
            ) from error

    def _api(self) -> docker.APIClient:
        # A client per thread: a requests session is not promised to be thread-safe.
        if not hasattr(self._local, "api"):
            self._local.api = docker.from_env(timeout=ENGINE_TIMEOUT_S).api
        api: docker.APIClient = self._local.api
        return api


def _create_attach_start(api: docker.APIClient, config: dict[str, Any], name: str) -> AttachedContainer:
    try:
        container = str(api.create_container_from_config(config, name)["Id"])  # type: ignore[no-untyped-call]
    except docker.errors.ImageNotFound as error:
        raise SandboxUnavailable(f"the engine has no image {config['Image']}: build it with scripts/build-image") from error
    try:
        attached = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        # A descriptor of our own: the SDK's object then goes its way without taking the connection with it.
        sock = socket.socket(fileno=os.dup(attached.fileno()))
        attached.close()
        try:
            api.start(container)
        except BaseException:
            sock.close()
            raise
    except BaseException:
        _remove(api, container)
        raise
    sock.setblocking(False)
    return AttachedContainer(container, sock)


def _created_at(container: Mapping[str, Any]) -> float:
    """What its label tells; one that tells nothing counts as new, and is left alone."""
    text = str((container.get("Labels") or {}).get(LABEL_CREATED_AT, ""))
    return float(text) if text.isascii() and text.isdigit() else float("inf")


def _remove(api: docker.APIClient, container: str) -> None:
    try:
        api.remove_container(container, force=True, v=True)
    except docker.errors.NotFound:
        return
    except docker.errors.APIError as error:
        if error.status_code != 409:  # 409: its automatic removal is under way
            raise
        _wait_removed(api, container)


def _wait_removed(api: docker.APIClient, container: str) -> None:
    try:
        api.wait(container, condition="removed", timeout=ENGINE_TIMEOUT_S)
    except docker.errors.NotFound:
        return
