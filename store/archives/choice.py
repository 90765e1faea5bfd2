"""Opens the store that the setting names."""

from pathlib import Path

from store.archives.base import STATE_SETTING, ArchiveStore
from store.archives.folder import FolderStore
from store.archives.fsspec_store import FsspecStore


def open_store(setting: str | None, state: Path, free_bytes: int = 0) -> ArchiveStore:
    """A URL's store, else that of a folder; None: a folder below `state`. `free_bytes`: to be left on a folder's disk.

    Raises ConfigError when fsspec or the package of a URL's protocol is missing.
    """
    if setting is not None and _is_remote(setting):
        remote = FsspecStore(setting, state / "spool", free_bytes)
        remote.sweep()
        return remote
    store = FolderStore(_folder(setting) if setting is not None else state / "checkpoints", free_bytes)
    store.sweep()
    return store


def open_own_store(folder: Path, free_bytes: int = 0) -> FolderStore:
    """A folder below the state folder, to which nobody else writes: what was not ended in it never will be."""
    store = FolderStore(folder, free_bytes, STATE_SETTING)
    store.sweep(0.0)
    return store


def open_client_store(setting: str) -> ArchiveStore:
    """Open the store for a process that is no sandboxd: it has no disk of its own for whole archives. Raises
    ConfigError.
    """
    return FsspecStore(setting, None) if _is_remote(setting) else FolderStore(_folder(setting))


def _is_remote(setting: str) -> bool:
    return "://" in setting and not setting.startswith("file://")


def _folder(setting: str) -> Path:
    return Path(setting.removeprefix("file://"))
