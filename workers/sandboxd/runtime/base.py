"""The interface of a sandbox runtime, which starts, freezes, lists and removes the sandboxes of a host.

Two classes implement it. `EngineRuntime` (engine_runtime.py) asks the Docker engine, and `OciRuntime` (oci.py) calls
crun or runc itself. Every sandbox has labels that survive the death of this process, so that any sandboxd finds it
again.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from toolcrew.workers.sandboxd.runtime.hardening import SandboxSpec

LABEL_PRODUCT: Final = "toolcrew.product"
LABEL_DEPLOYMENT: Final = "toolcrew.deployment"
LABEL_SANDBOXD: Final = "toolcrew.sandboxd"
LABEL_CREATED_AT: Final = "toolcrew.created_at"
LABEL_DEADLINE: Final = "toolcrew.deadline"
"""Label with the deadline in epoch seconds, in decimal. After the deadline any sandboxd of the deployment may remove
the container.
"""
LABEL_LEASE: Final = "toolcrew.lease"
PRODUCT: Final = "sandbox"
PRODUCT_PIN: Final = "pin"
"""Product label of pins: containers that are never started, and prevent the removal of an image and of volumes."""


@dataclass(frozen=True)
class AttachedContainer:
    """A started container and the socket to its stdin and stdout. `process`: the pid of its first process, as the
    runtime reports it.

    `stderr`: the descriptor of a pipe from its stderr. It is None when the socket carries the engine's multiplexed
    stream of stdout and stderr.
    """

    id: str
    sock: socket.socket
    process: int
    stderr: int | None = None


@dataclass(frozen=True)
class ListedContainer:
    """A container of toolcrew in the list of its runtime. `state` is one of created, running, paused, exited, dead.
    Times are in epoch seconds.
    """

    id: str
    name: str
    state: str
    labels: Mapping[str, str]
    created_at: float


class SandboxRuntime(Protocol):
    """Starts and removes sandboxes. All methods raise SandboxUnavailable; the text says what to do."""

    stacks_layers: bool
    """True if the runtime starts sandboxes on workspaces that lie over frozen ones."""

    async def start(self, spec: SandboxSpec, name: str) -> AttachedContainer:
        """Start a sandbox. After a failure the caller must call `remove` with the same name, because parts of the
        sandbox may exist.
        """
        ...

    async def open_stream_channel(self, container: str) -> socket.socket:
        """Return a new descriptor of the socket to the stream server of a running sandbox (docs/stream-protocol.md).
        The caller closes it; a shutdown of the socket ends the channel.
        """
        ...

    async def find_drift(self, container: str, spec: SandboxSpec) -> list[str]:
        """Compare a running sandbox with its specification. Return a sentence for every property that differs."""
        ...

    def open_changes(self, container: str, spec: SandboxSpec) -> list[int] | None:
        """Return descriptors of the folders with the changes of a running sandbox's root file system, the top one
        first. The caller closes them. None: the root file system is read-only.
        """
        ...

    async def pause(self, container: str) -> None:
        """Freeze all processes of a container. A frozen container is not changed."""
        ...

    async def unpause(self, container: str) -> None:
        """Thaw a container. A running container is not changed."""
        ...

    async def remove(self, container: str) -> None:
        """Kill and remove a container, by name or id, and return when none of its processes exists. Ignores a container
        that does not exist.
        """
        ...

    async def list_sandboxes(self, deployment: str) -> list[ListedContainer]:
        """Return all containers of toolcrew in that deployment, in any state, of any sandboxd."""
        ...
