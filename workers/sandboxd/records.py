"""State that must survive the death of sandboxd: the names of its containers, the sessions with kept files, and the
images that it pulled.

Each record is a small JSON file that is replaced as a whole. A container is recorded before it is started. The record
is deleted after the removal is confirmed. The records must survive the death of the process but not a crash of the
host, which ends the containers too. So they need no fsync.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import structlog
from pydantic import ConfigDict, Field, TypeAdapter

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.settings import PULLED_IMAGES
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandboxd.disks.base import Kind
from toolcrew.workers.sandboxd.plans import SandboxPlan

log = structlog.get_logger(__name__)
_UNFINISHED = ".new"

T = TypeVar("T")


@dataclass(frozen=True)
class SessionRecord:
    """A session whose files outlive its container. `archive`: id of the packed state of an evicted container.
    `used_at`: time of the last use, in epoch seconds. `news`: facts that no answer has reported yet. `unreported_loss`:
    a loss of all files that no call has reported yet. `policy`, `fence`, `automatic_at`: as in HostSession
    (session.py). `changed`: whether files differed from the last checkpoint at the time of the record; without an
    `archive` they may have changed later. `layers`: names of the frozen workspaces below its own. `unfilled`: the
    workspace is still empty, and all files are in the `archive`. A record with other fields is of another version and
    is refused.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}:[A-Za-z0-9_-]{1,64}$")]
    plan: SandboxPlan
    ttl_s: float
    workspace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    kind: Kind
    layers: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")], ...], Field(max_length=500)]
    unfilled: bool
    generation: int
    archive: str | None
    used_at: float
    news: str | None
    unreported_loss: str | None
    policy: SandboxPolicy
    fence: int
    changed: bool
    automatic_at: float | None


@dataclass(frozen=True)
class _ContainerRecord:
    name: str
    deadline: float


@dataclass(frozen=True)
class ImageRecord:
    """An image that sandboxd pulls or has pulled. `name`: the complete name, with the registry. `id`: the content id;
    None while it is being pulled. `digest`: the digest in its registry. `used_at`: epoch seconds, some minutes old.
    `classes`: the tenant classes whose registry logins can read the image; None: it was pulled without a login.
    """

    name: str
    id: str | None
    digest: str | None
    size_bytes: int
    used_at: float
    classes: tuple[str, ...] | None = None


_SESSION, _CONTAINER, _IMAGE = TypeAdapter(SessionRecord), TypeAdapter(_ContainerRecord), TypeAdapter(ImageRecord)


class Records:
    """A folder of records. A file that cannot be read is logged, renamed and treated as absent. The deletion of a file
    is tried again later if it fails.

    Writing raises SandboxUnavailable when the disk refuses it.
    """

    def __init__(self, folder: Path) -> None:
        self._containers = folder / "containers"
        self._sessions = folder / "sessions"
        self._images = folder / PULLED_IMAGES
        for folder in (self._containers, self._sessions, self._images):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A process that was killed while it wrote a record leaves the unfinished file.
            for unfinished in folder.glob(f"*{_UNFINISHED}"):
                _unlink(unfinished)

    def add_container(self, name: str, deadline: float) -> None:
        """Record a container before it is started."""
        _write(self._containers / f"{name}.json", {"name": name, "deadline": deadline})

    def forget_container(self, name: str) -> None:
        """Delete the record after the engine has confirmed the removal."""
        _unlink(self._containers / f"{name}.json")

    def containers(self) -> list[str]:
        """Return the names of containers without a confirmed removal."""
        return [record.name for record in _read_all(self._containers, _CONTAINER)]

    def keep_session(self, record: SessionRecord) -> None:
        _write(self._session_path(record.id), _SESSION.dump_python(record, mode="json"))

    def forget_session(self, session: str) -> None:
        _unlink(self._session_path(session))

    def sessions(self) -> list[SessionRecord]:
        """Return all kept sessions."""
        return list(_read_all(self._sessions, _SESSION))

    def keep_image(self, record: ImageRecord) -> None:
        """Record an image before it is pulled, and again with its content id."""
        _write(_hashed(self._images, record.name), _IMAGE.dump_python(record, mode="json"))

    def forget_image(self, name: str) -> None:
        _unlink(_hashed(self._images, name))

    def images(self) -> list[ImageRecord]:
        """Return the records of all images that sandboxd pulled."""
        return list(_read_all(self._images, _IMAGE))

    def _session_path(self, session: str) -> Path:
        return _hashed(self._sessions, session)


def _hashed(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"


def _write(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(_UNFINISHED)
    try:
        temporary.write_text(json.dumps(data), encoding="utf-8")
        # The rename is atomic: a crash leaves the old or the new record, never a partial one.
        os.replace(temporary, path)
    except OSError as error:
        raise SandboxUnavailable(
            f"sandboxd cannot write to its state folder ({error}): free space on its disk, or set "
            "TOOLCREW_SANDBOXD_STATE to another place"
        ) from error


def _unlink(path: Path) -> None:
    """Delete a file. If this fails, the next sweep or start finds the file; the record of a removed container does no
    harm.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("record_not_removed", record=path.name, error=str(error))


def _read_all(folder: Path, kind: TypeAdapter[T]) -> Iterator[T]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield kind.validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            log.error("record_unreadable", record=path.name, error=str(error))
            path.replace(path.with_suffix(".bad"))
