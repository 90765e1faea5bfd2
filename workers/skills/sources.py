"""Sources of a skill's files: a folder of this host, or an installed bundle in memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class SkillSource(Protocol):
    """Files that are read by their paths, which contain `/`. `str(source)` describes the source in the log."""

    def read(self, path: str, at_most: int = -1) -> bytes:
        """Return the file's bytes, at most `at_most`. Raises OSError."""
        ...


class FolderSource:
    """A folder of this host, whose files may change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def read(self, path: str, at_most: int = -1) -> bytes:
        with open(os.path.join(self._folder, path), "rb") as file:
            return file.read(at_most)


class MemorySource:
    """Files in memory. `name` describes them in the log."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._name = name
        self._files = files

    def __str__(self) -> str:
        return self._name

    def read(self, path: str, at_most: int = -1) -> bytes:
        try:
            data = self._files[path]
        except KeyError:
            raise FileNotFoundError(path) from None
        return data if at_most < 0 else data[:at_most]
