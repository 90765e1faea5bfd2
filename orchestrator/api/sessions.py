"""Sessions over HTTP: open, read, list and close sessions, run programs, and read and write folders as archives."""

from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.access_views import Page
from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S, ExecResult, pick_fields
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.process_views import MAX_PATH_BYTES
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.contract.session_spec import DEFAULT_TTL_S, SessionOptions, SessionSpec, TtlS
from toolcrew.contract.session_views import (
    Base64,
    Checkpoint,
    ExecView,
    Forks,
    OpenSession,
    SessionView,
    UsageAmounts,
)
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.idempotency import IdempotencyKey, find_call_id
from toolcrew.orchestrator.api.paging import Cursor, Limit, decode_cursor, page_from
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.piece_responses import FileAnswer, split_pieces, while_connected
from toolcrew.orchestrator.sessions.session import Session, SessionInfo

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], responses=responses())

SESSION_ID = r"^[A-Za-z0-9_-]{1,64}$"
SessionId = Annotated[str, Path(pattern=SESSION_ID)]
FolderPath = Annotated[str, Query(description="An absolute path of the sandbox, or a path below /workspace.")]
WORKSPACE = "/workspace"
CLIENT_LEFT = 499
"""Status for logs of a response that no client receives."""
_BYTES = {
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


class NewSession(SessionOptions):
    """A new session. `ttl_s`: seconds without a call after which the session expires.

    `network`, sizes or `user` null: the value of the tenant's class. Sizes are in bytes; `cpus` are processors, `pids`
    processes and threads. `user` root: root of the sandbox only. `restore`: a checkpoint; the session starts with its
    files. `tool_config`: name of a tool -> the object that the tool reads as its configuration; at most 64 KiB of JSON.
    """

    ttl_s: TtlS = DEFAULT_TTL_S


class SessionChange(BaseModel):
    """A change of a session. `ttl_s`: seconds without a call after which the session expires."""

    model_config = ConfigDict(extra="forbid")

    ttl_s: TtlS


class NewExec(BaseModel):
    """A program without a shell. `argv`: the program and its arguments. `stdin`: its input, in base64. `env`: variables
    in addition to those of the session. `cwd` null: /workspace. `timeout_s`: limit in seconds.
    """

    model_config = ConfigDict(extra="forbid")

    argv: list[str] = Field(min_length=1, max_length=4096)
    stdin: Base64 = b""
    env: dict[str, str] = Field(default_factory=dict, max_length=1024)
    cwd: str | None = Field(default=None, max_length=MAX_PATH_BYTES)
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0, le=LONGEST_TIMEOUT_S)


class NewForks(BaseModel):
    """A fork. `n`: number of new sessions. `leave_jobs`: background jobs continue in the original session only. Without
    `leave_jobs`, a session with a background job is not forked.
    """

    model_config = ConfigDict(extra="forbid")

    n: int = Field(default=1, ge=1, le=MAX_FORKS)
    leave_jobs: bool = False


@router.post("", status_code=201)
async def open_session(
    body: NewSession, caller: AnyCaller, response: Response, idempotency_key: IdempotencyKey = None
) -> SessionView:
    """Open a session with its own sandbox. The session ends when it is deleted, or after `ttl_s` seconds without a
    call. The same Idempotency-Key returns the same open session for a day after its last use.
    """
    # Another API key of the tenant may use the same Idempotency-Key for another session.
    key = f"{caller.identity.key_id} {idempotency_key}" if idempotency_key is not None else None
    session = await caller.client.open_session_from(pick_fields(SessionSpec, body), key=key)
    response.headers["Location"] = f"/v1/sessions/{session.id}"
    return view_session(await session.info())


@router.get("")
async def list_sessions(
    caller: AnyCaller,
    cursor: Cursor = None,
    limit: Limit = 50,
    everybody: Annotated[bool, Query(description="Include all tenants, for operators' keys.")] = False,
) -> Page[OpenSession]:
    """List open sessions, the newest first."""
    if everybody and not caller.is_operator:
        raise ToolFailure(ErrorCode.PERMISSION_DENIED, "only operators may use `everybody`: omit it")
    page = await caller.client.sessions(
        tenant=None if everybody else caller.tenant, cursor=decode_cursor(cursor), limit=limit
    )
    return page_from(page.sessions, page.cursor)


@router.get("/{session_id}", responses=responses(404))
async def get_session(session_id: SessionId, caller: AnyCaller) -> SessionView:
    """Return a session with its host and sandbox, and what it used."""
    view = view_session(await (await caller.client.session(session_id)).info())
    return view.model_copy(update={"usage": UsageAmounts(**await caller.client.session_usage(session_id))})


@router.patch("/{session_id}", responses=responses(404))
async def change_session(session_id: SessionId, body: SessionChange, caller: AnyCaller) -> SessionView:
    """Change how long a session lives without a call. The time begins again with this request."""
    session = await use_session(caller, session_id)
    await session.set_ttl(body.ttl_s)
    return view_session(await session.info())


@router.delete("/{session_id}", status_code=204, responses=responses(404))
async def close_session(session_id: SessionId, caller: AnyCaller) -> None:
    """Close a session. Returns after its container is removed."""
    session = await caller.client.session(session_id)
    await caller.record_foreign_action("session.close", session_id)
    await session.close()


@router.post("/{session_id}/checkpoints", status_code=201, responses=responses(404))
async def checkpoint_session(session_id: SessionId, caller: AnyCaller) -> Checkpoint:
    """Store a checkpoint of the session's files and shell. New sessions can start from the checkpoint."""
    return await (await use_session(caller, session_id)).checkpoint()


@router.post("/{session_id}/fork", status_code=201, responses=responses(404, 409))
async def fork_session(session_id: SessionId, body: NewForks, caller: AnyCaller) -> Forks:
    """Make sessions with the files, the shell state and the limits of a session, which continues. A new session gets
    its sandbox at its first call.
    """
    session = await caller.client.session(session_id)
    await caller.record_foreign_action("session.fork", session_id)
    forks = await session.fork(body.n, leave_jobs=body.leave_jobs)
    return Forks(sessions=[view_session(await fork.info()) for fork in forks])


@router.post("/{session_id}/exec", response_model=ExecView, responses=responses(404))
async def exec_program(
    session_id: SessionId,
    body: NewExec,
    caller: AnyCaller,
    request: Request,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Run a program without a shell, and return its whole output. Unlike a tool call, it needs no approval of a person
    and its output is not cut for a model. The program is killed when the client disconnects, unless the request has an
    Idempotency-Key: the same request then waits for it, or gets its result while that is stored.
    """
    async with AsyncExitStack() as stack:
        session = await use_session(caller, session_id)
        call_id = find_call_id("exec", caller.identity.key_id, idempotency_key)
        held = session.hold_exec(**dict(body), call_id=call_id)
        try:
            result, memory = await while_connected(request.receive, stack.enter_async_context(held))
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        data = await in_tenant_thread(caller.tenant, _dump_exec, result)
        return FileAnswer(split_pieces(data), memory, {"Content-Type": "application/json"}, stack.pop_all())


def _dump_exec(result: ExecResult) -> bytes:
    return ExecView(**dict(result)).model_dump_json().encode()


@router.get(
    "/{session_id}/archive",
    response_class=Response,
    responses={**responses(404), 200: {"description": "A tar archive", "content": {"application/x-tar": {}}}},
)
async def read_session_archive(session_id: SessionId, caller: AnyCaller, path: FolderPath = WORKSPACE) -> Response:
    """Return a folder of the sandbox as a tar archive, at most 64 MiB. Programs of the session made its content."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(caller.app_state.files.enter(caller.identity.key_id))
        session = await _with_path(caller, session_id, path)
        pieces, memory = await stack.enter_async_context(session.hold_archive(path))
        headers = {"Content-Type": "application/x-tar", "Cache-Control": "no-store"}
        return FileAnswer(pieces, memory, headers, stack.pop_all())


@router.put("/{session_id}/archive", status_code=204, responses=responses(404), openapi_extra={"requestBody": _BYTES})
async def write_session_archive(
    session_id: SessionId, caller: AnyCaller, request: Request, path: FolderPath = WORKSPACE
) -> None:
    """Unpack a tar archive into a folder of the sandbox, which is created. The limit is 64 MiB."""
    async with caller.app_state.files.enter(caller.identity.key_id):
        session = await _with_path(caller, session_id, path)
        await session.import_archive(await request.body(), path)


async def _with_path(caller: AnyCaller, session_id: str, path: str) -> Session:
    if not path or "\0" in path or len(path.encode("utf-8", "replace")) > MAX_PATH_BYTES:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the path of the file is invalid: use 1 to {MAX_PATH_BYTES} bytes without a zero byte",
        )
    return await use_session(caller, session_id)


async def use_session(caller: AnyCaller, session_id: str) -> Session:
    """Return an open session for a request that runs programs, or reads or writes files. An operator's use of another
    tenant's session is written to the audit log.
    """
    session = await caller.client.session(session_id)
    await caller.record_foreign_action("session.use", session_id)
    return session


def view_session(info: SessionInfo) -> SessionView:
    """Build the view of a session for clients."""
    sandbox = info.sandbox
    return SessionView(
        id=info.session,
        tenant=info.tenant,
        host=info.host,
        image=info.image,
        network=info.network,
        hosts=list(info.hosts),
        sandbox=sandbox.id if sandbox is not None else "",
        generation=sandbox.generation if sandbox is not None else 1,
        timeout_s=info.timeout_s,
        **info.options.model_dump(),
    )
