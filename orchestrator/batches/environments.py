"""Checks the workspaces and the artifact patterns that the lines of a file name, before any item runs."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.file_ids import NO_STORE, TenantStore, is_stored
from toolcrew.contract.run_spec import ItemEnvironment
from toolcrew.orchestrator.batches.artifacts import MAX_PATTERNS, Pattern
from toolcrew.orchestrator.sessions.workspace_files import find_source_kind, load_source
from toolcrew.store.batches import BatchItem, Grader

_HEAD_BYTES = 1024 * 1024
"""Number of bytes that are read from an archive to find its kind. Every packing program writes the first file name
within these bytes.
"""


class EnvironmentChecker:
    """Checks the field `environment` of all items of one file. Replaces relative workspace names by absolute paths.
    Checks a workspace that many lines use only once.
    """

    def __init__(self, folder: Path | None, store: TenantStore | None = None, max_bytes: int = MAX_BLOB_BYTES) -> None:
        """Create the checker. `folder`: the folder at which relative names start; None: lines may not name paths of
        this machine. `store`: the tenant's part of the store; None: this process has no access to the store.
        `max_bytes`: limit of a workspace on this machine.
        """
        self._max_bytes = max_bytes
        self._folder = folder.absolute() if folder is not None else None
        self._store = store
        self._workspaces: dict[str, str | None] = {}
        self._patterns: dict[str, str | None] = {}
        self._environments: dict[ItemEnvironment, ItemEnvironment] = {}
        self._graders: dict[Grader, Grader] = {}

    def normalize(self, item: BatchItem) -> BatchItem:
        """Return the item with absolute paths of its workspace and of its grader's files. Equal environments and
        graders share one record, to save memory.
        """
        environment, grader = item.environment, item.grader
        if self._is_local(environment.workspace):
            environment = environment.model_copy(update={"workspace": self._build_absolute_path(environment.workspace)})
        if grader is not None and self._is_local(grader.files):
            grader = grader.model_copy(update={"files": self._build_absolute_path(grader.files)})
        changes = {
            "environment": self._environments.setdefault(environment, environment),
            "grader": grader and self._graders.setdefault(grader, grader),
        }
        return item.model_copy(update=changes)

    def _is_local(self, workspace: str | None) -> TypeGuard[str]:
        return workspace is not None and self._folder is not None and not is_stored(workspace)

    def find_errors(
        self, workspace: str | None, artifacts: Sequence[str]
    ) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield each error of an environment, as (path of the field, sentence)."""
        if workspace is not None and (error := self._find_workspace_problem(workspace)) is not None:
            yield ("workspace",), error
        if artifacts and self._folder is None and (self._store is None or self._store.setting is None):
            yield ("artifacts",), NO_STORE
        yield from self._find_pattern_errors(artifacts)

    def find_grader_errors(
        self, files: str | None, artifacts: Sequence[str]
    ) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield each error of a grader's files and patterns, like `find_errors`."""
        if files is not None and (error := self._find_workspace_problem(files)) is not None:
            yield ("grader", "files"), error
        for path, error in self._find_pattern_errors(artifacts):
            yield ("grader", *path), error

    def _find_pattern_errors(self, patterns: Sequence[str]) -> Iterator[tuple[tuple[str | int, ...], str]]:
        if len(patterns) > MAX_PATTERNS:
            yield (
                ("artifacts",),
                f"the item has {len(patterns)} patterns and the limit is {MAX_PATTERNS}: use `**`, or name folders",
            )
        for number, pattern in enumerate(patterns[:MAX_PATTERNS]):
            if pattern not in self._patterns:
                self._patterns[pattern] = _find_pattern_error(pattern)
            if (error := self._patterns[pattern]) is not None:
                yield ("artifacts", number), error

    def _find_workspace_problem(self, workspace: str) -> str | None:
        """Return why a workspace cannot be used; None if the workspace can be used."""
        if is_stored(workspace):
            return self._store.explain_refusal(workspace) if self._store is not None else None
        if self._folder is None:
            return (
                "this process cannot read a path of your machine: upload the workspace (POST /v1/files) and use the id "
                "of the file"
            )
        path = self._build_absolute_path(workspace)
        if path not in self._workspaces:
            self._workspaces[path] = _find_workspace_error(path, self._max_bytes)
        return self._workspaces[path]

    def _build_absolute_path(self, workspace: str) -> str:
        """Return the absolute path of a workspace."""
        assert self._folder is not None
        return os.path.normpath(self._folder / workspace)


def _find_pattern_error(pattern: str) -> str | None:
    """Return why a pattern is invalid; None if the pattern is valid."""
    try:
        Pattern(pattern)
    except ValueError as error:
        return f"'{pattern[:200]}' is not a valid pattern: {error}"
    return None


def _find_workspace_error(text: str, max_bytes: int) -> str | None:
    """Return why a workspace cannot be used; None if there is no problem that can be found without packing."""
    path = Path(text)
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                next(entries, None)
            return None
        size = path.stat().st_size if path.is_file() else 0
        if _HEAD_BYTES < size <= max_bytes:
            with path.open("rb") as file:
                kind = find_source_kind(file.read(_HEAD_BYTES))
            # A bundle is loaded completely, because its references are checked too.
            if kind not in (None, "bundle") or (kind is not None and size > MAX_BLOB_BYTES):
                return None
        load_source(path)
    except ConfigError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"the workspace {text} cannot be read ({error}): check the path and its permissions"
    return None
