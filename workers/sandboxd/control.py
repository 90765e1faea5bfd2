"""Requests of a worker that are not calls: open, close and checkpoint sessions, place skills, update policies, report
status.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.contract.session_spec import SessionMove, SessionSpec, pick_options
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandboxd.archives.checkpoints import Checkpoints
from toolcrew.workers.sandboxd.archives.packing import count_max_bytes, find_roots
from toolcrew.workers.sandboxd.archives.workspaces import WorkspaceFiles
from toolcrew.workers.sandboxd.connection import ReadBody, parse_count, parse_policy, parse_text
from toolcrew.workers.sandboxd.egress.secrets import SecretValues, parse_values
from toolcrew.workers.sandboxd.forks import SessionForker
from toolcrew.workers.sandboxd.plans import Plans, with_placeholders
from toolcrew.workers.sandboxd.request_fields import parse_fence, parse_session, parse_skill, parse_spec
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import HostSession
from toolcrew.workers.sandboxd.sessions import MAX_ROWS, SessionParameters, Sessions
from toolcrew.workers.sandboxd.skill_store import SkillVolume

MAX_SECRETS_BYTES = 64 * 1024 * 1024
_WITHOUT_ROOT = (
    "the checkpoint of this session has changes outside of /workspace, which were not restored: that needs a session "
    "with the same image content and `user` root"
)
IMAGE_WAIT_S = 500.0
"""Time that an opening with an image waits for its pull, in seconds. The worker waits 540 s for such an opening."""


@dataclass(frozen=True)
class HostStores:
    """The stores that requests of workers use: checkpoints, files of workspaces, and skill bundles. `spool`: a folder
    on a disk for temporary files.
    """

    checkpoints: Checkpoints
    files: WorkspaceFiles
    skills: SkillVolume
    spool: Path


@dataclass(frozen=True)
class SecretExchange:
    """Exchange of secrets: takes their values from the worker, and returns the proxy's report of their uses."""

    values: SecretValues
    read_uses: Callable[[], Awaitable[Sequence[Any]]]


class ControlRequests:
    """Answers every request except a call: `open`, `close`, `cancel`, `skill`, `checkpoint`, `delete_checkpoint`,
    `save_files`, `fork`, `secrets`, `policy`, `status`, `sessions`, `usage`.
    """

    def __init__(
        self,
        sessions: Sessions,
        forker: SessionForker,
        plans: Plans,
        stores: HostStores,
        secrets: SecretExchange,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`describe` returns the fields of `status` that do not depend on sessions."""
        self._sessions = sessions
        self._forker = forker
        self._plans = plans
        self._checkpoints = stores.checkpoints
        self._files = stores.files
        self._skills = stores.skills
        self._spool = stores.spool
        self._secrets = secrets
        self._describe = describe

    async def answer(self, header: Mapping[str, Any], read_body: ReadBody) -> tuple[dict[str, Any], bytes]:
        """Return the answer's header and body. Raises ToolFailure and SandboxUnavailable."""
        verb = header.get("verb")
        if verb in ("sessions", "usage"):
            return self._list(header)
        if verb == "secrets":
            return {}, await self._exchange_secrets(header, read_body)
        if verb == "skill":
            return {"place": await self._place_skill(header, read_body)}, b""
        return await self._answer(header), b""

    async def _answer(self, header: Mapping[str, Any]) -> dict[str, Any]:
        verb = header.get("verb")
        if verb == "open":
            return await self._open(header)
        if verb == "close":
            closed = await self._sessions.close(
                parse_text(header, "sandbox"), fence=parse_fence(header), cancels_calls=True
            )
            return {"closed": closed}
        if verb == "cancel":
            return {"cancelled": self._cancel(parse_text(header, "sandbox"), parse_text(header, "call"))}
        if verb == "checkpoint":
            return await self._checkpoint(parse_text(header, "sandbox"), is_automatic=header.get("automatic") is True)
        if verb == "fork":
            return await self._fork(header)
        if verb == "delete_checkpoint":
            tenant, checkpoint = parse_session(header).partition(":")[0], parse_text(header, "checkpoint")
            return {"deleted": await self._checkpoints.forget(tenant, checkpoint)}
        if verb == "save_files":
            return await self._save_files(header)
        if verb == "ttl":
            self._sessions.set_ttl(parse_text(header, "sandbox"), parse_spec({"ttl_s": header.get("ttl_s")}).ttl_s)
            return {}
        if verb == "policy":
            return {"sessions": await self._update_policy(header)}
        if verb == "status":
            return {**self._describe(), "sessions": len(self._sessions), "sandboxes": self._sessions.count_sandboxes()}
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"unknown request {str(verb)[:40]!r}")

    def _list(self, header: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the rows as a body. In a header of that size, the decoder would check the nesting of every value."""
        describe = self._sessions.describe_usage if header["verb"] == "usage" else self._sessions.describe
        rows = describe(str(header.get("after") or ""))
        next_cursor = rows[-1]["name"] if len(rows) == MAX_ROWS else None
        return {"next": next_cursor}, json.dumps(rows, separators=(",", ":")).encode("ascii")

    async def _exchange_secrets(self, header: Mapping[str, Any], read_body: ReadBody) -> bytes:
        """Take the present values of secrets. Return the names that sessions use, by tenant, and the uses since the
        last exchange.
        """
        size = parse_count(header, "body_bytes")
        if size > MAX_SECRETS_BYTES:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"secrets have at most {MAX_SECRETS_BYTES} bytes")
        self._secrets.values.replace(parse_values(b"".join([piece async for piece in read_body(size)])))
        used: dict[str, set[str]] = {}
        for session in self._sessions.all():
            if names := session.secrets:
                used.setdefault(session.tenant, set()).update(names)
        uses = await self._secrets.read_uses() if used else []
        answer = {"used": {tenant: sorted(names) for tenant, names in used.items()}, "uses": uses}
        return json.dumps(answer, separators=(",", ":")).encode("ascii")

    async def _place_skill(self, header: Mapping[str, Any], read_body: ReadBody) -> str | None:
        """Return the folder of the bundle. Returns None when the bundle is not placed yet and the request has
        no body.
        """
        scope, digest, size = parse_skill(header)
        if size == 0:
            return self._skills.find(scope, digest)
        return await self._skills.place(scope, digest, read_body(size))

    async def _open(self, header: Mapping[str, Any]) -> dict[str, Any]:
        name = parse_session(header)
        policy = parse_policy(header)
        spec = parse_spec(header)
        plan = self._plans.choose(policy or SandboxPolicy(), spec.image, spec.network, pick_options(spec))
        plan = with_placeholders(plan, name)
        started = time.monotonic()
        start = SessionParameters(plan, spec.ttl_s, self._choose_fill(spec), policy, parse_moved(header))
        if spec.image is not None:
            start = replace(start, image_wait_s=IMAGE_WAIT_S)
        session = await self._sessions.open(name, start)
        sandbox = session.identify_sandbox(session.sandbox) if session.sandbox is not None else None
        return {"sandbox": sandbox, **self._describe_session(session), "start_s": time.monotonic() - started}

    async def _fork(self, header: Mapping[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        name, children = parse_session(header), header.get("children")
        if not isinstance(children, list) or not 0 < len(children) <= MAX_FORKS or len({*children}) < len(children):
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"'children' must be 1 to {MAX_FORKS} different sessions")
        names = [parse_session({"sandbox": child}) for child in children]
        tenant = name.partition(":")[0]
        if any(child.partition(":")[0] != tenant or self._sessions.find(child) is not None for child in names):
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "'children' must be new sessions of the same tenant")
        session = await self._forker.fork(name, names, leaves_jobs=header.get("leave_jobs") is True)
        return {**self._describe_session(session), "start_s": time.monotonic() - started}

    def _describe_session(self, session: HostSession) -> dict[str, Any]:
        rules = self._plans.rules(session.policy) if session.plan.network == "egress" else None
        return {
            "image": session.plan.image,
            "network": self._plans.network(session.policy) if rules is not None else "none",
            "hosts": list(rules.hosts) if rules is not None else [],
            "previews": self._plans.previews(session.policy),
            "workspace": session.workspace.kind,
            "options": session.plan.granted().model_dump(),
            "timeout_s": session.plan.timeout_s,
        }

    def _choose_fill(self, spec: SessionSpec) -> Callable[[HostSession, Sandbox], Awaitable[None]] | None:
        """Return what a new session begins with: a checkpoint, a file of the store, or nothing. Raises ToolFailure."""
        if spec.restore is not None and spec.workspace is not None:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "give either 'restore' or 'workspace'")
        if spec.restore is not None:
            return partial(self._restore, spec.restore)
        return partial(self._load_workspace, spec.workspace) if spec.workspace is not None else None

    async def _restore(self, checkpoint: str, session: HostSession, sandbox: Sandbox) -> None:
        image = sandbox.spec.image_facts.id if sandbox.spec.is_root else None
        if not await self._checkpoints.load(session.tenant, checkpoint, sandbox, root_image=image):
            session.add_news(_WITHOUT_ROOT)

    async def _load_workspace(self, workspace: str, session: HostSession, sandbox: Sandbox) -> None:
        await self._files.load(session.tenant, workspace, sandbox)
        # No checkpoint of the new session has these files yet.
        session.activity.has_written = True

    async def _save_files(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Store the artifacts of a session."""
        session, sandbox = await self._sessions.use(parse_text(header, "sandbox"))
        try:
            saved = await self._files.save(
                session.tenant, parse_text(header, "file"), parse_text(header, "names"), sandbox
            )
        finally:
            session.used_at = time.monotonic()
        return {"bytes": saved.bytes, "sha256": saved.sha256}

    async def _update_policy(self, header: Mapping[str, Any]) -> int:
        """Set the sandbox policy of all sessions of a tenant on this host. Return the number of sessions."""
        tenant, policy = parse_text(header, "tenant"), parse_policy(header)
        if policy is None:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "'policy' is missing")
        entries = [entry for entry in self._sessions.all() if entry.tenant == tenant]
        for entry in entries:
            self._sessions.update_policy(entry, policy)
            await asyncio.sleep(0)  # each update may write a file: let other tasks run between two updates
        return len(entries)

    async def _checkpoint(self, name: str, *, is_automatic: bool) -> dict[str, Any]:
        """Save a checkpoint of a session. An automatic checkpoint (`is_automatic`) was not requested by a client, so it
        does not count as a use of the session.
        """
        entry = self._sessions.find(name)
        used_at = entry.used_at if entry is not None else 0.0
        session, _ = await self._sessions.use(name)
        # One checkpoint at a time: files that their owner may not read are readable only while they are packed. Of two
        # tasks, the first to end would make the files unreadable for the other.
        async with session.checkpointing:
            _, sandbox = await self._sessions.use(name)
            used_before = session.used_at
            max_bytes = count_max_bytes(session.plan.workspace_bytes, session.plan.workspace_inodes)
            # Reset the flag before packing: a request that ends during packing may have changed a file that was already
            # packed.
            session.activity.has_written = False
            try:
                saved = await self._checkpoints.save(
                    session.tenant,
                    sandbox,
                    roots=find_roots(is_root=sandbox.spec.is_root),
                    max_bytes=max_bytes,
                    list_changes=partial(sandbox.list_changes, self._spool, session.tenant),
                    is_automatic=is_automatic,
                )
            except BaseException:
                session.activity.has_written = True
                raise
            finally:
                if not is_automatic:
                    session.used_at = time.monotonic()
                elif session.used_at == used_before:
                    session.used_at = used_at
        session.record_checkpoint(saved.id, is_automatic=is_automatic)
        return {
            "checkpoint": saved.id,
            "bytes": saved.bytes,
            "sha256": saved.sha256,
            "skipped": saved.skipped,
            "torn": saved.files_changed,
        }

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
        # Remember the cancel: the call may not have arrived here yet, or may send more requests.
        session.cancelled_calls.append(call_id)
        return False


def parse_moved(header: Mapping[str, Any]) -> SessionMove | None:
    """Return how the session moved here from another host, as a request to open describes it; None when the session did
    not move. Raises ToolFailure.
    """
    move = header.get("moved")
    if move is None:
        return None
    try:
        return SessionMove.model_validate(move)
    except ValidationError as error:
        part = find_invalid(error, SessionMove)
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"'moved' is not the move of a session: {part}") from None
