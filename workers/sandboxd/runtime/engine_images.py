"""Images of the engine: find, list, pull and remove them.

A pull has its own thread and client and does not use EngineGate: a pull takes minutes, and a slow registry does not
mean that the engine hangs.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import docker
import docker.errors
import docker.utils
import requests.exceptions
import urllib3.exceptions

from toolcrew.concurrency.tasks import in_thread
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import ImageName
from toolcrew.workers.sandboxd.runtime.base import LABEL_PRODUCT, PRODUCT_PIN
from toolcrew.workers.sandboxd.runtime.engine import Engine

SILENCE_S: Final = 120
"""A pull fails when the engine reports no progress for this time, in seconds. It reports every retry of a download."""
PULL_S: Final = 1800.0
"""Time limit of a pull, in seconds."""
_CHECK_S: Final = 30
_LATE: Final = f"it is not complete after {PULL_S:g} s"
_MAX_LAYERS: Final = 1000
_MAX_ERROR_CHARS: Final = 500


class PullFailed(SandboxUnavailable):
    """Error: the engine could not pull an image. The message is the engine's own text."""


@dataclass(frozen=True)
class EngineImage:
    """An image of the engine. `tags` and `digests`: its names with a tag and with a digest. `size_bytes`: the size of
    all layers, including layers that other images share. If containerd keeps the images, `find` counts only the layers
    as they were downloaded, and `list` also the unpacked ones: both are on the disk.
    """

    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class RegistryAccount:
    """User name and password for a registry."""

    user: str
    password: str = field(repr=False)


class PullProgress:
    """Progress of a pull. The thread of the pull writes it, and the event loop reads it."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}
        self._is_stopped = threading.Event()

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped.is_set()

    def stop(self) -> None:
        """End the pull at its next event. The engine keeps no part of an image whose pull was ended."""
        self._is_stopped.set()

    def update(self, event: Mapping[str, Any]) -> None:
        """Record an event of the engine."""
        detail, layer = event.get("progressDetail"), str(event.get("id"))[:100]
        if event.get("status") != "Downloading" or not isinstance(detail, Mapping):
            return
        current, total = detail.get("current"), detail.get("total")
        if isinstance(current, int) and (layer in self._layers or len(self._layers) < _MAX_LAYERS):
            self._layers[layer] = (current, total if isinstance(total, int) else current)

    def bytes(self) -> tuple[int, int]:
        """Return the downloaded bytes, and the bytes of the layers whose download has begun."""
        layers = list(self._layers.values())
        return sum(current for current, _ in layers), sum(total for _, total in layers)


class EngineImages:
    """Finds, lists, pulls and removes images. Raises SandboxUnavailable with the engine's error text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def find(self, name: str) -> EngineImage | None:
        """Return the image of a complete name or a content id; None when the engine does not have it."""
        return await self._engine.run_query(lambda api: _find(api, name))

    async def list(self) -> Sequence[EngineImage]:
        """Return all images with a name or of a finished build."""
        return await self._engine.run_query(lambda api: [_build(image) for image in api.images()])

    async def used(self) -> frozenset[str]:
        """Return the content ids of the images of all containers, in any state and of any owner, except pins
        (LABEL_PRODUCT of runtime/base.py).
        """
        return await self._engine.run_query(_list_used)

    async def remove(self, name: str) -> bool:
        """Remove a name of an image, or an image by its content id. The layers go with the last name. Returns False
        when the engine refuses because a container uses the image or it has other names.
        """
        return await self._engine.run_removal(lambda api: _remove(api, name))

    async def pull(self, name: ImageName, account: RegistryAccount | None, progress: PullProgress) -> None:
        """Pull an image. Raises PullFailed. The pull continues when the caller is cancelled; `progress.stop` ends
        it.
        """
        try:
            # The thread has the same limits, but it would wait for the rest of an answer that never becomes complete.
            async with asyncio.timeout(PULL_S + SILENCE_S):
                await in_thread(lambda: _pull(name, account, progress), "image-pull")
        except TimeoutError:
            raise PullFailed(_LATE) from None

    async def check_access(self, name: ImageName, account: RegistryAccount | None) -> None:
        """Ask the registry whether it lets the account read an image. Raises PullFailed."""
        try:
            async with asyncio.timeout(_CHECK_S):
                await in_thread(lambda: _check_access(name, account), "image-check")
        except TimeoutError:
            raise PullFailed("the registry check timed out") from None


class _PullClient(docker.APIClient):
    """A client whose pull has a time limit for each part of the answer. The SDK's own pull waits without limit."""

    def post(self, url: str | bytes, *args: Any, **options: Any) -> requests.Response:
        return super().post(url, *args, **{**options, "timeout": SILENCE_S})


def _pull(name: ImageName, account: RegistryAccount | None, progress: PullProgress) -> None:
    repository, version = f"{name.registry}/{name.repository}", name.digest or name.tag
    # An empty account prevents the SDK from using the logins in this user's Docker configuration.
    login = {} if account is None else {"username": account.user, "password": account.password}
    until = time.monotonic() + PULL_S
    try:
        api = _PullClient(timeout=SILENCE_S, **docker.utils.kwargs_from_env())
        try:
            events = api.pull(repository, tag=version, stream=True, decode=True, auth_config=login)
            try:
                for event in events:
                    if "error" in event:
                        raise PullFailed(str(event["error"])[:_MAX_ERROR_CHARS])
                    progress.update(event)
                    if progress.is_stopped:
                        raise PullFailed("sandboxd has stopped the pull")
                    if time.monotonic() > until:
                        raise PullFailed(_LATE)
            finally:
                events.close()
        finally:
            api.close()
    except docker.errors.APIError as error:
        raise PullFailed(str(error.explanation or error)[:_MAX_ERROR_CHARS]) from error
    except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
        raise PullFailed(f"the engine reported no progress for {SILENCE_S} s") from error
    except (
        docker.errors.DockerException,
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        OSError,
    ) as error:
        raise PullFailed(f"the Docker engine does not answer: {str(error)[:_MAX_ERROR_CHARS]}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PullFailed(f"the Docker engine's response cannot be read: {error!r}"[:_MAX_ERROR_CHARS]) from error


def _check_access(name: ImageName, account: RegistryAccount | None) -> None:
    # An empty account prevents the SDK from using the logins in this user's Docker configuration.
    login = {} if account is None else {"username": account.user, "password": account.password}
    try:
        with closing(docker.APIClient(timeout=_CHECK_S, **docker.utils.kwargs_from_env())) as api:
            api.inspect_distribution(name.full, auth_config=login)  # type: ignore[no-untyped-call]
    except docker.errors.APIError as error:
        raise PullFailed(str(error.explanation or error)[:_MAX_ERROR_CHARS]) from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise PullFailed(f"the Docker engine does not answer: {str(error)[:_MAX_ERROR_CHARS]}") from error


def _list_used(api: docker.APIClient) -> frozenset[str]:
    return frozenset(
        str(container.get("ImageID"))
        for container in api.containers(all=True)
        if (container.get("Labels") or {}).get(LABEL_PRODUCT) != PRODUCT_PIN
    )


def _find(api: docker.APIClient, name: str) -> EngineImage | None:
    try:
        return _build(api.inspect_image(name))  # type: ignore[no-untyped-call]
    except docker.errors.ImageNotFound:
        return None


def _build(image: Mapping[str, Any]) -> EngineImage:
    return EngineImage(
        id=str(image["Id"]),
        tags=tuple(str(tag) for tag in image.get("RepoTags") or () if "<none>" not in str(tag)),
        digests=tuple(str(digest) for digest in image.get("RepoDigests") or () if "<none>" not in str(digest)),
        size_bytes=int(image.get("Size") or 0),
    )


def _remove(api: docker.APIClient, name: str) -> bool:
    try:
        api.remove_image(name)
    except docker.errors.ImageNotFound:
        return True
    except docker.errors.APIError as error:
        if error.status_code != 409:
            raise
        return False
    return True
