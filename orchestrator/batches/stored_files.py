"""Uploads and artifacts of tenants in the store, for the API and the commands."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

from toolcrew.archives.base import ArchiveStore, NotStored, in_pieces
from toolcrew.archives.choice import open_client_store
from toolcrew.contract.archive_kinds import HEAD_BYTES, SUPPORTED_KINDS, find_kind
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.file_ids import (
    KEEP_S,
    MAX_WORKSPACE_BYTES,
    NO_STORE,
    file_created_at,
    is_file_id,
    is_upload,
    new_file_id,
)
from toolcrew.contract.session_views import StoredFile
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.store.stored_bytes import StoredBytes, UploadReservation
from toolcrew.store.usage import StoredChange

MAX_UPLOADS = 1000
"""Maximum number of uploads that a tenant may have at a time."""
_PIECE_BYTES = 1024 * 1024
_RESERVE_BYTES = 8 * 1024 * 1024
"""Bytes that an upload reserves in advance. So each of its pieces needs no request to Redis."""
REPAIR_AGE_S = 3600.0
"""Age of a file in seconds before its missing record is repaired: younger files may still be uploaded."""
_MAX_REPAIRS = 1000
_MAX_PARALLEL_CHECKS = 16


class StoredFiles:
    """Files of all tenants. Methods raise SandboxUnavailable when the store fails.

    Methods raise ToolFailure(FILE_NOT_FOUND) for a file that the tenant does not have.
    """

    def __init__(self, store: ArchiveStore, max_bytes: int = MAX_WORKSPACE_BYTES) -> None:
        """Use the archives of `store`. `max_bytes`: limit of one upload, in bytes."""
        self._store = store
        self._max_bytes = max_bytes

    @classmethod
    def of(cls, settings: OrchestratorSettings) -> "StoredFiles":
        """Open the store of the settings. Raises ConfigError: the settings name no store."""
        if settings.workspace_store is None:
            raise ConfigError(NO_STORE)
        # Uploads stop before checkpoints do: other tenants need these to keep their sessions.
        return cls(open_client_store(settings.workspace_store, 2 * settings.host_free_bytes))

    async def upload(self, tenant: str, chunks: AsyncIterator[bytes], stored: StoredBytes) -> StoredFile:
        """Store an archive or a git bundle, and count its bytes. The content is streamed and not held in memory. A
        failed upload leaves nothing in the store.

        Raises ToolFailure: INVALID_ARGUMENTS for another kind of file, FILE_TOO_LARGE, QUOTA_EXCEEDED. Raises
        SandboxUnavailable: the disk of the store has too little free space. Raises BrokerUnavailable when Redis does
        not answer.
        """
        ids = await self._ids(tenant)
        await self._repair(tenant, ids, stored)
        if len([file for file in ids if is_upload(file)]) >= MAX_UPLOADS:
            raise ToolFailure(
                ErrorCode.QUOTA_EXCEEDED,
                f"tenant {tenant} has reached the limit of {MAX_UPLOADS} uploads: delete some uploads",
            )
        file = new_file_id("file")
        async with stored.reserving(tenant, file) as reservation:
            await self._store.put(f"{tenant}/{file}", self._reserve_pieces(chunks, reservation))
            uploaded = await self.get(tenant, file)
            await self._record(tenant, uploaded, stored, reservation)
        return uploaded

    async def get(self, tenant: str, file: str) -> StoredFile:
        """Return the size, hash and creation time of a file."""
        created_at = file_created_at(file)
        if created_at is None:
            raise _build_not_found_error(file)
        try:
            facts = await self._store.describe(f"{tenant}/{file}")
        except NotStored:
            raise _build_not_found_error(file) from None
        return StoredFile(
            id=file,
            bytes=facts.bytes,
            sha256=facts.sha256,
            created_at=created_at,
            expires_at=created_at + KEEP_S,
        )

    async def read(self, tenant: str, file: str) -> AsyncGenerator[bytes]:
        """Yield the content of a file. Raises SandboxUnavailable at the end if the content is damaged."""
        await self.get(tenant, file)
        try:
            async for chunk in self._store.get(f"{tenant}/{file}"):
                yield chunk
        except NotStored:
            raise _build_not_found_error(file) from None

    async def delete(self, tenant: str, file: str, stored: StoredBytes) -> None:
        """Delete a file, and subtract its bytes from the usage once, even if other requests delete it at the same time.
        Raises BrokerUnavailable when Redis does not answer.
        """
        if not is_file_id(file):
            raise _build_not_found_error(file)
        was_there = await self._store.delete(f"{tenant}/{file}")
        # A process that died after the deletion has left the record.
        if not await stored.change(tenant, StoredChange(file, None)) and not was_there:
            raise _build_not_found_error(file)

    async def list_page(self, tenant: str, before: str = "", limit: int = 50) -> tuple[list[StoredFile], str | None]:
        """Return the newest files that are older than `before`, and the id of the last file if there are more."""
        ids = sorted(await self._ids(tenant), key=_age, reverse=True)
        later = [file for file in ids if not before or _age(file) < _age(before)]
        results = await asyncio.gather(*(self.get(tenant, file) for file in later[:limit]), return_exceptions=True)
        files = list[StoredFile]()
        for result in results:
            # A file may be deleted or expire between the listing and the look-up, so a missing file is skipped.
            if isinstance(result, StoredFile):
                files.append(result)
            elif not isinstance(result, ToolFailure):
                raise result
        return files, later[limit - 1] if len(later) > limit else None

    async def find_missing(self, tenant: str, files: Iterable[str]) -> list[str]:
        """Return the ids in `files` that the tenant does not have."""
        slots, missing = asyncio.Semaphore(_MAX_PARALLEL_CHECKS), list[str]()

        async def check(file: str) -> None:
            async with slots:
                try:
                    await self.get(tenant, file)
                except ToolFailure:
                    missing.append(file)

        await asyncio.gather(*(check(file) for file in sorted(set(files))))
        return missing

    async def _record(self, tenant: str, file: StoredFile, stored: StoredBytes, reservation: UploadReservation) -> None:
        try:
            # The reservation may have been lost while Redis did not answer, and another upload may have its bytes.
            await reservation.reserve(file.bytes)
            await stored.change(tenant, StoredChange(file.id, file.bytes))
        except (BrokerUnavailable, ToolFailure):
            await self._store.delete(f"{tenant}/{file.id}")
            raise

    async def _repair(self, tenant: str, ids: Iterable[str], stored: StoredBytes) -> None:
        """Compare the tenant's files with their records, at most once per hour. A process that dies may leave one
        without the other.
        """
        if not await stored.begin_repair(tenant):
            return
        recorded, present, before = await stored.list_recorded(tenant), set(ids), time.time() - REPAIR_AGE_S
        # Files that expire are not subtracted from the usage: their records expire too.
        differing = [file for file in recorded ^ present if before - KEEP_S < (file_created_at(file) or 0.0) < before]
        for file in differing[:_MAX_REPAIRS]:
            try:
                await stored.change(tenant, StoredChange(file, (await self.get(tenant, file)).bytes))
            except ToolFailure:
                await stored.change(tenant, StoredChange(file, None))

    async def _ids(self, tenant: str) -> list[str]:
        """Return the ids of all files of the tenant."""
        names = await self._store.list(f"{tenant}/")
        return [file for name in names if is_file_id(file := name.partition("/")[2])]

    async def _reserve_pieces(
        self, chunks: AsyncIterator[bytes], reservation: UploadReservation
    ) -> AsyncIterator[bytes]:
        """Yield the received pieces of an upload. Their bytes are reserved first. Raises ToolFailure."""
        total = reserved = 0
        async for piece in self._check_pieces(in_pieces(chunks, _PIECE_BYTES)):
            total += len(piece)
            if total > reserved:
                # Only the last piece is shorter.
                reserved = total + (_RESERVE_BYTES if len(piece) == _PIECE_BYTES else 0)
                await reservation.reserve(reserved)
            yield piece

    async def _check_pieces(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the received pieces of an upload. Raises ToolFailure as soon as the content is invalid or too large."""
        total = 0
        async for piece in pieces:
            # The kind is checked on the first piece, so that a wrong file is rejected before the rest is uploaded.
            if total == 0 and find_kind(piece[:HEAD_BYTES]) is None:
                raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the file has an unknown type: use {SUPPORTED_KINDS}")
            total += len(piece)
            if total > self._max_bytes:
                raise ToolFailure(
                    ErrorCode.FILE_TOO_LARGE,
                    f"the file is larger than the limit of {self._max_bytes} bytes: use a smaller file",
                )
            yield piece
        if total == 0:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the file is empty: use {SUPPORTED_KINDS}")


def _age(file: str) -> tuple[float, str]:
    """Return the sort key of a file: its creation time, then its id."""
    return file_created_at(file) or 0.0, file


def _build_not_found_error(file: str) -> ToolFailure:
    """Return the error for a file that the tenant does not have."""
    return ToolFailure(
        ErrorCode.FILE_NOT_FOUND,
        f"the tenant has no file {file[:100]!r}: it was deleted, has expired, or was never uploaded. Upload it again",
    )
