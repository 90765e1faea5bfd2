"""What the lines of a file name on this machine, looked at before anything runs: workspaces, and patterns of
artifacts.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from contract.calls import MAX_BLOB_BYTES
from contract.errors import ConfigError
from orchestrator.batches.artifacts import MAX_PATTERNS, Pattern
from orchestrator.dispatch.workspace_sources import find_source_kind, load_source
from store.archives.files import NO_STORE, TenantStore, is_stored
from store.batches import Ground

_HEAD_BYTES = 1024 * 1024
"""Of an archive that is larger, as much is looked at: by then any packer has given out its first file's name."""


class Grounds:
    """The grounds of one file's items: names become whole paths, and what many lines name is looked at once."""

    def __init__(self, folder: Path | None, store: TenantStore | None = None, max_bytes: int = MAX_BLOB_BYTES) -> None:
        """`folder`: where relative names begin; None: no path of this machine may be named. `store`: the tenant's part
        of the store; None: this process does not know it. `max_bytes`: limit of a workspace on this machine.
        """
        self._max_bytes = max_bytes
        self._folder = folder.absolute() if folder is not None else None
        self._store = store
        self._workspaces: dict[str, str | None] = {}
        self._patterns: dict[str, str | None] = {}
        self._known: dict[Ground, Ground] = {}

    def settle(self, ground: Ground) -> Ground:
        """With the whole path of its workspace; the same record for all that are equal."""
        if ground.workspace is not None and self._folder is not None and not is_stored(ground.workspace):
            ground = ground.model_copy(update={"workspace": self._whole(ground.workspace)})
        return self._known.setdefault(ground, ground)

    def complaints(self, ground: Ground) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """What cannot be had: the path of the field, and a sentence."""
        if ground.workspace is not None and (complaint := self._find_refusal(ground.workspace)) is not None:
            yield ("workspace",), complaint
        if ground.artifacts and self._folder is None and (self._store is None or self._store.setting is None):
            yield ("artifacts",), NO_STORE
        if len(ground.artifacts) > MAX_PATTERNS:
            yield (
                ("artifacts",),
                (
                    f"there are {len(ground.artifacts)} patterns, at most {MAX_PATTERNS} are taken: use `**`, or name "
                    "folders"
                ),
            )
        for place, pattern in enumerate(ground.artifacts[:MAX_PATTERNS]):
            if pattern not in self._patterns:
                self._patterns[pattern] = _complaint_of(pattern)
            if (complaint := self._patterns[pattern]) is not None:
                yield ("artifacts", place), complaint

    def _find_refusal(self, workspace: str) -> str | None:
        if is_stored(workspace):
            return self._store.explain_refusal(workspace) if self._store is not None else None
        if self._folder is None:
            return "a path of your machine cannot be read here: upload it (POST /v1/files) and give the id of the file"
        path = self._whole(workspace)
        if path not in self._workspaces:
            self._workspaces[path] = _look_at(path, self._max_bytes)
        return self._workspaces[path]

    def _whole(self, workspace: str) -> str:
        assert self._folder is not None
        return os.path.normpath(self._folder / workspace)


def _complaint_of(pattern: str) -> str | None:
    try:
        Pattern(pattern)
    except ValueError as error:
        return f"'{pattern[:200]}' cannot be copied out: {error}"
    return None


def _look_at(text: str, max_bytes: int) -> str | None:
    """Why a workspace will not do; None when it will, as far as can be said without packing it."""
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
            # Of a bundle its references are looked at, too.
            if kind not in (None, "bundle") or (kind is not None and size > MAX_BLOB_BYTES):
                return None
        load_source(path)
    except ConfigError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"the workspace {text} cannot be read ({error}): mend its name or its rights"
    return None
