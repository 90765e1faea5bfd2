"""Files of a session's sandbox, as the HTTP API accepts and returns them."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from toolcrew.contract.calls import Record
from toolcrew.contract.clock import Instant
from toolcrew.contract.process_views import MAX_PATH_BYTES

MAX_DEPTH: Final = 100


def check_path(path: str) -> str:
    """Return the path of a file in a sandbox. Raises ValueError for a path that no file can have."""
    if not path or "\0" in path or len(path.encode("utf-8", "replace")) > MAX_PATH_BYTES:
        raise ValueError(f"the path of the file is invalid: use 1 to {MAX_PATH_BYTES} bytes without a zero byte")
    return path


SandboxPath = Annotated[str, AfterValidator(check_path)]
"""Path below /workspace, or an absolute path of the sandbox."""


_FIRST_INSTANT: Final = -62_135_596_800.0
_LAST_INSTANT: Final = 253_402_300_799.0
# A program of the sandbox can give a file any time, also one beyond the years 1 to 9999.
FileTime = Annotated[
    Instant,
    BeforeValidator(lambda at: min(max(at, _FIRST_INSTANT), _LAST_INSTANT) if isinstance(at, int | float) else at),
]


class FileEntry(Record):
    """A file, a folder or a link of a sandbox. `target`: where a link points to. Times are in ISO 8601."""

    name: str
    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    owner: str
    group: str
    uid: int
    gid: int
    modified_at: FileTime
    target: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)


class FileEvent(Record):
    """A change below a watched folder. `name`: relative to the folder. `overflow`: events were lost; list the folder
    again.
    """

    event: Literal["create", "write", "remove", "rename", "chmod", "overflow"]
    name: str = ""
    entry: FileEntry | None = None


class NewFolder(Record):
    """A folder to create, with its parents. `mode`: permissions, such as 493 (0o755)."""

    path: SandboxPath
    mode: int | None = Field(default=None, ge=0, le=0o7777)


class MadeFolder(Record):
    """A folder. `created`: false if it existed before."""

    entry: FileEntry
    created: bool


class NewMove(Record):
    """A file or folder to move or rename."""

    source: SandboxPath
    target: SandboxPath


class NewMetadata(Record):
    """Metadata of a file: replaces the present metadata."""

    path: SandboxPath
    metadata: dict[str, str] = Field(max_length=64)
