"""Functions that open the archive store of the settings."""

from pathlib import Path

from toolcrew.archives.base import STATE_SETTING, ArchiveStore
from toolcrew.archives.folder import FolderStore
from toolcrew.archives.fsspec_store import FsspecStore


def open_store(setting: str | None, state: Path, free_bytes: int = 0) -> ArchiveStore:
    """Open the store at a URL or in a folder; None: in a folder below `state`. `free_bytes`: the space to leave on a
    folder's disk.

    Raises ConfigError: fsspec is missing, or the package for the protocol of the URL.
    """
    if setting is not None and _is_remote(setting):
        remote = FsspecStore(setting, state / "spool", free_bytes)
        remote.sweep()
        return remote
    store = FolderStore(_folder(setting) if setting is not None else state / "checkpoints", free_bytes)
    store.sweep()
    return store


def open_own_store(folder: Path, free_bytes: int = 0) -> FolderStore:
    """Open a store in a folder below the state folder. No other process writes there, so unfinished archives are
    deleted at once.
    """
    store = FolderStore(folder, free_bytes, STATE_SETTING)
    store.sweep(0.0)
    return store


def open_client_store(setting: str, free_bytes: int) -> ArchiveStore:
    """Open the store for a process other than sandboxd. The store then sends data on at once, because such a process
    has no disk space for whole archives. `free_bytes`: the space to leave on a folder's disk. Raises ConfigError: a
    package is missing.
    """
    return FsspecStore(setting, None) if _is_remote(setting) else FolderStore(_folder(setting), free_bytes)


def _is_remote(setting: str) -> bool:
    return "://" in setting and not setting.startswith("file://")


def _folder(setting: str) -> Path:
    return Path(setting.removeprefix("file://"))
