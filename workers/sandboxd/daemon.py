"""sandboxd as a process: builds all parts, tests on a real sandbox that the security profile is applied, serves until a
signal, and shuts down in order.

Invariant: the start never changes a sandbox of another live process, and no worker gets a sandbox before the test has
passed. The order of `open_daemon` ensures this. First, the process takes the lease (a lock file that shows that it
lives). Second, it removes leftovers of dead processes and then takes over kept sessions. Third, a test sandbox shows
that the engine applies the whole profile. Only then can workers connect.
"""

import asyncio
import contextlib
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from toolcrew.archives.choice import open_store
from toolcrew.contract.calls import LONGEST_TIMEOUT_S
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import advise_missing
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.workers.lifeline import hold_lifeline
from toolcrew.workers.sandboxd.archives.checkpoints import MAX_CHECKPOINTS, Checkpoints
from toolcrew.workers.sandboxd.archives.workspaces import WorkspaceFiles
from toolcrew.workers.sandboxd.budgets import MemoryBudget
from toolcrew.workers.sandboxd.connection import OWNER, RequestServer
from toolcrew.workers.sandboxd.control import ControlRequests, HostStores, SecretExchange
from toolcrew.workers.sandboxd.disks.choice import Choice, choose_without_images, choose_workspaces
from toolcrew.workers.sandboxd.egress.relay import ProxyStreams, open_proxy
from toolcrew.workers.sandboxd.egress.secrets import ProxyAuthority, SecretValues, read_uses
from toolcrew.workers.sandboxd.egress.tunnels import Tunnels
from toolcrew.workers.sandboxd.factory import (
    SandboxFactory,
    SandboxSlots,
    StartCheck,
    WorkspaceNotMounted,
    count_states,
)
from toolcrew.workers.sandboxd.forks import SessionForker
from toolcrew.workers.sandboxd.images import Images, PullDisk
from toolcrew.workers.sandboxd.leases import Lease
from toolcrew.workers.sandboxd.monitor import DiskMonitor, IdleTimes, SessionMonitor
from toolcrew.workers.sandboxd.plans import DEFAULT_RUNTIME, Plans, Profile, SandboxPlan, load_plans
from toolcrew.workers.sandboxd.pool import PoolLimits, WarmPools, available_memory
from toolcrew.workers.sandboxd.reaper import Reaper
from toolcrew.workers.sandboxd.records import Records
from toolcrew.workers.sandboxd.runtime.attestation import ask_attestation, find_dirt
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEPLOYMENT, LABEL_LEASE, LABEL_SANDBOXD
from toolcrew.workers.sandboxd.runtime.containerd_engine import ContainerdEngine
from toolcrew.workers.sandboxd.runtime.engine import EngineFacts
from toolcrew.workers.sandboxd.runtime.engines import ContainerEngine, open_engine, open_images
from toolcrew.workers.sandboxd.runtime.oci import OciRuntime, find_obstacle, find_program
from toolcrew.workers.sandboxd.runtime.seccomp import load_seccomp_profile
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import HostSession
from toolcrew.workers.sandboxd.sessions import Sessions
from toolcrew.workers.sandboxd.skill_store import SkillVolume
from toolcrew.workers.sandboxd.streams import serve_streams
from toolcrew.workers.sandboxd.suspension import open_suspension_store
from toolcrew.workers.unix_listening import refuse_second, socket_mode, unlink_own

log = structlog.get_logger(__name__)

_NO_FOLDER = "bind source path does not exist"
"""The engine's error text when it does not see this process's folders."""
SUSPEND_S = 8.0
"""Seconds at the shutdown of sandboxd to pack the state that exists only in containers."""
ORPHAN_GRACE_S = 15.0
"""Seconds that sandboxd runs after the process of an embedded stack has died. A living process waits as long for the
removal of all sandboxes.
"""
POOL_REFILL_PER_S = 1.0
"""Starts of pool sandboxes per second. The limit leaves most of the host to calls."""
POOL_MEMORY_FLOOR_BYTES = 1024**3
"""Minimum available memory of the host to fill the pool, in bytes."""
SANDBOX_MAX_LIFE_S = 2 * LONGEST_TIMEOUT_S
"""Maximum life of a sandbox, in seconds. A sandbox then ends itself, even if sandboxd is dead. Its session gets a new
sandbox on the same workspace.
"""
STOP_AND_REMOVE = signal.SIGUSR1
"""Signal that ends sandboxd like SIGTERM, but keeps no sessions. For a deployment that is removed, such as an
embedded stack.
"""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, STOP_AND_REMOVE)


@dataclass(frozen=True)
class HostSetup:
    """Parts of the daemon that are the same for every kind of workspace."""

    settings: SandboxdSettings
    engine: ContainerEngine
    facts: EngineFacts
    plans: Plans
    profile: Profile
    lease: Lease
    skills: SkillVolume
    oci: OciRuntime | None
    """The runtime that starts sandboxes without the engine. None: this host lacks something for it."""
    engine_start: str | None
    """Why the engine starts the sandboxes. None: sandboxd starts them itself."""

    @property
    def starts_by_oci(self) -> bool:
        return self.engine_start is None


class Daemon:
    """The parts that serve requests, and the report for `status`."""

    def __init__(self, setup: HostSetup, choice: Choice) -> None:
        settings = setup.settings
        plans = setup.plans
        self.setup = setup
        self.choice = choice
        self.boot = secrets.token_hex(4)
        records = Records(settings.state())
        self.factory = SandboxFactory(
            setup.engine,
            setup.profile,
            choice.workspaces,
            records,
            SandboxSlots(settings.max_sandboxes),
            setup.skills.owner,
            settings.sandbox_image,
        )
        self.images = Images(
            open_images(setup.engine),
            plans,
            records,
            settings.image_cache_bytes,
            PullDisk(partial(_free_for_images, setup), 2 * settings.host_free_bytes),
        )
        self.factory.images = self.images
        self.images.release = self._release_image
        if setup.oci is not None:
            # List the OCI runtime even if it starts no sandbox: it finds the sandboxes of an earlier sandboxd.
            ours = [setup.oci]
            engines = self.factory.runtimes
            self.factory.runtimes = [*ours, *engines] if setup.starts_by_oci else [*engines, *ours]
        self.factory.check_start = StartCheck(choice.workspaces.is_hard).check
        limits = PoolLimits(0, POOL_REFILL_PER_S, POOL_MEMORY_FLOOR_BYTES, SANDBOX_MAX_LIFE_S / 2)
        self.pools = WarmPools(self.factory, plans.pooled(), limits)
        memory = MemoryBudget()
        store = open_suspension_store(settings.state() / "archives", settings.host_free_bytes, memory)
        self.secret_values = SecretValues(lambda changed: self.sessions.cut_users(changed))
        authority = ProxyAuthority(settings.egress_socket, settings.proxy_uids(), setup.skills.place_authorities)
        self.sessions = Sessions(
            self.factory,
            self.pools,
            store,
            records,
            limit=settings.max_sessions,
            revise=plans.revise,
            prepare_network=partial(_prepare_network, setup, self.secret_values, authority),
        )
        self.images.in_use = self._find_images_in_use
        archives = open_store(settings.workspace_store, settings.state(), settings.host_free_bytes)
        self.files = WorkspaceFiles(archives, settings.workspace_store, memory=memory)
        self.checkpoints = Checkpoints(archives, max_checkpoints=MAX_CHECKPOINTS, memory=memory)
        self.reaper = Reaper(self.factory, records, setup.lease, settings.deployment, settings.sandboxd_name)
        idle = IdleTimes(settings.idle_pause_s, settings.idle_evict_s)
        disk = (
            None if choice.workspaces.kind == "tmpfs" else DiskMonitor(settings.state(), settings.host_free_bytes // 2)
        )
        self.monitor = SessionMonitor(self.sessions, self.factory, self.reaper, idle, disk, self.checkpoints.forget_old)

    def describe(self) -> Mapping[str, Any]:
        """Return the fields of `status` that do not depend on sessions."""
        settings = self.setup.settings
        return {
            "boot": self.boot,
            "name": settings.sandboxd_name,
            "classes": sorted(self.setup.plans.classes),
            "largest": {name: options.model_dump() for name, options in self.setup.plans.largest_options().items()},
            "egress_classes": self.setup.plans.egress_classes(),
            "max_sandboxes": settings.max_sandboxes,
            "max_sessions": settings.max_sessions,
            "memory_free_bytes": available_memory(),
            "disk_free_bytes": shutil.disk_usage(settings.state()).free,
            "store": "local" if settings.workspace_store is None else "shared",
            "engine": f"{self.setup.facts.product} {self.setup.facts.version}",
            "runtime": settings.sandbox_runtime,
            "start": "oci" if self.setup.starts_by_oci else "engine",
            "workspaces": {
                "kind": self.choice.workspaces.kind,
                "hard": self.choice.workspaces.is_hard,
                "note": self.choice.note,
            },
            "room": {"taken": self.factory.slots.used, "limit": self.factory.slots.limit},
            "pool": self.pools.describe(),
            "engine_gate": self.factory.engine.describe(),
            "counts": self.factory.counts.describe(),
            "states": count_states(self.sessions.all(), len(self.pools)),
            **self.images.describe(),
        }

    def _find_images_in_use(self) -> Set[str | None]:
        """Return the content ids of the images of all sandboxes, and of all sessions, even without a sandbox."""
        return self.factory.images_in_use() | {session.plan.image_id for session in self.sessions.all()}

    async def _release_image(self, image: str) -> None:
        """Drop what is cached about an image before the image is removed."""
        self.factory.forget_image(image)
        if self.setup.oci is not None:
            await self.setup.oci.unpin(image)

    async def close(self, *, removes_sessions: bool = False) -> None:
        """Evict or remove every container. With `removes_sessions`, also delete the sessions, so that no later sandboxd
        takes them over.
        """
        await self.images.close()
        await self.pools.close()
        if removes_sessions:
            await self.sessions.close_all()
        else:
            await self.sessions.suspend_all(SUSPEND_S)
        await self.factory.end()


@asynccontextmanager
async def open_daemon(settings: SandboxdSettings, engine: ContainerEngine) -> AsyncIterator[Daemon]:
    """Check the host, remove leftovers of dead sandboxds, test the profile on a real sandbox, and take over kept
    sessions. At the end of the block, close everything.

    Raises SandboxUnavailable and ConfigError; the message says what is missing and how to fix it.
    """
    facts = await engine.facts()
    plans = load_plans(settings)
    if isinstance(engine, ContainerdEngine):
        settings = _require_oci(settings, plans)
    await check_host(settings, engine, facts, plans)
    state = settings.state()
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        lease = Lease.take(settings.sandboxd_leases, settings.sandboxd_name)
        stack.callback(lease.give_back)
        choice = choose_workspaces(
            settings.sandbox_workspace, state, settings.sandbox_workspace_bytes, settings.host_free_bytes
        )
        owner = {
            LABEL_DEPLOYMENT: settings.deployment,
            LABEL_SANDBOXD: settings.sandboxd_name,
            LABEL_LEASE: lease.label,
        }
        skills = SkillVolume(engine, settings.sandbox_image, owner, settings.state())
        profile = Profile(
            seccomp=load_seccomp_profile(),
            cgroup_version=facts.cgroup_version,
            life_s=SANDBOX_MAX_LIFE_S,
            skills_volume=skills.volume,
        )
        stack.push_async_callback(skills.close)
        await skills.open()

        oci, engine_start = _open_oci(settings, engine, facts)
        if oci is not None:
            stack.push_async_callback(oci.close)
        setup = HostSetup(settings, engine, facts, plans, profile, lease, skills, oci, engine_start)
        daemon = Daemon(setup, choice)
        stack.push_async_callback(daemon.close)
        await daemon.reaper.sweep()
        await skills.sweep(lease)
        proved = await _prove(daemon)
        if proved is not daemon:
            stack.push_async_callback(proved.close)
            daemon = proved
        _check_root(daemon)
        await _prove_others(daemon)
        _log_weaker_parts(daemon)
        log.info("sessions_adopted", sessions=daemon.sessions.adopt())
        await daemon.sessions.sweep()
        yield daemon


def _check_root(daemon: Daemon) -> None:
    """Raise SandboxUnavailable when a class has user root, and this host has no root inside."""
    setup = daemon.setup
    if not setup.plans.has_root():
        return
    if setup.oci is None or not setup.starts_by_oci or daemon.choice.workspaces.kind != "image":
        raise SandboxUnavailable(
            "a tenant class has user root, which needs sandboxes that sandboxd starts itself on workspaces of the kind "
            "image: run sandboxd as root where crun or runc is installed, or change the class"
        )
    if setup.oci.unmapped is not None:
        raise SandboxUnavailable(
            f"a tenant class has user root, and {setup.oci.unmapped}: use Linux 5.19 or later with the engine's images "
            "on ext4, xfs or btrfs, or change the class"
        )


def _log_weaker_parts(daemon: Daemon) -> None:
    setup, settings = daemon.setup, daemon.setup.settings
    if setup.engine_start is not None and settings.sandbox_start == "auto":
        log.warning("oci_start_not_used", reason=setup.engine_start)
    if setup.starts_by_oci and setup.oci is not None and setup.oci.unmapped is not None:
        log.warning("image_owners_not_mapped", reason=setup.oci.unmapped)
    if daemon.choice.note is not None and settings.sandbox_workspace == "auto":
        log.warning("workspaces_weaker", kind=daemon.choice.workspaces.kind, reason=daemon.choice.note)


def _require_oci(settings: SandboxdSettings, plans: Plans) -> SandboxdSettings:
    """Return the settings for a host without a Docker engine, where only sandboxd can start sandboxes. Raises
    SandboxUnavailable when they need a Docker engine.
    """
    others = sorted(plans.runtimes() - {DEFAULT_RUNTIME})
    if others or settings.sandbox_start == "engine":
        reason = f"the runtime '{others[0]}' of a tenant class" if others else "TOOLCREW_SANDBOX_START=engine"
        raise SandboxUnavailable(
            f"{reason} needs a Docker engine, and this sandboxd uses the images of containerd: change that, or start a "
            "Docker engine and unset TOOLCREW_CONTAINERD_SOCKET"
        )
    return settings.model_copy(update={"sandbox_start": "oci"})


async def check_host(settings: SandboxdSettings, engine: ContainerEngine, facts: EngineFacts, plans: Plans) -> None:
    """Raise SandboxUnavailable when seccomp, a runtime or the image is missing."""
    if not facts.seccomp:
        raise SandboxUnavailable(
            "the engine or the kernel runs without seccomp, so sandboxes would not be isolated: use those that were "
            "built with seccomp"
        )
    missing = sorted(plans.runtimes() - set(facts.runtimes))
    if missing:
        raise SandboxUnavailable(
            f"the engine has no runtime '{missing[0]}' (it has: {', '.join(facts.runtimes)}): install it, or set "
            "TOOLCREW_SANDBOX_RUNTIME or the runtime of the tenant class"
        )
    if await engine.image_id(settings.sandbox_image) is None:
        raise SandboxUnavailable(
            f"the engine has no image {settings.sandbox_image}: {advise_missing(settings.sandbox_image)}, or set "
            "TOOLCREW_SANDBOX_IMAGE"
        )


def _open_oci(
    settings: SandboxdSettings, engine: ContainerEngine, facts: EngineFacts
) -> tuple[OciRuntime | None, str | None]:
    """Return the runtime that starts sandboxes without the engine, or None where this is impossible; and why the engine
    starts new sandboxes, or None where it does not. Raises SandboxUnavailable when the settings require the runtime.
    """
    obstacle, program = find_obstacle(facts), find_program()
    if obstacle is None and program is not None:
        try:
            oci = OciRuntime(engine, program, facts)
            return oci, "TOOLCREW_SANDBOX_START is engine" if settings.sandbox_start == "engine" else None
        except (SandboxUnavailable, OSError) as error:
            obstacle = str(error)
    if settings.sandbox_start == "oci":
        raise SandboxUnavailable(
            f"this host cannot start sandboxes with an OCI runtime: {obstacle}; change that, or use a Docker engine "
            "with TOOLCREW_SANDBOX_START=engine"
        )
    return None, obstacle


def _free_for_images(setup: HostSetup) -> int:
    """Return the free bytes of the disks that a pull may fill: those of the engine's data and layers, if this process
    sees them, and that of the workspaces.
    """
    roots = [Path(root) for root in (setup.facts.data_root, setup.facts.layer_root) if root]
    folders = [setup.settings.state(), *(root for root in roots if root.is_dir())]
    return min(shutil.disk_usage(folder).free for folder in folders)


async def _prepare_network(
    setup: HostSetup, values: SecretValues, authority: ProxyAuthority, session: HostSession, sandbox: Sandbox
) -> None:
    """Connect a sandbox to the proxy. Raises SandboxUnavailable when the session has secrets and there is no proxy."""
    settings, plans = setup.settings, setup.plans
    if session.plan.network != "egress":
        return
    if session.plan.secrets:
        await authority.require()
    preamble = {"v": 1, "tenant": session.tenant, "session": session.id.partition(":")[2]}

    async def connect() -> ProxyStreams:
        # Read the rules for each connection: the tenant's rights may have shrunk.
        opening = {**preamble, "rules": plans.rules(session.policy).model_dump(mode="json")}
        if session.plan.secrets:
            await authority.refresh()
            secrets = await values.wait(session.tenant, session.secrets)
            opening |= {"run": session.run, "secrets": secrets}
        return await open_proxy(settings.egress_socket, opening, settings.proxy_uids())

    sandbox.tunnels = Tunnels(sandbox.send, sandbox.drain, connect, sandbox.end_hostile)


async def _prove(daemon: Daemon) -> Daemon:
    """Test a sandbox, and return the daemon. If the host does not support the preferred parts, return a daemon with
    weaker ones: the engine starts its sandboxes, or its workspaces are of another kind.

    Raises SandboxUnavailable when the profile is not applied.
    """
    setup = daemon.setup
    if setup.starts_by_oci:
        try:
            fault = await _try_sandbox(daemon, setup.plans.standard())
        except SandboxUnavailable as error:
            fault = str(error)
        if fault is None:
            return daemon
        if setup.settings.sandbox_start == "oci":
            raise SandboxUnavailable(fault)
        setup = replace(setup, engine_start=fault)
        daemon = Daemon(setup, daemon.choice)
    fault = await _try_sandbox(daemon, setup.plans.standard())
    if fault is None:
        return daemon
    settings = setup.settings
    if settings.sandbox_workspace != "auto" or daemon.choice.workspaces.kind != "image":
        raise SandboxUnavailable(fault)
    why = f"the engine does not see disk images that are made here ({fault})"
    weaker = Daemon(
        setup, choose_without_images(why, settings.state(), settings.sandbox_workspace_bytes, settings.host_free_bytes)
    )
    fault = await _try_sandbox(weaker, setup.plans.standard())
    if fault is not None:
        raise SandboxUnavailable(fault)
    return weaker


async def _prove_others(daemon: Daemon) -> None:
    """Test the profile under every other runtime that a class uses. Raises SandboxUnavailable with the runtime's
    name.
    """
    for plan in daemon.setup.plans.proofs()[1:]:
        try:
            fault = await _try_sandbox(daemon, plan)
        except SandboxUnavailable as error:
            fault = str(error)
        if fault is not None:
            kind = "user root" if plan.is_root else f"the runtime '{plan.runtime}'"
            raise SandboxUnavailable(f"sandboxes with {kind} of a tenant class cannot be used: {fault}")


async def _try_sandbox(daemon: Daemon, plan: SandboxPlan) -> str | None:
    """Start a real sandbox of that plan, and check it by inspection and by its guest's report. Return the reason if its
    workspace cannot be mounted, else None. Raises SandboxUnavailable for any other fault.
    """
    factory = daemon.factory
    await factory.slots.take()
    workspace = await factory.make_workspace(plan)
    try:
        sandbox = await factory.make(plan, workspace, 1)
    except SandboxUnavailable as error:
        await factory.discard_workspace(workspace)
        if not isinstance(error, WorkspaceNotMounted) and _NO_FOLDER not in str(error):
            raise
        return str(error)
    try:
        drift = await sandbox.runtime.find_drift(sandbox.container, sandbox.spec)
        attestation = await ask_attestation(sandbox, timeout_s=10.0)
    finally:
        await factory.discard(sandbox, workspace)
    if drift:
        advice = "Look for an engine plugin that changes containers, or use another engine or runtime"
        raise SandboxUnavailable(f"this host does not apply the sandbox profile: {' '.join(drift)} {advice}")
    dirt = find_dirt(attestation)
    if dirt:
        raise SandboxUnavailable(
            f"a new sandbox is not clean ({'; '.join(dirt)}): build its image again with scripts/build-image"
        )
    return None


async def run(settings: SandboxdSettings) -> None:
    """Serve until SIGTERM, SIGINT or STOP_AND_REMOVE. Raises SandboxUnavailable when this host cannot isolate
    sandboxes, and OSError when the socket is taken.
    """
    hold_lifeline(ORPHAN_GRACE_S)
    try:
        with cancelled_by_signals() as received:
            await _run(settings, received)
    except asyncio.CancelledError:
        log.info("sandboxd_stopped")


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[Sequence[int]]:
    """Cancel the current task once when a signal asks for the end. The task then shuts its parts down in order.
    Yields the list of received signals.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        # Only the first signal cancels: a second one must not interrupt the shutdown.
        if len(received) == 1:
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield received
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _run(settings: SandboxdSettings, received: Sequence[int]) -> None:
    # Check before anything is removed: the sandboxes of a living sandboxd are not leftovers.
    refuse_second(settings.sandboxd_socket, owner=OWNER)
    with contextlib.closing(await open_engine(settings)) as engine:
        async with open_daemon(settings, engine) as daemon:
            control = ControlRequests(
                daemon.sessions,
                SessionForker(daemon.sessions, daemon.factory),
                daemon.setup.plans,
                HostStores(daemon.checkpoints, daemon.files, daemon.setup.skills, settings.state()),
                SecretExchange(daemon.secret_values, partial(read_uses, settings.egress_socket, settings.proxy_uids())),
                daemon.describe,
            )
            server = RequestServer(daemon.sessions, control.answer, serve_streams, *settings.allowed_uids())
            await _serve(settings, server, daemon, received)


async def _serve(settings: SandboxdSettings, server: RequestServer, daemon: Daemon, received: Sequence[int]) -> None:
    """Serve until the task is cancelled. `received` then contains the signal that cancelled it."""
    path = settings.sandboxd_socket
    listening = await server.listen(path, socket_mode(frozenset().union(*settings.allowed_uids())))
    inode = path.stat().st_ino
    oci = daemon.setup.oci if daemon.setup.starts_by_oci else None
    start = "engine" if oci is None else oci.version
    log.info(
        "sandboxd_ready",
        socket=str(path),
        image=settings.sandbox_image,
        runtime=settings.sandbox_runtime,
        start=start,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(daemon.monitor.run())
            tasks.create_task(daemon.pools.keep_filled())
            tasks.create_task(daemon.images.run())
    finally:
        listening.close()
        # Remove the socket before the long part of the shutdown: the next sandboxd may soon listen at the same path.
        unlink_own(path, inode)
        await daemon.close(removes_sessions=STOP_AND_REMOVE in received)
        await server.close_connections()
