"""Copies the artifacts of an item that has ended: to the folder of its batch, or to the store of files."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.file_ids import new_file_id
from toolcrew.contract.run_events import ArtifactsCopied, BatchNotice, OnEvent
from toolcrew.orchestrator.batches.artifacts import NO_FILE, CopiedFiles, artifact_folder, choose_paths, copy_artifacts
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.batches import BatchDefaults, BatchItem

NOT_COPIED = frozenset(
    {ErrorCode.FILE_TOO_LARGE, ErrorCode.QUOTA_EXCEEDED, ErrorCode.NO_SPACE, ErrorCode.PERMISSION_DENIED}
)
"""Codes of artifacts that exceed a limit or cannot be read."""


class CopiedOut(TypedDict, total=False):
    """The fields about artifacts in the row of an item."""

    artifacts: tuple[str, ...]
    missing: tuple[str, ...]
    file: str


async def copy_item_artifacts(
    item: BatchItem, journal: Journal, defaults: BatchDefaults, session: Session, on_event: OnEvent
) -> CopiedOut:
    """Copy the artifacts that the item's line names to the folder of the batch; without a folder, to the store.

    Returns the fields of the row about artifacts; no fields if the line names no artifacts.
    """
    if not item.environment.artifacts:
        return {}
    exported = journal.artifacts
    try:
        if exported is None and defaults.artifacts is None:
            exported = await _save(item, journal, session)
        elif exported is None:
            exported = await _export(item, journal, str(defaults.artifacts), session)
    except ToolFailure as failure:
        # The result of the item is complete without its artifacts, which are named as missing.
        if failure.code not in NOT_COPIED:
            raise
        sentence = f"no artifact was copied ({failure.code}): {failure.message}"
        exported = await journal.record(ArtifactsCopied, paths=(), missing=_printable([sentence]))
    for sentence in exported.missing:
        on_event(BatchNotice(message=f"{item.custom_id}: {sentence}"))
    return {"artifacts": exported.paths, "missing": exported.missing, "file": exported.file}


async def _save(item: BatchItem, journal: Journal, session: Session) -> ArtifactsCopied:
    """Ask the session's host to copy the artifacts to the store. Return the logged event."""
    listing = await session.list_files()
    found = [*listing.files, *listing.others]
    matching, idle = await in_tenant_thread(session.tenant, choose_paths, found, item.environment.artifacts)
    paths = [path for path in matching if path not in listing.others]
    skipped = [(path, NO_FILE[listing.others[path]]) for path in matching if path in listing.others]
    file = new_file_id("artifacts") if paths else ""
    if paths:
        await session.save_files(file, paths)
    missing = CopiedFiles(unmatched=tuple(idle), skipped=tuple(skipped)).missing()
    return await journal.record(ArtifactsCopied, paths=_printable(paths), missing=_printable(missing), file=file)


async def _export(item: BatchItem, journal: Journal, folder_of_all: str, session: Session) -> ArtifactsCopied:
    """Copy the artifacts to the item's folder on this machine. Return the logged event."""
    target = artifact_folder(Path(folder_of_all), item.custom_id)
    with tempfile.TemporaryDirectory(prefix="toolcrew-artifacts-") as folder:
        listing = await session.list_files(only_others=True)
        await session.export(folder)
        patterns, others = (
            item.environment.artifacts,
            {path: NO_FILE[kind] for path, kind in listing.others.items()},
        )
        copied = await in_tenant_thread(session.tenant, copy_artifacts, Path(folder), patterns, target, others)
    return await journal.record(ArtifactsCopied, paths=_printable(copied.paths), missing=_printable(copied.missing()))


def _printable(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the texts as valid UTF-8 for a row. A file name can contain any bytes."""
    return tuple(os.fsencode(text).decode(errors="backslashreplace") for text in texts)
