"""What of a session is packed when its container is given up, and unpacked into the next one: all that the container alone has."""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from contract.errors import SandboxUnavailable, ToolFailure
from workers.sandboxd.parcels import count_most_bytes
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.session import Session
from workers.sandboxd.store.checkpoints import Checkpoints
from workers.sandboxd.store.choice import open_own_store

PARKING_S = 60.0
"""For packing: others wait for the place. What was packed has longer to come back."""
_CONTAINERS_OWN = ("/output", "/tmp")  # of the sandbox, not of this host


class Parking(Protocol):
    """Raises SandboxUnavailable when packing or unpacking fails."""

    async def pack(self, session: Session, sandbox: Sandbox) -> str: ...

    async def unpack(self, session: Session, sandbox: Sandbox) -> None: ...

    async def forget(self, tenant: str, parcel: str) -> None: ...

    async def forget_all_but(self, kept: Set[tuple[str, str]]) -> int:
        """Delete every parcel whose tenant and id are not in `kept`; gives how many."""
        ...


class StoreParking:
    """Parcels in a store of this host: long outputs, the shell's state, /tmp, and a workspace that would go with its container."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    async def pack(self, session: Session, sandbox: Sandbox) -> str:
        most = count_most_bytes(session.plan.workspace_bytes, session.plan.workspace_inodes)
        with _as_unavailable("packed"):
            saved = await self._checkpoints.save(session.tenant, sandbox, roots=_roots(session), max_bytes=most)
            return saved.id

    async def unpack(self, session: Session, sandbox: Sandbox) -> None:
        if session.parcel is not None:
            with _as_unavailable("unpacked"):
                await self._checkpoints.load(session.tenant, session.parcel, sandbox, roots=_roots(session))

    async def forget(self, tenant: str, parcel: str) -> None:
        await self._checkpoints.forget(tenant, parcel)

    async def forget_all_but(self, kept: Set[tuple[str, str]]) -> int:
        return await self._checkpoints.forget_all_but(kept)


def open_parking(folder: Path, free_bytes: int) -> StoreParking:
    """One that keeps its parcels in a folder of this process alone. `free_bytes`: as of `FolderStore`."""
    return StoreParking(Checkpoints(open_own_store(folder, free_bytes), save_s=PARKING_S))


def _roots(session: Session) -> tuple[str, ...]:
    return _CONTAINERS_OWN if session.workspace.outlives_container else ("/workspace", *_CONTAINERS_OWN)


@contextmanager
def _as_unavailable(what: str) -> Iterator[None]:
    """Nobody asked for it by a call, so there is no model to tell."""
    try:
        yield
    except ToolFailure as failure:
        raise SandboxUnavailable(f"the session's state could not be {what}: {failure}") from failure
