"""Import of workspaces from files of the store, and export of artifacts to the store. The sandboxd of the session's
host streams the data.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from toolcrew.archives.base import ArchiveStore, NotStored, StoredFacts, join_chunks, read_head
from toolcrew.contract.archive_kinds import HEAD_BYTES, SUPPORTED_KINDS, find_kind
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.file_ids import MAX_WORKSPACE_BYTES, NO_STORE, is_file_id, is_location, parse_location
from toolcrew.workers.sandboxd.archives.imports import build_import, check_import
from toolcrew.workers.sandboxd.archives.packing import Packing, PackingGuest, pack_list, run_with_file, stream_in
from toolcrew.workers.sandboxd.budgets import MemoryBudget

WHOLE_S = 500.0
"""Time limit for the import or export of one workspace, in seconds. It is shorter than the time that workers wait for
an answer.
"""
_FOLDER = "/workspace"
_SEEKING_KINDS = ("zip", "bundle")
"""Archive kinds whose programs cannot read a pipe."""


@dataclass(frozen=True)
class _Source:
    """A file of the store: its size and its bytes."""

    size: int
    chunks: AsyncGenerator[bytes]


class WorkspaceFiles:
    """Copies files between sandboxes and the store. `setting`: the value of TOOLCREW_WORKSPACE_STORE; None if it is not
    set, so that hosts share no store. `memory`: the budget of all archives.

    All methods raise SandboxUnavailable when the store fails or the sandbox is lost.
    """

    def __init__(
        self,
        store: ArchiveStore,
        setting: str | None,
        *,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._store = store
        self._memory = memory or MemoryBudget()
        self._setting = setting

    async def load(self, tenant: str, workspace: str, sandbox: PackingGuest) -> None:
        """Unpack a file of the tenant, an archive or a git bundle, into the empty workspace of a sandbox. `workspace`:
        an id or a location.

        Raises ToolFailure: FILE_NOT_FOUND, PATH_NOT_ALLOWED, FILE_TOO_LARGE, INVALID_ARGUMENTS, NO_SPACE, TIMEOUT.
        """
        self._check_shared()
        with _report_errors(workspace):
            source = await self._open(tenant, workspace)
            if source.size > MAX_WORKSPACE_BYTES:
                raise ToolFailure(
                    ErrorCode.FILE_TOO_LARGE,
                    f"the workspace {workspace[:200]} has {source.size} bytes, and the limit is {MAX_WORKSPACE_BYTES}: "
                    "give a smaller one",
                )
            async with (
                asyncio.timeout(WHOLE_S),
                self._memory.hold_archive(tenant),
                contextlib.aclosing(source.chunks) as chunks,
            ):
                await _load(workspace, source.size, chunks, sandbox)

    async def save(self, tenant: str, file: str, names: str, sandbox: PackingGuest) -> StoredFacts:
        """Store files of the workspace as the archive `file`. `names`: a file in the sandbox that lists the names,
        each with a NUL at its end.

        Raises ToolFailure: FILE_TOO_LARGE, TIMEOUT. Also raises the errors of `Packing.chunks`.
        """
        if not is_file_id(file):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, "the id of the file is invalid: use the id that the upload returned"
            )
        self._check_shared()
        packing = Packing(sandbox, pack_list(names, _FOLDER), MAX_WORKSPACE_BYTES)
        with _report_errors(file):
            async with (
                asyncio.timeout(WHOLE_S),
                self._memory.hold_archive(tenant),
                contextlib.aclosing(packing.chunks()) as chunks,
            ):
                return await self._store.put(f"{tenant}/{file}", chunks)

    def _check_shared(self) -> None:
        if self._setting is None:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, NO_STORE)

    async def _open(self, tenant: str, workspace: str) -> _Source:
        if is_file_id(workspace):
            name = f"{tenant}/{workspace}"
            return _Source((await self._store.describe(name)).bytes, self._store.get(name))
        if not is_location(workspace):
            raise NotStored(workspace)
        try:
            path = parse_location(workspace, self._setting, tenant)
        except ValueError as error:
            raise ToolFailure(
                ErrorCode.PATH_NOT_ALLOWED, f"the workspace {workspace[:200]!r} cannot be used: {error}"
            ) from None
        return _Source(await self._store.object_size(path), self._store.read_object(path))


async def _load(workspace: str, size: int, chunks: AsyncGenerator[bytes], sandbox: PackingGuest) -> None:
    head = await read_head(chunks, HEAD_BYTES)
    kind = find_kind(head)
    if kind is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the workspace {workspace[:200]} has an unknown type: use {SUPPORTED_KINDS}"
        )
    argv, read = build_import(kind, _FOLDER), join_chunks(head, chunks)
    if kind in _SEEKING_KINDS:
        # /output is on the disk of the session, which has a quota.
        path = f"/output/.workspace-{secrets.token_hex(8)}"
        done, error_output = await run_with_file(sandbox, argv, read, size, path)
    else:
        done, error_output = await stream_in(sandbox, argv, read, size)
    code = done.get("exit_code")
    check_import(
        kind,
        code if type(code) is int else None,
        error_output,
        timed_out=done.get("timed_out") is True,
        timeout_s=WHOLE_S,
    )


@contextlib.contextmanager
def _report_errors(file: str) -> Iterator[None]:
    """Translate errors of the store to a ToolFailure for the tenant."""
    try:
        yield
    except NotStored:
        raise ToolFailure(
            ErrorCode.FILE_NOT_FOUND,
            f"the tenant has no file {file[:200]!r}: it was deleted, has expired, or was never uploaded. Upload "
            f"it again",
        ) from None
    except TimeoutError:
        raise ToolFailure(
            ErrorCode.TIMEOUT,
            f"the files of {file[:200]} were not copied within {WHOLE_S:g} s: use fewer or smaller files",
        ) from None
