"""Hosts and session locations in memory, for tests of the layers above."""

from collections.abc import Mapping
from typing import Any, cast

from toolcrew.contract.hosts import HostReport
from toolcrew.contract.session_locations import LocationState, SessionLocation
from toolcrew.orchestrator.dispatch.delivery import Pool
from toolcrew.store.calls import CallStore
from toolcrew.store.sessions import HostState, SessionAddress, SessionStore


def build_report(name: str = "h1", **fields: Any) -> HostReport:
    """Return the report of a host with free slots."""
    report = {
        "host": name,
        "queue": f"host.{name}.b00t",
        "worker": "w1",
        "kind": "sandbox",
        "slots": 4,
        "max_sessions": 100,
        "max_sandboxes": 100,
        "memory_free_bytes": 8 * 1024**3,
        "classes": ("default",),
        "images": ("base", "default", "python"),
        "started_at": 0.0,
        "reported_at": 0.0,
    }
    return HostReport.model_validate({**report, **fields})


class StaticHosts:
    """The live hosts. A test may change the list."""

    def __init__(self, *reports: HostReport) -> None:
        self.all = list(reports)

    async def reports(self) -> list[HostReport]:
        return self.all

    async def silent(self) -> list[str]:
        return []


class MemorySessionStore(SessionStore):
    """Locations in memory, for a program that never loses a host."""

    def __init__(self) -> None:
        self.locations: dict[tuple[str, str], SessionLocation] = {}
        self.loss_facts: dict[tuple[str, str], str] = {}
        self.with_server_sessions: set[tuple[str, str]] = set()

    async def open(
        self, tenant: str, session: str, queue: str, *, start: str, ttl_s: float, limit: int
    ) -> SessionAddress:
        self.locations[tenant, session] = SessionLocation(
            state=LocationState.OPEN, queue=queue, fence=1, start=start, ttl_s=ttl_s
        )
        return SessionAddress(queue, 1)

    async def fork(
        self, tenant: str, parent: str, starts: Mapping[str, str], queue: str, *, facts: str, limit: int
    ) -> None:
        location = self.locations[tenant, parent]
        for name, start in starts.items():
            self.locations[tenant, name] = location.model_copy(update={"start": start})
            self.loss_facts[tenant, name] = facts

    async def find(self, tenant: str, session: str) -> SessionLocation | None:
        return self.locations.get((tenant, session))

    async def begin_move(
        self, tenant: str, session: str, expected_fence: int, expected_state: LocationState, queue: str
    ) -> SessionAddress | None:
        return None

    async def settle(self, tenant: str, session: str, fence: int, state: LocationState, facts: str = "") -> bool:
        if facts:
            self.loss_facts[tenant, session] = facts
        return (tenant, session) in self.locations

    async def facts(self, tenant: str, session: str) -> str | None:
        return self.loss_facts.get((tenant, session))

    async def host_state(self, queue: str) -> HostState:
        return "alive"

    async def close(self, tenant: str, session: str) -> bool:
        self.locations.pop((tenant, session), None)
        self.loss_facts.pop((tenant, session), None)
        return (tenant, session) in self.with_server_sessions


class NoLedger:
    """The ledger of a program that never loses a call."""

    async def find(self, tenant: str, call_id: str) -> None:
        return None

    async def renew(self, tenant: str, call_id: str, attempt: int) -> bool:
        return False

    async def give_up(self, tenant: str, call_id: str, attempt: int, state: object, code: object) -> None:
        return None


def build_pool(*reports: HostReport) -> Pool:
    """Return a pool of these hosts, or of one default host."""
    return Pool(MemorySessionStore(), StaticHosts(*(reports or (build_report(),))), cast(CallStore, NoLedger()))
