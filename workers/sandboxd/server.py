"""The unix socket that workers use: who may connect, and the verbs that are not a call."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from contract.errors import ErrorCode, ToolFailure
from contract.session_locations import DEFAULT_TTL_S, MAX_TTL_S
from contract.tenancy import SandboxTerms
from workers.sandboxd.channels import WorkerLink
from workers.sandboxd.connection import Connection
from workers.sandboxd.frames import FrameError
from workers.sandboxd.parcels import count_most_bytes
from workers.sandboxd.plans import Plans
from workers.sandboxd.requests import parse_fence, parse_number, parse_session, parse_terms, parse_text
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.session import Session, parse_moved
from workers.sandboxd.sessions import Sessions, Start
from workers.sandboxd.skill_shelf import SkillShelf
from workers.sandboxd.store.checkpoints import Checkpoints
from workers.unix_listening import BACKLOG, find_peer_uid, open_listener

log = structlog.get_logger(__name__)

OWNER = "sandboxd"


class Server:
    """Serves `open`, `call`, `cancel`, `skill`, `checkpoint`, `delete_checkpoint`, `close`, `terms`, `status`, `sessions`.

    One request at a time on a connection; a closed connection cancels its call.
    """

    def __init__(
        self,
        sessions: Sessions,
        plans: Plans,
        checkpoints: Checkpoints,
        shelf: SkillShelf,
        *,
        uids: frozenset[int],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`facts`: what `status` tells beside the sessions, asked each time."""
        self._sessions = sessions
        self._plans = plans
        self._checkpoints = checkpoints
        self._shelf = shelf
        self._uids = uids
        self._facts = facts
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path, mode: int) -> asyncio.Server:
        """Listen at `path`. Raises OSError when another sandboxd already answers there, or something lies there that is no socket."""
        listener = open_listener(path, mode, owner=OWNER, variable="TOOLCREW_SANDBOXD_SOCKET")
        return await asyncio.get_running_loop().create_unix_server(lambda: WorkerLink(self._accept), sock=listener, backlog=BACKLOG)

    async def close_connections(self) -> None:
        """End what is still connected."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, link: WorkerLink) -> None:
        assert link.transport is not None
        uid = find_peer_uid(link.transport.get_extra_info("socket"))
        if uid not in self._uids:
            log.warning("peer_refused", uid=uid)
            link.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(link))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, link: WorkerLink) -> None:
        try:
            await Connection(link, self._sessions, self._shelf, self._answer).serve()
        except (FrameError, ConnectionError) as error:
            log.warning("connection_dropped", error=str(error))
        except asyncio.CancelledError:
            log.debug("connection_closed_at_shutdown")
        except Exception:  # the edge: a bug costs this connection only, and is loud
            log.exception("connection_bug")
        finally:
            link.close()

    async def _answer(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to every verb but `call`, `skill` and `sessions`."""
        verb = header.get("verb")
        if verb == "open":
            return await self._open(header)
        if verb == "close":
            return {"closed": await self._sessions.close(parse_text(header, "sandbox"), fence=parse_fence(header))}
        if verb == "cancel":
            return {"cancelled": self._cancel(parse_text(header, "sandbox"), parse_text(header, "call"))}
        if verb == "checkpoint":
            return await self._checkpoint(parse_text(header, "sandbox"), is_automatic=header.get("automatic") is True)
        if verb == "delete_checkpoint":
            tenant = parse_session(header).partition(":")[0]
            return {"deleted": await self._checkpoints.forget(tenant, parse_text(header, "checkpoint"))}
        if verb == "terms":
            return {"sessions": await self._tell_terms(header)}
        if verb == "status":
            return {**self._facts(), "sessions": len(self._sessions), "sandboxes": self._sessions.count_sandboxes()}
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"unknown verb {str(verb)[:40]!r}")

    async def _open(self, header: Mapping[str, Any]) -> dict[str, Any]:
        name, ttl_s = parse_session(header), parse_number(header, "ttl_s", DEFAULT_TTL_S, MAX_TTL_S)
        terms, restore = parse_terms(header), _parse_optional(header, "restore")
        plan = self._plans.choose(terms or SandboxTerms(), _parse_optional(header, "image"), _parse_optional(header, "network"))
        fill = None if restore is None else partial(self._restore, restore)
        started = time.monotonic()
        session = await self._sessions.open(name, Start(plan, ttl_s, fill, terms, parse_moved(header)))
        rules = self._plans.rules(session.terms) if session.plan.network == "egress" else None
        return {
            "sandbox": session.identify_sandbox(session.sandbox) if session.sandbox is not None else None,
            "image": session.plan.image,
            "network": self._plans.network(session.terms) if rules is not None else "none",
            "hosts": list(rules.hosts) if rules is not None else [],
            "workspace": session.workspace.kind,
            "start_s": time.monotonic() - started,
        }

    async def _restore(self, checkpoint: str, session: Session, sandbox: Sandbox) -> None:
        await self._checkpoints.load(session.tenant, checkpoint, sandbox)

    async def _tell_terms(self, header: Mapping[str, Any]) -> int:
        """For all sessions of a tenant here; gives how many there are."""
        tenant, terms = parse_text(header, "tenant"), parse_terms(header)
        if terms is None:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "'terms' is missing")
        entries = [entry for entry in self._sessions.all() if entry.tenant == tenant]
        for entry in entries:
            self._sessions.tell_terms(entry, terms)
            await asyncio.sleep(0)  # each may be a file written: others go on in between
        return len(entries)

    async def _checkpoint(self, name: str, *, is_automatic: bool) -> dict[str, Any]:
        """`is_automatic`: nobody asked for it, so it is no use of the session, and counts towards nobody's."""
        known = self._sessions.find(name)
        used_at = known.used_at if known is not None else 0.0
        session, _ = await self._sessions.use(name)
        # One at a time: files that their owner may not read are open while they are packed, and closed again by who opened them.
        async with session.checkpointing:
            _, sandbox = await self._sessions.use(name)
            asked_at = session.used_at
            most = count_most_bytes(session.plan.workspace_bytes, session.plan.workspace_inodes)
            session.traces.has_written = False  # from here on: what ends now may have been read before it wrote
            try:
                saved = await self._checkpoints.save(session.tenant, sandbox, max_bytes=most, is_automatic=is_automatic)
            except BaseException:
                session.traces.has_written = True
                raise
            finally:
                if not is_automatic:
                    session.used_at = time.monotonic()
                elif session.used_at == asked_at:
                    session.used_at = used_at
        session.note_kept(saved.id, is_automatic=is_automatic)
        return {"checkpoint": saved.id, "bytes": saved.bytes, "sha256": saved.sha256, "skipped": saved.skipped, "torn": saved.is_torn}

    def _cancel(self, name: str, call_id: str) -> bool:
        session = self._sessions.find(name)
        if session is None:
            return False
        if call_id in session.waiting:
            session.waiting.remove(call_id)
            return True
        if (sandbox := session.sandbox) is not None:
            for call in list(sandbox.calls.values()):
                if call.call_id == call_id:
                    sandbox.cancel(call)
                    return True
        # It may be on its way here, or have more to ask for.
        session.called_off.append(call_id)
        return False


def _parse_optional(header: Mapping[str, Any], name: str) -> str | None:
    return None if header.get(name) is None else parse_text(header, name)
