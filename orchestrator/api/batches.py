"""Batches over HTTP: a client submits lines and reads rows. The orchestrators of all tenants run the items."""

import asyncio
import hashlib
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.access_views import Page
from toolcrew.contract.calls import pick_fields
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.file_ids import TenantStore, is_file_id
from toolcrew.contract.run_events import FailureKind
from toolcrew.contract.run_spec import RunLimits
from toolcrew.contract.run_views import BatchOptions, BatchStatus, SubmittedBatch
from toolcrew.contract.session_spec import pick_options
from toolcrew.contract.strict_json import InvalidJson, parse_object
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.api.access import AnyCaller, Caller
from toolcrew.orchestrator.api.idempotency import IdempotencyKey
from toolcrew.orchestrator.api.paging import Cursor, Limit, decode_cursor, page_from
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.batches.lines import MAX_SHOWN, BadBatch, BatchFile, ErrorCollector, LineError, read_lines
from toolcrew.orchestrator.batches.rows import build_row, build_row_line
from toolcrew.orchestrator.http.piece_responses import PieceResponse
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.runs.batch_status import build_status
from toolcrew.orchestrator.runs.client_batches import ClientBatches
from toolcrew.store.audit import entry_text
from toolcrew.store.batches import BatchDefaults
from toolcrew.store.idempotency import KEEP_S

router = APIRouter(prefix="/v1/batches", tags=["batches"], responses=responses())

SMALL_BYTES = 256 * 1024
"""Limit of a small batch, in bytes.

Larger batches occupy much memory. Each key sends at most one large batch at a time, and the process parses one large
batch at a time.
"""
_SENDING: set[str] = set()
_LARGE = asyncio.Lock()
ROWS_TYPE = "application/jsonl"
BatchId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
JSON_TYPE, JSON_FORM_BYTES, JSON_FORM_VALUES = "application/json", 2 * 1024 * 1024, 100_000
"""Media type and limits of a body that is one JSON object instead of JSON lines."""
_LINES = {"schema": {"type": "string"}, "example": '{"id": "first", "instruction": "Count the files."}\n'}
_OBJECT = {
    "schema": {
        "title": "BatchLines",
        "type": "object",
        "required": ["lines"],
        "properties": {"lines": {"type": "array", "items": {"type": "object", "additionalProperties": True}}},
    },
    "example": {"lines": [{"id": "first", "instruction": "Count the files."}]},
}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {JSON_TYPE: _OBJECT, ROWS_TYPE: _LINES, "application/x-ndjson": _LINES, "text/plain": _LINES},
    }
}


class Retry(BaseModel):
    """Selection of failed items to retry."""

    model_config = ConfigDict(extra="forbid")

    kinds: list[FailureKind] = [FailureKind.INFRASTRUCTURE]


class RetryResult(BaseModel):
    """Result of a retry. `items`: number of items that run again."""

    items: int


@router.post("", status_code=201, openapi_extra=_BODY)
async def submit_batch(
    request: Request,
    caller: AnyCaller,
    options: Annotated[BatchOptions, Query()],
    response: Response,
    idempotency_key: IdempotencyKey = None,
    webhook_secret: Annotated[
        str | None, Header(max_length=256, description="The secret that signs the webhook.")
    ] = None,
) -> SubmittedBatch:
    """Submit a batch: queue every line of the body.

    Each line is one JSON object, in the short form (`id`, `instruction`) or in the form of OpenAI's batches. All lines
    are validated first, including the names of tools and the arguments of calls. With the type application/json, a body
    of at most 2 MiB may be one object instead: `{"lines": [...]}`.
    """
    webhook = _build_webhook(options.webhook_url, webhook_secret)
    runs, errors = _runs(caller), ErrorCollector()
    try:
        file = await _read(
            request, caller.identity.key_id, TenantStore(caller.app_state.settings.workspace_store, caller.tenant)
        )
    except BadBatch as error:
        if error.file is None:
            raise
        file, errors = error.file, ErrorCollector(error)
    with errors.check():
        await _check_uploads(caller, file)
    limits, sandbox = pick_fields(RunLimits, options), pick_options(options)
    defaults = pick_fields(BatchDefaults, options, limits=limits, options=sandbox, asks_people=options.ask)
    warnings = list[str]()
    with errors.check():
        warnings = await runs.check_tools(file, "the body")
    with errors.check():
        await runs.check_models(file, defaults, "the body")
    with errors.check():
        await runs.check_limits(file, defaults, "the body")
    errors.raise_if_any()
    submission = f"{caller.identity.key_id}\0{idempotency_key}\0{options.model_dump_json()}\0{file.sha256}"
    # A submission that was interrupted continues when the client sends it again. The batch id is derived from the
    # submission, so that each item is queued only once.
    named = await _batch_of(submission, runs) if idempotency_key and options.id is None else None
    batch = await runs.batches.submit(
        file,
        batch=named or options.id,
        concurrency=options.concurrency,
        defaults=defaults,
        name=options.name,
        is_detached=True,
        goes_on=named is None,
        webhook=webhook,
    )
    response.headers["Location"] = f"/v1/batches/{batch}"
    view = await _view(runs, batch)
    return SubmittedBatch(**view.model_dump(), warnings=warnings)


@router.get("")
async def list_batches(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 50) -> Page[BatchStatus]:
    """List the tenant's batches, the newest first. Batches are stored for 30 days.

    A page may be shorter than `limit` and not be the last: check `next_cursor`.
    """
    runs = _runs(caller)
    page = await runs.queue.batches.list_batches(runs.tenant, decode_cursor(cursor) or "", limit)
    counts = await asyncio.gather(*(runs.queue.batches.counts(runs.tenant, batch) for batch in page.batches))
    views = [
        build_status(batch, record, some) for (batch, record), some in zip(page.batches.items(), counts, strict=True)
    ]
    return page_from(views, page.cursor)


@router.get("/{batch_id}", responses=responses(404))
async def get_batch(batch_id: BatchId, caller: AnyCaller) -> BatchStatus:
    """Return the state of a batch."""
    return await _view(await _find_batch(caller, batch_id), batch_id)


@router.post("/{batch_id}/cancel", responses=responses(404))
async def cancel_batch(batch_id: BatchId, caller: AnyCaller) -> BatchStatus:
    """Cancel a batch: start no further items and end the running items."""
    runs = await _find_batch(caller, batch_id)
    await caller.record_foreign_action("batch.cancel", batch_id)
    await runs.batches.cancel(batch_id)
    return await _view(runs, batch_id)


@router.delete("/{batch_id}", status_code=204, responses=responses(404))
async def delete_batch(batch_id: BatchId, caller: AnyCaller) -> None:
    """Delete an ended batch with its items and results. Stored artifacts expire later."""
    entry = caller.foreign_entry("batch.delete", batch_id)
    try:
        await _runs(caller).batches.delete(batch_id, entry_text(entry) if entry is not None else "")
    except ToolFailure:
        await _find_batch(caller, batch_id)
        raise


@router.post("/{batch_id}/retry", responses=responses(404))
async def retry_batch(batch_id: BatchId, body: Retry, caller: AnyCaller) -> RetryResult:
    """Retry the failed items with the selected kinds of failure."""
    runs = await _find_batch(caller, batch_id)
    entry = caller.foreign_entry("batch.retry", batch_id)
    return RetryResult(
        items=await runs.batches.resume(batch_id, body.kinds, entry_text(entry) if entry is not None else "")
    )


@router.get(
    "/{batch_id}/results",
    response_class=Response,
    responses={**responses(404), 200: {"description": "One row per line", "content": {ROWS_TYPE: {}}}},
)
async def batch_results(batch_id: BatchId, caller: AnyCaller) -> Response:
    """Return the rows of all finished items, succeeded and failed, as one JSON object per line."""
    runs = await _find_batch(caller, batch_id)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(caller.app_state.files.enter(caller.identity.key_id))
        return PieceResponse(_rows(runs, batch_id), {"Content-Type": ROWS_TYPE}, stack.pop_all())


async def _rows(runs: ClientBatches, batch: str) -> AsyncIterator[bytes]:
    async with aclosing(runs.outcomes(batch)) as outcomes:
        async for outcome in outcomes:
            yield build_row_line(build_row(outcome))


async def _batch_of(submission: str, runs: ClientBatches) -> str:
    """Return the id of the batch for a submission.

    The id is the same when the submission was sent before. After a day, a submission gets a new id.
    """
    number = 0
    while True:
        batch = "batch-" + hashlib.sha256(f"batch\0{submission}\0{number}".encode()).hexdigest()[:24]
        try:
            status = await runs.batches.status(batch)
        except ToolFailure:
            return batch
        if time.time() - status.created_at < KEEP_S:
            return batch
        number += 1


def _runs(caller: Caller) -> ClientBatches:
    return caller.client.batch_runs(has_traces=False)


async def _find_batch(caller: Caller, batch: str) -> ClientBatches:
    """Return the tenant's batches after a check that `batch` exists. Raises ApiProblem when the
    batch does not exist.
    """
    runs = _runs(caller)
    try:
        await runs.batches.status(batch)
    except ToolFailure as error:
        raise ApiProblem(
            ApiCode.NOT_FOUND, f"tenant {caller.tenant} has no batch {batch}: GET /v1/batches lists them"
        ) from error
    return runs


async def _view(runs: ClientBatches, batch: str) -> BatchStatus:
    return build_status(batch, await runs.batches.status(batch), await runs.queue.batches.counts(runs.tenant, batch))


def _build_webhook(url: str | None, secret: str | None) -> Webhook | None:
    if url is None and secret is None:
        return None
    try:
        return Webhook(url=url or "", secret=secret or "")
    except ValidationError:
        raise ApiProblem(
            ErrorCode.INVALID_ARGUMENTS,
            "a webhook needs `webhook_url` (http or https) and the header Webhook-Secret (whsec_ and 24 to 64 "
            "bytes in base64): send both",
        ) from None


async def _check_uploads(caller: Caller, file: BatchFile) -> None:
    """Raise BadBatch for lines with a workspace, or files of a grader, that the tenant has not uploaded."""
    # In a thread, because each pass parses large items again.
    lines = await in_tenant_thread(caller.tenant, _find_uploads, file)
    missing = await caller.app_state.stored_files().find_missing(caller.tenant, lines) if lines else []
    if missing:
        errors = [
            LineError(f"tenant {caller.tenant} has no file {name}: upload it (POST /v1/files)", lines[name])
            for name in missing
        ]
        raise BadBatch("the body", errors[:MAX_SHOWN], max(0, len(errors) - MAX_SHOWN))


def _find_uploads(file: BatchFile) -> dict[str, int]:
    """Return the first line that names each file of the store."""
    lines = dict[str, int]()
    for item in file.items:
        for path in filter(is_file_id, item.sources):
            lines.setdefault(path, item.line)
    return lines


async def _read(request: Request, key: str, store: TenantStore) -> BatchFile:
    """Read and parse the lines of the body.

    Raises BadBatch with all errors of the lines, and ApiProblem when the key already sends a large batch.
    """
    body = io.BytesIO()
    pieces = request.stream()
    async for piece in pieces:
        body.write(piece)
        if body.tell() > SMALL_BYTES:
            break
    else:
        return await _parsed(body, store, request)
    # One large body per key, because each body occupies memory while a slow client sends it.
    if key in _SENDING:
        raise ApiProblem(
            ErrorCode.RATE_LIMITED,
            "another large batch is being sent with this key: send this one afterwards",
            headers={"Retry-After": "10"},
        )
    _SENDING.add(key)
    try:
        async for piece in pieces:
            body.write(piece)
    finally:
        _SENDING.discard(key)
    # The lock is taken after the body is complete. Otherwise a slow client would block all other clients.
    async with _LARGE:
        return await _parsed(body, store, request)


async def _parsed(body: io.BytesIO, store: TenantStore, request: Request) -> BatchFile:
    is_json = request.headers.get("content-type", "").lower().startswith(JSON_TYPE)
    return await in_tenant_thread(store.tenant, _parse, body, store, is_json and body.tell() <= JSON_FORM_BYTES)


def _parse(body: io.BytesIO, store: TenantStore, may_be_object: bool) -> BatchFile:
    body.seek(0)
    lines = _unpack_lines(body.getvalue()) if may_be_object else None
    return read_lines(body if lines is None else io.BytesIO(lines), None, "the body", store)


def _unpack_lines(body: bytes) -> bytes | None:
    """Return the JSON lines of a body that is an object with `lines`; None for a body that has lines itself."""
    try:
        fields = parse_object(body.decode(), JSON_FORM_VALUES)
    except (InvalidJson, UnicodeDecodeError):
        return None
    if fields.keys() != {"lines"} or not isinstance(fields["lines"], list):
        return None
    return "".join(f"{json.dumps(line)}\n" for line in fields["lines"]).encode()
