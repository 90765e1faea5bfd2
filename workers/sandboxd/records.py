"""What sandboxd must remember over its own death: its containers, and the sessions whose files are kept.

One small JSON file each, replaced as a whole. A container is recorded before it is started and forgotten when its removal is confirmed. They
are for a process that died: what a host loses that dies itself, the containers, needs no record.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from workers.sandboxd.classes import SandboxPlan

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SessionRecord:
    """A session whose workspace outlives its container. `parcel`: what of the container was packed when it was given up; `used_at`: epoch seconds."""

    id: str
    plan: SandboxPlan
    ttl_s: float
    workspace: str
    generation: int
    parcel: str | None = None
    used_at: float = 0.0


class Records:
    """A folder of them. A file that cannot be read is said, set aside and treated as absent."""

    def __init__(self, folder: Path) -> None:
        self._containers = folder / "containers"
        self._sessions = folder / "sessions"
        for place in (self._containers, self._sessions):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add_container(self, name: str, deadline: float) -> None:
        """Before it is started."""
        _write(self._containers / f"{name}.json", {"name": name, "deadline": deadline})

    def forget_container(self, name: str) -> None:
        """Once the engine has confirmed that it is gone."""
        (self._containers / f"{name}.json").unlink(missing_ok=True)

    def containers(self) -> list[str]:
        """Names of those that were never confirmed gone."""
        return [str(data["name"]) for data in _read_all(self._containers) if isinstance(data.get("name"), str)]

    def keep_session(self, record: SessionRecord) -> None:
        _write(self._session_path(record.id), asdict(record))

    def forget_session(self, session: str) -> None:
        self._session_path(session).unlink(missing_ok=True)

    def sessions(self) -> list[SessionRecord]:
        """All that were kept."""
        found = []
        for data in _read_all(self._sessions):
            try:
                record = SessionRecord(**data)
                found.append(replace(record, plan=SandboxPlan(**data["plan"])))
            except (TypeError, KeyError) as error:
                log.error("session_record_unreadable", error=str(error))
        return found

    def _session_path(self, session: str) -> Path:
        return self._sessions / f"{hashlib.sha256(session.encode()).hexdigest()[:40]}.json"


def _write(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    os.replace(temporary, path)


def _read_all(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except (OSError, ValueError) as error:
            log.error("record_unreadable", record=path.name, error=str(error))
            path.replace(path.with_suffix(".bad"))
            continue
        yield data
