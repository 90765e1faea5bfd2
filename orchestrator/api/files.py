"""Files over HTTP: uploads for workspaces, and artifacts of finished items."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from toolcrew.contract.access_views import Page
from toolcrew.contract.session_views import StoredFile
from toolcrew.orchestrator.api.access import AnyCaller, Caller
from toolcrew.orchestrator.api.paging import Cursor, Limit, decode_cursor, encode_cursor
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.batches.stored_files import StoredFiles
from toolcrew.orchestrator.http.piece_responses import CONTENT, PieceResponse

router = APIRouter(prefix="/v1/files", tags=["files"], responses=responses())

FileId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_CONTENT = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.post("", status_code=201, openapi_extra={"requestBody": {"required": True, "content": _CONTENT}})
async def upload_file(caller: AnyCaller, request: Request, response: Response) -> StoredFile:
    """Upload an archive (tar, compressed tar, or zip) or a git bundle. The body is the file.

    The `workspace` of a run or of a line of a batch can refer to the file by its id. The file is deleted after 30
    days.
    """
    files = _files(caller)
    async with caller.app_state.files.enter(caller.identity.key_id):
        await caller.tenants.check_budgets(caller.tenant)
        stored = await files.upload(caller.tenant, request.stream(), caller.client.stored_bytes)
    response.headers["Location"] = f"/v1/files/{stored.id}"
    return stored


@router.get("")
async def list_files(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 50) -> Page[StoredFile]:
    """List uploads and artifacts of the tenant, the newest first."""
    files, last = await _files(caller).list_page(caller.tenant, decode_cursor(cursor) or "", limit)
    return Page(data=files, next_cursor=encode_cursor(last) if last else None)


@router.get("/{file_id}", responses=responses(404))
async def get_file(file_id: FileId, caller: AnyCaller) -> StoredFile:
    """Return the size and the digest of a file."""
    return await _files(caller).get(caller.tenant, file_id)


@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses={**responses(404), 200: {"description": "The file", "content": {"application/octet-stream": {}}}},
)
async def download_file(file_id: FileId, caller: AnyCaller) -> Response:
    """Return the content of a file. Artifacts are a tar archive with the paths that the row of the item lists."""
    files = _files(caller)
    stored = await files.get(caller.tenant, file_id)
    suffix = ".tar" if file_id.startswith("artifacts-") else ""
    headers = {
        "Content-Type": CONTENT,
        "Content-Length": str(stored.bytes),
        "Content-Disposition": f'attachment; filename="{file_id}{suffix}"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return PieceResponse(_content(caller, files, file_id), headers, AsyncExitStack())


@router.delete("/{file_id}", status_code=204, responses=responses(404))
async def delete_file(file_id: FileId, caller: AnyCaller) -> None:
    """Delete a file. Items that refer to the file and have not started fail."""
    await caller.record_foreign_action("file.delete", file_id)
    await _files(caller).delete(caller.tenant, file_id, caller.client.stored_bytes)


async def _content(caller: Caller, files: StoredFiles, file: str) -> AsyncGenerator[bytes]:
    async with caller.app_state.files.enter(caller.identity.key_id):
        async for chunk in files.read(caller.tenant, file):
            yield chunk


def _files(caller: Caller) -> StoredFiles:
    """Return the store of files. Raises ConfigError when the deployment has no store."""
    return caller.app_state.stored_files()
