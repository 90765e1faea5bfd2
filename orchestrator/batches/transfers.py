"""Transfers files of detached batches between the submitter's machine and the store: uploads workspaces and downloads
artifacts.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, overload

from toolcrew.archives.folders import unpack_stream, write_folder
from toolcrew.contract.file_ids import MAX_WORKSPACE_BYTES, is_stored
from toolcrew.orchestrator.batches.artifacts import artifact_folder
from toolcrew.orchestrator.batches.lines import BatchFile
from toolcrew.orchestrator.batches.stored_files import StoredFiles
from toolcrew.store.batches import BatchItem, ItemOutcome
from toolcrew.store.stored_bytes import StoredBytes

_PIECE_BYTES = 1024 * 1024


def find_local_workspaces(items: Iterable[BatchItem]) -> list[str]:
    """Return the distinct paths of this machine that items use as workspaces or as files of graders."""
    return sorted({path for item in items for path in item.sources if not is_stored(path)})


async def upload_workspaces(file: BatchFile, files: StoredFiles, tenant: str, stored: StoredBytes) -> BatchFile:
    """Upload each workspace of this machine once. Return the batch with the ids of the uploads.

    Raises ConfigError: a workspace cannot be read. Raises the exceptions of `StoredFiles.upload`.
    """
    uploads = {path: await _upload(Path(path), files, tenant, stored) for path in find_local_workspaces(file.items)}
    return replace(file, items=_UploadedItems(file.items, uploads)) if uploads else file


async def download_artifacts(outcome: ItemOutcome, files: StoredFiles, tenant: str, folder: Path) -> int:
    """Copy the artifacts of an item into the item's folder below `folder`. Return the size of their archive in bytes;
    0 if the item has no artifacts.

    Raises ToolFailure: FILE_NOT_FOUND if the artifacts have expired, PATH_NOT_ALLOWED if the archive contains
    dangerous paths.
    """
    name = (outcome.body or {}).get("artifacts_file")
    if not isinstance(name, str):
        return 0
    with tempfile.TemporaryFile() as archive:
        async for chunk in files.read(tenant, name):
            await asyncio.to_thread(archive.write, chunk)
        size = archive.tell()
        archive.seek(0)
        await asyncio.to_thread(unpack_stream, archive, size, artifact_folder(folder, outcome.custom_id))
    return size


async def _upload(path: Path, files: StoredFiles, tenant: str, stored: StoredBytes) -> str:
    """Upload a workspace and return its id. A folder is packed first."""
    with tempfile.TemporaryFile() if path.is_dir() else path.open("rb") as file:  # noqa: ASYNC240
        if path.is_dir():  # noqa: ASYNC240
            await asyncio.to_thread(write_folder, file, path, MAX_WORKSPACE_BYTES)
            file.seek(0)
        return (await files.upload(tenant, _read(file), stored)).id


async def _read(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield the content of a file."""
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


class _UploadedItems(Sequence[BatchItem]):
    """Items with the ids of uploads in place of workspace paths."""

    def __init__(self, items: Sequence[BatchItem], uploads: Mapping[str, str]) -> None:
        self._items = items
        self._uploads = uploads

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> BatchItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[BatchItem]: ...

    def __getitem__(self, index: int | slice) -> BatchItem | list[BatchItem]:
        selected = self._items[index]
        return (
            self._replace(selected) if isinstance(selected, BatchItem) else [self._replace(item) for item in selected]
        )

    def __iter__(self) -> Iterator[BatchItem]:
        return map(self._replace, self._items)

    def _replace(self, item: BatchItem) -> BatchItem:
        """Return the item with the ids of its uploads in place of paths of this machine."""
        environment, grader = item.environment, item.grader
        if upload := self._uploads.get(environment.workspace or ""):
            environment = environment.model_copy(update={"workspace": upload})
        if grader is not None and (upload := self._uploads.get(grader.files or "")):
            grader = grader.model_copy(update={"files": upload})
        return item.model_copy(update={"environment": environment, "grader": grader})
