"""What a sandbox worker knows of its sandboxd: asked all the time by a thread of its own, so that a silent one holds up nobody else."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from contract.errors import OperatorError, ToolFailure
from contract.hosts import HEARTBEAT_S
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

SILENT_S = 3 * HEARTBEAT_S
"""After so long without an answer nothing new is placed on the host."""


@dataclass(frozen=True)
class SessionRow:
    """A session as sandboxd tells of it. `name`: `<tenant>:<session>`; `changed`: its files may differ from its last checkpoint; `fence`: of the place
    under which it was opened there."""

    name: str
    calls: int
    jobs: int
    idle_s: float
    changed: bool
    ttl_s: float = float("inf")
    fence: int = 1

    @property
    def tenant(self) -> str:
        return self.name.partition(":")[0]

    @property
    def session(self) -> str:
        return self.name.partition(":")[2]


def parse_rows(told: Sequence[Mapping[str, Any]]) -> list[SessionRow]:
    """The rows of a status. One that says nothing of changes may have some."""
    return [
        SessionRow(
            str(row["name"]),
            int(row.get("calls", 0)),
            int(row.get("jobs", 0)),
            float(row.get("idle_s", 0.0)),
            bool(row.get("changed", True)),
            float(row.get("ttl_s", "inf")),
            int(row.get("fence", 1)),
        )
        for row in told
    ]


class SandboxdWatch:
    """A thread that asks for sandboxd's status every HEARTBEAT_S seconds. `on_other_boot`: called once when another sandboxd answers than at first."""

    def __init__(self, open_client: Callable[[], SandboxClient], first: Mapping[str, Any], on_other_boot: Callable[[str], None]) -> None:
        self._open_client = open_client
        self._boot = str(first["boot"])
        self._status = first
        self._seen_at = time.monotonic()
        self._on_other_boot = on_other_boot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandboxd-watch", daemon=True)

    @property
    def status(self) -> Mapping[str, Any]:
        """The last one."""
        return self._status

    @property
    def is_silent(self) -> bool:
        """Whether the last one is old."""
        return time.monotonic() - self._seen_at > SILENT_S

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; a question on its way is left."""
        self._stop.set()

    def _run(self) -> None:
        with self._open_client() as client:
            while not self._stop.wait(HEARTBEAT_S):
                try:
                    status = client.status()
                except (OperatorError, ToolFailure) as error:
                    log.warning("sandboxd_silent", error=str(error))
                    continue
                self._status, self._seen_at = status, time.monotonic()
                if str(status["boot"]) != self._boot:
                    log.error("sandboxd_is_another", was=self._boot, now=str(status["boot"]))
                    self._on_other_boot(str(status["boot"]))
                    return
