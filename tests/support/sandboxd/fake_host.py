"""Parts of hosts for tests: a sandboxd whose sessions are rows in memory, and session locations on a real Redis."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import redis

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.names import location_key
from toolcrew.contract.session_locations import SessionLocation, open_checkpoint, seal_checkpoint
from toolcrew.store.clock import SharedClock
from toolcrew.store.hosts import WorkerHostStore
from toolcrew.store.sessions import WorkerSessionStore, parse_session_location
from toolcrew.store.usage import sum_packed, usage_prefix
from toolcrew.workers.sandbox_client import SandboxClient

DEPLOYMENT = "d"
_SIGNED = ("checkpoint", "automatic")


def build_report(queue: str = "host.a.b1", worker: str = "w1", **fields: Any) -> HostReport:
    """Return the report of a healthy sandbox host with four slots."""
    times = {"started_at": 1.0, "reported_at": 1.0}
    return HostReport(
        **{
            "host": queue.split(".")[1],
            "queue": queue,
            "worker": worker,
            "kind": "sandbox",
            "slots": 4,
            **times,
            **fields,
        }
    )


class MemorySandboxd:
    """A sandboxd that holds sessions by name. `refuse`: session to the error that `checkpoint` raises.
    `before_checkpoint`: called with the name before each checkpoint.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.kept: list[str] = []
        self.checkpointed: list[str] = []
        self.deleted: list[str] = []
        self.closed: list[str] = []
        self.refuse: dict[str, Exception] = {}
        self.before_checkpoint: Callable[[str], None] = lambda _name: None
        self.checkpoint_bytes = 1000
        self.silent = False
        self.refusals = threading.Semaphore(0)  # one permit per call that a silent sandboxd refused
        self.boot = "b1"

    def add(self, name: str, **fields: Any) -> None:
        self.rows[name] = {"name": name, "calls": 0, "jobs": 0, "idle_s": 5.0, "changed": True, **fields}

    def client(self) -> "MemoryClient":
        return MemoryClient(self)


class MemoryClient(SandboxClient):
    """A connection to a MemorySandboxd."""

    def __init__(self, sandboxd: MemorySandboxd) -> None:
        super().__init__("/nonexistent")
        self._sandboxd = sandboxd

    def status(self) -> dict[str, Any]:
        self._check()
        return {"boot": self._sandboxd.boot, "sessions": len(self._sandboxd.rows)}

    def sessions(self) -> list[dict[str, Any]]:
        self._check()
        return list(self._sandboxd.rows.values())

    def checkpoint(self, name: str, *, automatic: bool = False) -> dict[str, Any]:
        self._check()
        host = self._sandboxd
        host.before_checkpoint(name)
        if name in host.refuse:
            raise host.refuse[name]
        host.rows[name]["changed"] = False
        host.kept.append(f"c{len(host.kept) + 1}")
        host.checkpointed.append(name)
        return {"ok": True, "checkpoint": host.kept[-1], "bytes": host.checkpoint_bytes}

    def delete_checkpoint(self, name: str, checkpoint: str) -> dict[str, Any]:
        self._check()
        self._sandboxd.deleted.append(checkpoint)
        return {"deleted": True}

    def close(self, name: str, *, fence: int | None = None) -> bool:
        self._check()
        if fence not in (None, self._sandboxd.rows.get(name, {}).get("fence", 1)):
            return False
        self._sandboxd.closed.append(name)
        return self._sandboxd.rows.pop(name, None) is not None

    def _check(self) -> None:
        if self._sandboxd.silent:
            self._sandboxd.refusals.release()
            raise SandboxUnavailable("sandboxd does not answer")


class HostHarness:
    """A deployment on a real Redis: the session locations that orchestrators write, and the workers' views of the
    locations.
    """

    def __init__(self, server: RedisProcess) -> None:
        self.redis: redis.Redis = server.client()
        self.clock = SharedClock()

    def sessions(self, queue: str = "host.a.b1") -> WorkerSessionStore:
        return WorkerSessionStore(self.redis, DEPLOYMENT, queue.split(".")[1], queue, KEY)

    def stored_bytes(self, tenant: str) -> int:
        """Return the stored bytes of the tenant's usage since the beginning of the records."""
        keys: Any = self.redis.keys(f"{usage_prefix(DEPLOYMENT, tenant)}*")
        days: list[Any] = [self.redis.hgetall(key) for key in keys]
        return sum(int(sum_packed(day.values()).get("stored_bytes", 0)) for day in days)

    def hosts(self) -> WorkerHostStore:
        return WorkerHostStore(self.redis, DEPLOYMENT, self.clock)

    def put_location(self, name: str, **fields: Any) -> None:
        tenant, _, session = name.partition(":")
        fields |= {field: seal_checkpoint(KEY, tenant, session, fields[field]) for field in _SIGNED if field in fields}
        plain: Mapping[str, Any] = {"state": "open", "queue": "host.a.b1", "fence": 1, **fields}
        self.redis.hset(self._key(name), mapping={field: str(value) for field, value in plain.items()})

    def place(self, name: str) -> SessionLocation:
        found = parse_session_location(self.redis.hgetall(self._key(name)))  # type: ignore[arg-type]
        assert found is not None
        tenant, _, session = name.partition(":")
        opened = {field: open_checkpoint(KEY, tenant, session, getattr(found, field)) for field in _SIGNED}
        return found.model_copy(update=opened)

    def delete_location(self, name: str) -> None:
        self.redis.delete(self._key(name))

    def _key(self, name: str) -> str:
        tenant, _, session = name.partition(":")
        return location_key(DEPLOYMENT, tenant, session)
