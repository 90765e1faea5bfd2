"""Files of detached batches on the submitter's machine: workspaces go to the store, artifacts come from it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, overload

from orchestrator.batches.artifacts import artifact_folder
from orchestrator.batches.lines import BatchFile
from orchestrator.batches.stored_files import StoredFiles
from orchestrator.dispatch.folders import unpack_stream, write_folder
from store.archives.files import MAX_WORKSPACE_BYTES, is_stored
from store.batches import BatchItem, Outcome

_PIECE_BYTES = 1024 * 1024


def find_local_workspaces(items: Iterable[BatchItem]) -> list[str]:
    """Return the distinct paths of this machine that are workspaces of items."""
    return sorted(
        {item.ground.workspace for item in items if item.ground.workspace and not is_stored(item.ground.workspace)}
    )


async def upload_workspaces(file: BatchFile, files: StoredFiles, tenant: str) -> BatchFile:
    """Upload each workspace of this machine once. Return the batch with the ids of the uploads.

    Raises ConfigError for a workspace that cannot be read, and as `StoredFiles.upload`.
    """
    uploads = {path: await _upload(Path(path), files, tenant) for path in find_local_workspaces(file.items)}
    return replace(file, items=_UploadedItems(file.items, uploads)) if uploads else file


async def download_artifacts(outcome: Outcome, files: StoredFiles, tenant: str, folder: Path) -> int:
    """Copy the artifacts of an item into its folder below `folder`. Return how many bytes their archive has; 0: the
    item has none.

    Raises ToolFailure: FILE_NOT_FOUND for artifacts that have expired, PATH_NOT_ALLOWED for a hostile archive.
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


async def _upload(path: Path, files: StoredFiles, tenant: str) -> str:
    with tempfile.TemporaryFile() if path.is_dir() else path.open("rb") as file:  # noqa: ASYNC240
        if path.is_dir():  # noqa: ASYNC240
            await asyncio.to_thread(write_folder, file, path, MAX_WORKSPACE_BYTES)
            file.seek(0)
        return (await files.upload(tenant, _read(file))).id


async def _read(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


class _UploadedItems(Sequence[BatchItem]):
    """Items whose workspaces are uploads in place of paths."""

    def __init__(self, items: Sequence[BatchItem], uploads: Mapping[str, str]) -> None:
        self._items, self._uploads = items, uploads

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> BatchItem: ...

    @overload
    def __getitem__(self, place: slice) -> list[BatchItem]: ...

    def __getitem__(self, place: int | slice) -> BatchItem | list[BatchItem]:
        found = self._items[place]
        return self._replace(found) if isinstance(found, BatchItem) else [self._replace(item) for item in found]

    def __iter__(self) -> Iterator[BatchItem]:
        return map(self._replace, self._items)

    def _replace(self, item: BatchItem) -> BatchItem:
        upload = self._uploads.get(item.ground.workspace or "")
        return (
            item.model_copy(update={"ground": item.ground.model_copy(update={"workspace": upload})}) if upload else item
        )
