"""Sandboxes that the Docker engine starts.

The engine passes no descriptor to PID 1, so the stream server is a second program of the container. The engine
multiplexes its output, so a relay in this process unpacks the bytes: slower than a socket of the sandbox, and bounded
by the buffers of one read and one write per direction.
"""

import asyncio
import contextlib
import socket
import struct

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime.base import AttachedContainer, ListedContainer
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.hardening import (
    GUEST_COMMAND,
    SandboxSpec,
    build_container_config,
    find_drift,
    image_variables,
)
from toolcrew.workers.sandboxd.runtime.image_faults import check_variables

_HEADER = struct.Struct(">BxxxI")
_STDOUT = 1
_RELAY_BYTES = 65_536


class EngineRuntime:
    """A sandbox runtime over the engine's API (runtime/base.py)."""

    stacks_layers = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.pause = engine.pause
        self.unpause = engine.unpause
        self.remove = engine.remove
        self._relays: set[asyncio.Task[None]] = set()

    async def start(self, spec: SandboxSpec, name: str) -> AttachedContainer:
        if spec.workspace.layers:
            raise SandboxUnavailable(
                "the Docker engine cannot start a forked session: run sandboxd with TOOLCREW_SANDBOX_START=oci"
            )
        check_variables(image_variables(spec), spec.image)
        return await self._engine.start(await self._build_config(spec), name)

    async def open_stream_channel(self, container: str) -> socket.socket:
        """Start a stream server in the container. Its relay ends with the channel."""
        program = await self._engine.open_program(container, [*GUEST_COMMAND, "--streams"])
        ours, theirs = socket.socketpair()
        relay = asyncio.get_running_loop().create_task(_relay(program, theirs))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)
        return ours

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


async def _relay(program: socket.socket, channel: socket.socket) -> None:
    """Copy bytes between a program of the engine and a channel until one of them ends. Closes both."""
    from_program, to_program = await asyncio.open_connection(sock=program, limit=_RELAY_BYTES)
    from_channel, to_channel = await asyncio.open_connection(sock=channel, limit=_RELAY_BYTES)
    copies = [
        asyncio.create_task(_copy_input(from_channel, to_program)),
        asyncio.create_task(_copy_output(from_program, to_channel)),
    ]
    try:
        ended, _ = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for copy in ended:
            copy.result()
    finally:
        for copy in copies:
            copy.cancel()
        to_program.transport.abort()
        to_channel.close()
        await asyncio.gather(*copies, return_exceptions=True)


async def _copy_input(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(_RELAY_BYTES):
            target.write(data)
            await target.drain()


async def _copy_output(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy the standard output out of the multiplexed messages. The size in a header takes no memory."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            stream, size = _HEADER.unpack(await source.readexactly(_HEADER.size))
            while size and (data := await source.read(min(size, _RELAY_BYTES))):
                size -= len(data)
                if stream == _STDOUT:
                    target.write(data)
                    await target.drain()
