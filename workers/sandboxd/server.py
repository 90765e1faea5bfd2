"""The unix socket that workers use: who may connect, and the verbs that are not a call."""

import asyncio
import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from contract.errors import ErrorCode, ToolFailure
from workers.sandboxd.connection import Connection
from workers.sandboxd.frames import FrameError
from workers.sandboxd.link import WorkerLink
from workers.sandboxd.parcels import count_most_bytes
from workers.sandboxd.plans import Plans
from workers.sandboxd.requests import MAX_TTL_S, parse_number, parse_text
from workers.sandboxd.session import Session
from workers.sandboxd.sessions import Sessions
from workers.sandboxd.store.checkpoints import Checkpoints

log = structlog.get_logger(__name__)

_BACKLOG = 1024


class Server:
    """Serves `open`, `call`, `cancel`, `checkpoint`, `delete_checkpoint`, `close`, `status`.

    One request at a time on a connection; a closed connection cancels its call.
    """

    def __init__(
        self,
        sessions: Sessions,
        plans: Plans,
        checkpoints: Checkpoints,
        *,
        uids: frozenset[int],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`facts`: what `status` tells beside the sessions, asked each time."""
        self._sessions = sessions
        self._plans = plans
        self._checkpoints = checkpoints
        self._uids = uids
        self._facts = facts
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path, mode: int) -> asyncio.Server:
        """Listen at `path`. Raises OSError when another sandboxd already answers there, or something lies there that is no socket."""
        await refuse_second(path)
        _make_way(path)
        before = os.umask(0o777 & ~mode)
        try:
            return await asyncio.get_running_loop().create_unix_server(lambda: WorkerLink(self._accept), path=str(path), backlog=_BACKLOG)
        finally:
            os.umask(before)

    async def close_connections(self) -> None:
        """End what is still connected."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, link: WorkerLink) -> None:
        uid = _peer_uid(link)
        if uid not in self._uids:
            log.warning("peer_refused", uid=uid)
            link.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(link))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, link: WorkerLink) -> None:
        try:
            await Connection(link, self._sessions, self._answer).serve()
        except (FrameError, ConnectionError) as error:
            log.warning("connection_dropped", error=str(error))
        except asyncio.CancelledError:
            log.debug("connection_closed_at_shutdown")
        except Exception:  # the edge: a bug costs this connection only, and is loud
            log.exception("connection_bug")
        finally:
            link.close()

    async def _answer(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to every verb but `call`."""
        verb = header.get("verb")
        if verb == "open":
            return await self._open(header)
        if verb == "close":
            return {"closed": await self._sessions.close(parse_text(header, "sandbox"))}
        if verb == "cancel":
            return {"cancelled": self._cancel(parse_text(header, "sandbox"), parse_text(header, "call"))}
        if verb == "checkpoint":
            return await self._checkpoint(parse_text(header, "sandbox"))
        if verb == "delete_checkpoint":
            tenant = parse_text(header, "sandbox").partition(":")[0]
            return {"deleted": await self._checkpoints.forget(tenant, parse_text(header, "checkpoint"))}
        if verb == "status":
            return {**self._facts(), "sandboxes": self._sessions.describe()}
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"unknown verb {str(verb)[:40]!r}")

    async def _open(self, header: Mapping[str, Any]) -> dict[str, Any]:
        name, ttl_s = parse_text(header, "sandbox"), parse_number(header, "ttl_s", 1800.0, MAX_TTL_S)
        plan = self._plans.choose(name.partition(":")[0], _parse_optional(header, "image"), _parse_optional(header, "network"))
        restore = _parse_optional(header, "restore")
        started = time.monotonic()
        is_new = self._sessions.find(name) is None
        session = await self._sessions.open(name, plan, ttl_s)
        if restore is not None and is_new:
            await self._restore(session, restore)
        assert session.sandbox is not None or not is_new
        return {
            "sandbox": session.describe_sandbox(session.sandbox) if session.sandbox is not None else None,
            "image": session.plan.image,
            "network": session.plan.network,
            "hosts": list(self._plans.rules(session.tenant).hosts) if session.plan.network == "egress" else [],
            "workspace": session.workspace.kind,
            "start_s": time.monotonic() - started,
        }

    async def _restore(self, session: Session, checkpoint: str) -> None:
        try:
            _, sandbox = await self._sessions.use(session.id)
            await self._checkpoints.load(session.tenant, checkpoint, sandbox)
        except BaseException:
            await asyncio.shield(self._sessions.close(session.id))
            raise

    async def _checkpoint(self, name: str) -> dict[str, Any]:
        session, sandbox = await self._sessions.use(name)
        most = count_most_bytes(session.plan.workspace_bytes, session.plan.workspace_inodes)
        saved = await self._checkpoints.save(session.tenant, sandbox, max_bytes=most)
        return {"checkpoint": saved.id, "bytes": saved.bytes, "sha256": saved.sha256, "skipped": saved.skipped, "torn": saved.is_torn}

    def _cancel(self, name: str, call_id: str) -> bool:
        session = self._sessions.find(name)
        if session is None or session.sandbox is None:
            return False
        for call in list(session.sandbox.calls.values()):
            if call.call_id == call_id:
                session.sandbox.cancel(call)
                return True
        return False


async def refuse_second(path: Path) -> None:
    """Raises OSError when another sandboxd already answers at `path`."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.close()
        raise OSError(f"another sandboxd already listens on {path}")


def _parse_optional(header: Mapping[str, Any], name: str) -> str | None:
    return None if header.get(name) is None else parse_text(header, name)


def _peer_uid(link: WorkerLink) -> int:
    assert link.transport is not None
    sock = link.transport.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _make_way(path: Path) -> None:
    """Remove the socket of a sandboxd that is gone. Raises OSError for anything else that lies there, and for another user's folder."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid not in (os.geteuid(), 0):
        # Who owns the folder could put a socket of his own in our place.
        raise OSError(f"{path.parent} belongs to another user: set TOOLCREW_SANDBOXD_SOCKET to a path in a folder of your own")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} exists and is no socket: move it away, or set TOOLCREW_SANDBOXD_SOCKET to another path")
        path.unlink()
