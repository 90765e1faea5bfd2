"""sandboxd in this process over a fake engine. The parts are combined as in harness.py, and a daemon listens on a real
socket.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from tests.support.sandboxd.fake_engine import Behaviour, FakeEngine
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, SandboxOptions, SessionSpec
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd.connection import RequestServer
from toolcrew.workers.sandboxd.control import ControlRequests, HostStores, SecretExchange
from toolcrew.workers.sandboxd.disks.base import Workspace, WorkspaceMount, Workspaces, WorkspaceSize
from toolcrew.workers.sandboxd.disks.tmpfs import TmpfsWorkspaces
from toolcrew.workers.sandboxd.egress.secrets import SecretValues
from toolcrew.workers.sandboxd.factory import SandboxFactory, SandboxSlots
from toolcrew.workers.sandboxd.forks import SessionForker
from toolcrew.workers.sandboxd.leases import Lease
from toolcrew.workers.sandboxd.monitor import IdleTimes, SessionMonitor
from toolcrew.workers.sandboxd.plans import Plans, Profile, SandboxPlan
from toolcrew.workers.sandboxd.pool import PoolLimits, WarmPools
from toolcrew.workers.sandboxd.reaper import Reaper
from toolcrew.workers.sandboxd.records import Records
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEPLOYMENT, LABEL_LEASE, LABEL_SANDBOXD, ListedContainer
from toolcrew.workers.sandboxd.runtime.seccomp import load_seccomp_profile
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import HostSession
from toolcrew.workers.sandboxd.sessions import Sessions
from toolcrew.workers.sandboxd.skill_store import SkillVolume
from toolcrew.workers.sandboxd.streams import serve_streams
from toolcrew.workers.sandboxd.suspension import SuspensionStore

SETTINGS = SandboxdSettings(sandbox_image="default", sandbox_images_allowed=["python", "foreign"])
PLANS = Plans(SETTINGS)
PLAN: SandboxPlan = PLANS.standard()


@dataclass(eq=False)
class MemoryWorkspace:
    """A workspace that lives as long as the object that created the workspace."""

    name: str
    size: WorkspaceSize
    owner: "MemoryWorkspaces"
    kind: ClassVar[Literal["image"]] = "image"
    layers: ClassVar[tuple[str, ...]] = ()
    outlives_container: ClassVar[bool] = True

    @asynccontextmanager
    async def mounted(self) -> AsyncIterator[WorkspaceMount]:
        yield WorkspaceMount(f"/workspaces/{self.name}")

    async def remove(self) -> None:
        if self.owner.refuse_removals:
            self.owner.refuse_removals -= 1
            raise SandboxUnavailable("the workspace is still mounted")
        self.owner.alive.pop(self.name, None)


class MemoryWorkspaces:
    """Workspaces in memory that outlive containers. `overfull`: the result of `find_overfull`."""

    kind: Literal["image"] = "image"

    def __init__(self, *, is_hard: bool = True) -> None:
        self.is_hard = is_hard
        self.alive: dict[str, MemoryWorkspace] = {}
        self.overfull: dict[str, int] = {}
        self.refuse_removals = 0

    async def make(self, name: str, size: WorkspaceSize) -> MemoryWorkspace:
        self.alive[name] = MemoryWorkspace(name, size, self)
        return self.alive[name]

    def stack(self, name: str, below: Workspace) -> None:
        """Return None: these workspaces have no disks."""

    def find(self, name: str, size: WorkspaceSize, layers: tuple[str, ...] = ()) -> MemoryWorkspace | None:
        return self.alive.get(name)

    async def sweep(self, keep: Set[str]) -> int:
        ended = [name for name in self.alive if name not in keep]
        for name in ended:
            del self.alive[name]
        return len(ended)

    async def find_overfull(self) -> Mapping[str, int]:
        return self.overfull


class MemorySuspensionStore(SuspensionStore):
    """A store that counts archives. `refuse`, `refuse_to_unpack`: how many operations fail."""

    def __init__(self) -> None:
        self.archives: dict[str, str] = {}
        self.unpacked: list[str] = []
        self.refuse = 0
        self.refuse_to_unpack = 0
        self.refuse_to_forget = False

    async def pack(self, session: HostSession, sandbox: Sandbox, *, is_whole: bool = False) -> str:
        if self.refuse:
            self.refuse -= 1
            raise SandboxUnavailable("no space for an archive")
        name = f"archive-{len(self.archives)}-{sandbox.container[:8]}"
        self.archives[name] = session.id
        return name

    async def unpack(self, session: HostSession, sandbox: Sandbox) -> None:
        assert session.archive is not None
        if self.refuse_to_unpack:
            self.refuse_to_unpack -= 1
            raise SandboxUnavailable("the stored files are damaged")
        assert session.archive in self.archives
        self.unpacked.append(session.archive)

    async def forget(self, tenant: str, archive: str) -> None:
        if self.refuse_to_forget:
            raise SandboxUnavailable("the disk is read-only")
        self.archives.pop(archive, None)

    async def forget_all_but(self, kept_ids: Set[tuple[str, str]]) -> int:
        unknown = [name for name, session in self.archives.items() if (session.partition(":")[0], name) not in kept_ids]
        for name in unknown:
            del self.archives[name]
        return len(unknown)


@dataclass
class FakeHost:
    """The parts of one sandboxd."""

    engine: FakeEngine
    workspaces: Workspaces
    records: Records
    factory: SandboxFactory
    pools: WarmPools
    suspension_store: MemorySuspensionStore
    sessions: Sessions
    reaper: Reaper
    monitor: SessionMonitor
    lease: Lease

    @property
    def alive(self) -> list[str]:
        """Return the running containers."""
        return list(self.engine.alive)


def build_host(
    folder: Path,
    *behaviours: Behaviour,
    limit: int = 10,
    workspaces: Workspaces | None = None,
    pool: PoolLimits | None = None,
    idle: IdleTimes | None = None,
    name: str = "test",
    engine: FakeEngine | None = None,
    suspension_store: MemorySuspensionStore | None = None,
    plans: Plans = PLANS,
    prepare_network: Callable[[HostSession, Sandbox], Awaitable[None]] | None = None,
) -> FakeHost:
    """Build all parts over a fake engine. The next host of the same name finds the content of `folder`."""
    engine = engine or FakeEngine(*behaviours)
    lease = Lease.take(folder / "leases", name)
    records = Records(folder / name)
    owner = {LABEL_DEPLOYMENT: "default", LABEL_SANDBOXD: name, LABEL_LEASE: lease.label}
    profile = Profile(seccomp=load_seccomp_profile(), cgroup_version=1, life_s=3600)
    slots = SandboxSlots(limit, wait_s=0.0)
    factory = SandboxFactory(engine, profile, workspaces or TmpfsWorkspaces(), records, slots, owner, "default")  # type: ignore[arg-type]
    pools = WarmPools(factory, {PLAN: pool.target} if pool is not None else {}, pool or PoolLimits(0, 1, 0, 1))
    suspension_store = suspension_store or MemorySuspensionStore()
    sessions = Sessions(
        factory, pools, suspension_store, records, limit=100, revise=plans.revise, prepare_network=prepare_network
    )
    reaper = Reaper(factory, records, lease, "default", name)
    monitor = SessionMonitor(sessions, factory, reaper, idle or IdleTimes(3600, 7200))
    return FakeHost(
        engine, factory.workspaces, records, factory, pools, suspension_store, sessions, reaper, monitor, lease
    )


@asynccontextmanager
async def open_host(folder: Path, *behaviours: Behaviour, **options: Any) -> AsyncIterator[FakeHost]:
    """Open a host and close the host on exit, even if the engine refuses requests."""
    host = build_host(folder, *behaviours, **options)
    try:
        yield host
    finally:
        await end_host(host)


async def end_host(host: FakeHost) -> None:
    engine = host.engine
    engine.start_gate.set()
    engine.remove_gate.set()
    engine.refuse_removals = 0
    await host.sessions.close_all()
    await host.pools.close()
    await host.factory.end()
    await engine.end()
    host.lease.give_back()


@dataclass
class Sandboxd:
    """A daemon in this process on a real socket, over a fake engine."""

    path: Path
    host: FakeHost
    server: RequestServer
    control: ControlRequests
    secrets: SecretValues
    clients: list[SandboxClient] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        return self.host.engine

    @property
    def sessions(self) -> Sessions:
        return self.host.sessions

    def client(self) -> SandboxClient:
        client = SandboxClient(self.path)
        self.clients.append(client)
        return client

    def session(self, name: str = "acme:s1") -> HostSession:
        entry = self.sessions.find(name)
        assert entry is not None
        return entry

    async def open(
        self,
        session: str = "s1",
        *,
        options: SandboxOptions = DEFAULT_OPTIONS,
        policy: SandboxPolicy | None = None,
        **fields: Any,
    ) -> tuple[SandboxClient, str]:
        client, spec = self.client(), SessionSpec(**fields).with_defaults(options)
        return client, await asyncio.to_thread(client.open, "acme", session, spec, policy=policy)


def sandbox_of(entry: HostSession) -> Sandbox:
    assert entry.sandbox is not None
    return entry.sandbox


async def _read_no_uses() -> Sequence[Any]:
    return []


@asynccontextmanager
async def running_sandboxd(
    path: Path,
    *behaviours: Behaviour,
    uids: frozenset[int] | None = None,
    gateway_uids: frozenset[int] = frozenset(),
    checkpoints: Any = None,
    files: Any = None,
    plans: Plans = PLANS,
    **options: Any,
) -> AsyncIterator[Sandboxd]:
    """Run sandboxd without a container engine. `behaviours`: of the guests, in the order of their start."""
    host = build_host(path, *behaviours, plans=plans, **options)
    allowed = frozenset({os.geteuid()}) if uids is None else uids
    skills = SkillVolume(host.engine, "default", {})  # type: ignore[arg-type]
    values = SecretValues(host.sessions.cut_users)
    control = ControlRequests(
        host.sessions,
        SessionForker(host.sessions, host.factory),
        plans,
        HostStores(checkpoints, files, skills, path),
        SecretExchange(values, _read_no_uses),
        lambda: {"boot": "b00t"},
    )
    server = RequestServer(host.sessions, control.answer, serve_streams, allowed, gateway_uids)
    listening = await server.listen(path / "sandboxd.sock", 0o600)
    daemon = Sandboxd(path / "sandboxd.sock", host, server, control, values)
    try:
        yield daemon
    finally:
        listening.close()
        for client in daemon.clients:
            client.disconnect()
        await end_host(host)
        await server.close_connections()


def build_listed_container(
    name: str, *, sandboxd: str = "other", deployment: str = "default", lease: str = "", **fields: Any
) -> Any:
    """Return a container as the engine lists the container."""
    labels = {LABEL_DEPLOYMENT: deployment, LABEL_SANDBOXD: sandboxd, LABEL_LEASE: lease, **fields.pop("labels", {})}
    container = ListedContainer(id=f"id-{name}", name=name, state="running", labels=labels, created_at=0.0)
    return replace(container, **fields)
