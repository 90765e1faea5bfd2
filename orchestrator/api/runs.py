"""Runs over HTTP: start, follow, list, cancel and read runs. Any orchestrator of the deployment processes the runs."""

import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Annotated, Any, Self

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.access_views import Page
from toolcrew.contract.calls import Identifier, pick_fields
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.file_ids import is_file_id
from toolcrew.contract.json_limits import is_deeper
from toolcrew.contract.run_spec import (
    CommonLimits,
    ItemEnvironment,
    ModelChoice,
    RunBody,
    RunLimits,
    ToolTimeoutS,
)
from toolcrew.contract.run_views import DurableRunState, RunForks, RunView
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.contract.session_spec import SessionOptions, WorkspaceName
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.api.access import AnyCaller, Caller
from toolcrew.orchestrator.api.exact_json import dump_exactly
from toolcrew.orchestrator.api.idempotency import IdempotencyKey
from toolcrew.orchestrator.api.paging import Cursor, Limit, decode_cursor, page_from
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.api.sse import MEDIA_TYPE, EventStream, ServerEvent
from toolcrew.orchestrator.batches.artifacts import MAX_PATTERNS
from toolcrew.orchestrator.batches.lines import MAX_DEPTH
from toolcrew.orchestrator.http.piece_responses import FileAnswer, PieceResponse, split_pieces
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.operations.views import view_run
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.store.run_events import parse_id

router = APIRouter(prefix="/v1/runs", tags=["runs"], responses=responses())

RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_TYPE = re.compile(r'\{"type": ?"([A-Za-z]{1,64})"')
"""Pattern that finds the type of an event in its JSON text. The text is not parsed but sent as stored, because parsing
for many readers is expensive.
"""
_JSON = {"Content-Type": "application/json"}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Events. The last event is `RunEnded`", "content": {MEDIA_TYPE: {}}}
}


class NewRun(ModelChoice, SessionOptions, CommonLimits):
    """A new run. `history`: earlier messages, in the format of OpenAI's chat API.

    `model`, `dialect` and `profile` null: the values of the orchestrator. `tool_timeout_s`: seconds per call.
    `priority`: runs with a higher priority start first.

    `session`: an open session for the run. Without `session`, the run opens its own session with `image`,
    `network`, sizes, user and `tool_config` as in POST /v1/sessions, and the files of `workspace` or `restore`.
    `workspace`: an upload, artifacts, or a location of the store. `restore`: a checkpoint. `artifacts`: patterns
    below /workspace of the files to store at the end. `tools`: names of the tools that the model may call; null:
    all tools that suit the model. `keep_states`: keep the state of the session before each request to the model, so
    that POST /v1/runs/{id}/fork can start from it. `metadata`: returned with the run. `webhook`: the address that
    receives the end of the run.
    """

    instruction: str = Field(min_length=1, max_length=1024 * 1024)
    history: list[dict[str, Any]] = Field(default_factory=list, max_length=1000)
    tools: list[str] | None = Field(default=None, max_length=200)
    session: Identifier | None = None
    workspace: WorkspaceName | None = None
    artifacts: list[str] = Field(default_factory=list, max_length=MAX_PATTERNS)
    tool_timeout_s: ToolTimeoutS | None = None
    keep_states: bool = False
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    priority: int = Field(default=0, ge=-100, le=100)
    webhook: Webhook | None = None

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        """Reject a run that an orchestrator could not read again, before the run is queued."""
        if is_deeper(self.history, MAX_DEPTH):
            raise ValueError(f"history is nested deeper than {MAX_DEPTH}: reduce the nesting")
        try:
            self.model_dump_json()
        except ValueError as error:
            raise ValueError("a text contains a lone surrogate, which is not a character: remove it") from error
        return self

    def body(self) -> RunBody:
        """Return the instruction, the model settings and the limits of the run."""
        return pick_fields(RunBody, self, limits=pick_fields(RunLimits, self))

    def environment(self) -> ItemEnvironment:
        """Return the session of the run, or the options to open one."""
        return pick_fields(ItemEnvironment, self)


class NewRunForks(BaseModel):
    """A fork of a run. `step`: number of shared steps. `n`: number of new runs."""

    model_config = ConfigDict(extra="forbid")

    step: int = Field(ge=0)
    n: int = Field(default=1, ge=1, le=MAX_FORKS)


class TranscriptView(BaseModel):
    """Messages in the format of OpenAI's chat API."""

    messages: list[dict[str, Any]]


@router.post("", status_code=202, responses=responses(404))
async def start_run(
    body: NewRun,
    caller: AnyCaller,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> RunView:
    """Queue a run. An orchestrator starts the run within a moment. Another orchestrator continues the run if the first
    dies.
    """
    await _check_upload(body.workspace, caller)
    run = await get_runs(caller).start(
        caller.tenant,
        body.body(),
        body.environment(),
        idempotency_key=_own_key(caller, idempotency_key),
        metadata=body.metadata,
        priority=body.priority,
        webhook=body.webhook,
    )
    response.headers["Location"] = f"/v1/runs/{run.id}"
    return view_run(run)


@router.get("")
async def list_runs(
    caller: AnyCaller,
    cursor: Cursor = None,
    limit: Limit = 50,
    state: Annotated[DurableRunState | None, Query(description="Only runs in this state.")] = None,
) -> Page[RunView]:
    """List the tenant's runs, the newest first. A page may be shorter than `limit` and not be the last: check
    `next_cursor`.
    """
    page = await get_runs(caller).list(caller.tenant, cursor=decode_cursor(cursor), limit=limit, state=state)
    return page_from(map(view_run, page.runs), page.next_cursor)


@router.get("/{run_id}", responses=responses(404))
async def get_run(run_id: RunId, caller: AnyCaller) -> RunView:
    """Return the state of a run, with its complete answer."""
    with convert_not_found():
        return view_run(await get_runs(caller).get(caller.tenant, run_id))


@router.post("/{run_id}/cancel", responses=responses(404))
async def cancel_run(run_id: RunId, caller: AnyCaller) -> RunView:
    """Cancel a run: a waiting run at once, a running run within 2 seconds. A run that has ended does not change."""
    with convert_not_found():
        return view_run(await get_runs(caller).cancel(caller.tenant, run_id, actor=caller.identity.actor()))


@router.post("/{run_id}/fork", status_code=202, responses=responses(404))
async def fork_run(
    run_id: RunId,
    body: NewRunForks,
    caller: AnyCaller,
    idempotency_key: IdempotencyKey = None,
) -> RunForks:
    """Queue runs that share the first steps of a run and continue from the state of its session after these steps. The
    run must have been started with `keep_states`; it may still be running. No request to the model and no call of the
    shared steps is repeated.
    """
    with convert_not_found():
        runs = await get_runs(caller).fork(
            caller.tenant, run_id, body.step, body.n, idempotency_key=_own_key(caller, idempotency_key)
        )
    return RunForks(runs=[view_run(run) for run in runs])


@router.get("/{run_id}/transcript", response_model=TranscriptView, responses=responses(404))
async def read_transcript(run_id: RunId, caller: AnyCaller) -> Response:
    """Return the messages of a run: all messages after its end, the messages so far before its end."""
    async with AsyncExitStack() as stack:
        # Limit the transfers of a key: a transcript may have a hundred megabytes, which are in memory until the client
        # has received them.
        await stack.enter_async_context(caller.app_state.files.enter(caller.identity.key_id))
        with convert_not_found():
            pieces = await stack.enter_async_context(get_runs(caller).open_transcript(caller.tenant, run_id))
            if pieces is not None:
                return PieceResponse(_build_body(pieces), _JSON, stack.pop_all())
            messages, memory = await stack.enter_async_context(get_runs(caller).hold_transcript(caller.tenant, run_id))
        data = await in_tenant_thread(caller.tenant, dump_exactly, {"messages": messages})
        return FileAnswer(split_pieces(data), memory, _JSON, stack.pop_all())


async def _build_body(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the JSON object of a transcript."""
    yield b'{"messages":'
    for piece in pieces:
        yield piece
    yield b"}"


@router.get("/{run_id}/events", response_class=Response, responses={**responses(404), **_STREAM})
async def follow_run(
    run_id: RunId,
    caller: AnyCaller,
    last_event_id: Annotated[
        str | None, Header(max_length=64, description="The id of the last event that the client has.")
    ] = None,
    after: Annotated[
        str | None, Query(max_length=64, description="The same as Last-Event-ID, for clients that cannot set it.")
    ] = None,
) -> Response:
    """Stream the events of a run until its end, from the beginning or after the event with the given id.

    A client continues an interrupted stream with the id of the last event.
    """
    # Errors before the start of the stream are returned as problems.
    start, runs = parse_id(last_event_id or after or ""), get_runs(caller)
    with convert_not_found():
        await runs.get(caller.tenant, run_id)
    return EventStream(
        caller.event_streams.counted(_build_server_events(caller, runs.follow(caller.tenant, run_id, start)))
    )


async def _build_server_events(caller: Caller, events: AsyncIterator[tuple[str, str]]) -> AsyncIterator[ServerEvent]:
    """Yield the events until the run ends or the API key is revoked. A new request with a revoked key is rejected."""
    try:
        async for id_, text in events:
            # A stream can run for hours, so every event requires that the key is still valid.
            with suppress(BrokerUnavailable):
                # An unavailable Redis does not end the stream of a valid key.
                await caller.credential.check(caller.tenant)
            kind = _TYPE.match(text)
            yield ServerEvent(kind[1] if kind is not None else "message", text, id_)
    except ToolFailure as failure:
        if failure.code is not ErrorCode.UNAUTHENTICATED:
            raise
    except BrokerUnavailable:
        # Redis became unavailable at the start of the stream. The client reconnects.
        return
    finally:
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


@contextmanager
def convert_not_found() -> Iterator[None]:
    """Context manager that converts the error for a missing run to the problem NOT_FOUND."""
    try:
        yield
    except ToolFailure as failure:
        if failure.code is not ErrorCode.FILE_NOT_FOUND:
            raise
        raise ApiProblem(ApiCode.NOT_FOUND, f"{failure.message} (GET /v1/runs)") from failure


def get_runs(caller: Caller) -> DurableRuns:
    """Return the durable runs of the deployment."""
    return caller.app_state.parts.runs


def _own_key(caller: Caller, key: str | None) -> str | None:
    """Return the Idempotency-Key of the request together with the id of the API key, so that two API keys can use the
    same Idempotency-Key.
    """
    return hashlib.sha256(f"{caller.identity.key_id}\0{key}".encode()).hexdigest()[:32] if key else None


async def _check_upload(workspace: str | None, caller: Caller) -> None:
    """Raise ToolFailure(FILE_NOT_FOUND) when the workspace is an upload that the tenant does not have."""
    settings = caller.app_state.settings
    if workspace is not None and is_file_id(workspace) and settings.workspace_store is not None:
        await caller.app_state.stored_files().get(caller.tenant, workspace)
