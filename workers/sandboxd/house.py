"""One sandboxd with all its parts: put together, proved on a real sandbox, and taken down in order."""

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from contract.errors import ConfigError, SandboxUnavailable
from workers.sandboxd.attestation import find_dirt, find_misfits, parse_attestation
from workers.sandboxd.disk_watch import DiskWatch
from workers.sandboxd.egress_link import open_proxy
from workers.sandboxd.egress_link import open_proxy
from workers.sandboxd.engine import LABEL_DEPLOYMENT, LABEL_LEASE, LABEL_SANDBOXD, Engine, EngineFacts
from workers.sandboxd.hardening import find_drift
from workers.sandboxd.keeping import IdleTimes, Keeper
from workers.sandboxd.leases import Lease
from workers.sandboxd.making import Maker
from workers.sandboxd.parking import StoreParking
from workers.sandboxd.plans import Plans, Profile
from workers.sandboxd.pool import PoolLimits, WarmPool
from workers.sandboxd.reaper import Reaper
from workers.sandboxd.records import Records
from workers.sandboxd.room import Room
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.seccomp import load_seccomp_profile
from workers.sandboxd.session import Session
from workers.sandboxd.sessions import Sessions
from workers.sandboxd.store.checkpoints import MOST_CHECKPOINTS, Checkpoints
from workers.sandboxd.store.choice import open_store
from workers.sandboxd.tunnels import Tunnels
from workers.sandboxd.workspaces.base import WorkspaceMount
from workers.sandboxd.workspaces.choice import Choice, choose_workspaces
from workers.settings import SandboxdSettings

log = structlog.get_logger(__name__)

SUSPEND_S = 8.0
"""How long the end of sandboxd may take to pack what containers alone have."""


@dataclass(frozen=True)
class House:
    """What serves, and what `status` tells of it."""

    settings: SandboxdSettings
    facts: EngineFacts
    boot: str
    plans: Plans
    choice: Choice
    maker: Maker
    pool: WarmPool | None
    sessions: Sessions
    checkpoints: Checkpoints
    keeper: Keeper
    reaper: Reaper

    def describe(self) -> Mapping[str, Any]:
        """What `status` tells beside the sessions."""
        pool = self.pool
        return {
            "boot": self.boot,
            "name": self.settings.sandboxd_name,
            "engine": self.facts.version,
            "runtime": self.settings.sandbox_runtime,
            "workspaces": {"kind": self.choice.workspaces.kind, "hard": self.choice.workspaces.is_hard, "note": self.choice.note},
            "room": {"taken": self.maker.room.taken, "limit": self.maker.room.limit},
            "sessions": len(self.sessions),
            "pool": None
            if pool is None
            else {"ready": len(pool), "target": self.settings.pool_target, "handed_out": pool.handed_out, "turned_away": pool.turned_away},
            "engine_gate": self.maker.engine.describe(),
        }

    async def close(self) -> None:
        """Give up or remove every container."""
        if self.pool is not None:
            await self.pool.close()
        if self.settings.sandboxd_keep_sessions:
            await self.sessions.suspend_all(SUSPEND_S)
        else:
            await self.sessions.close_all()
        await self.maker.end()


@asynccontextmanager
async def open_house(settings: SandboxdSettings, engine: Engine) -> AsyncIterator[House]:
    """Check the host, sweep what a predecessor left, prove the profile on a real sandbox, take over kept sessions. All of it goes at the end.

    Raises SandboxUnavailable and ConfigError with what is missing and how to mend it.
    """
    facts = await engine.facts()
    plans = _load_plans(settings)
    await check_host(settings, engine, facts, plans)
    state = settings.state()
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        lease = Lease.take(settings.sandboxd_leases, settings.sandboxd_name)
        stack.callback(lease.give_back)
        choice = choose_workspaces(settings.sandbox_workspace, state, settings.sandbox_workspace_bytes, settings.host_free_bytes)
        profile = Profile(seccomp=load_seccomp_profile(), cgroup_version=facts.cgroup_version, life_s=settings.sandbox_max_life_s)
        house = _build(settings, engine, facts, plans, choice, profile, lease)
        stack.push_async_callback(house.close)
        await house.reaper.sweep()
        house = await _prove(house, engine, profile, lambda other: _build(settings, engine, facts, plans, other, profile, lease))
        if house.choice.note is not None and settings.sandbox_workspace == "auto":
            log.warning("workspaces_weaker", kind=house.choice.workspaces.kind, why=house.choice.note)
        adopted = house.sessions.adopt()
        swept = await house.choice.workspaces.sweep({entry.workspace.name for entry in house.sessions.all()})
        log.info("sessions_adopted", sessions=adopted, workspaces_removed=swept)
        yield house


async def check_host(settings: SandboxdSettings, engine: Engine, facts: EngineFacts, plans: Plans) -> None:
    """Raises SandboxUnavailable when seccomp, a runtime or the image is missing."""
    if not facts.seccomp:
        raise SandboxUnavailable("the Docker engine runs without seccomp, so sandboxes would not hold: use an engine built with it")
    missing = sorted(plans.runtimes() - set(facts.runtimes))
    if missing:
        raise SandboxUnavailable(
            f"the engine has no runtime '{missing[0]}' (it has: {', '.join(facts.runtimes)}): install it, or set TOOLCREW_SANDBOX_RUNTIME "
            "or the runtime of the tenant class"
        )
    if await engine.image_id(settings.sandbox_image) is None:
        raise SandboxUnavailable(
            f"the engine has no image {settings.sandbox_image}: build it with scripts/build-image, or set TOOLCREW_SANDBOX_IMAGE"
        )


def _load_plans(settings: SandboxdSettings) -> Plans:
    try:
        return Plans(settings)
    except ValueError as error:
        raise ConfigError(f"TOOLCREW_TENANT_CLASSES: {error}") from None


def _build(
    settings: SandboxdSettings, engine: Engine, facts: EngineFacts, plans: Plans, choice: Choice, profile: Profile, lease: Lease
) -> House:
    records = Records(settings.state())
    owner = {LABEL_DEPLOYMENT: settings.deployment, LABEL_SANDBOXD: settings.sandboxd_name, LABEL_LEASE: lease.label}
    maker = Maker(engine, profile, choice.workspaces, records, Room(settings.max_sandboxes), owner, settings.sandbox_image)
    pool = _build_pool(settings, plans, maker)
    parking = StoreParking(Checkpoints(open_store(None, settings.state() / "parcels", settings.host_free_bytes)))
    sessions = Sessions(maker, pool, parking, records, limit=settings.max_sessions, equip=partial(_equip, settings, plans))
    reaper = Reaper(engine, maker, records, lease, settings.deployment, settings.sandboxd_name)
    idle = IdleTimes(settings.idle_pause_s, settings.idle_evict_s)
    return House(
        settings=settings,
        facts=facts,
        boot=secrets.token_hex(4),
        plans=plans,
        choice=choice,
        maker=maker,
        pool=pool,
        sessions=sessions,
        checkpoints=Checkpoints(open_store(settings.workspace_store, settings.state(), settings.host_free_bytes), most=MOST_CHECKPOINTS),
        keeper=Keeper(sessions, maker, reaper, idle, _build_watch(settings, choice)),
        reaper=reaper,
    )


def _build_pool(settings: SandboxdSettings, plans: Plans, maker: Maker) -> WarmPool | None:
    if not settings.pool_target:
        return None
    limits = PoolLimits(settings.pool_target, settings.pool_refill_per_s, settings.pool_memory_floor_bytes, settings.sandbox_max_life_s / 2)
    return WarmPool(maker, plans.standard(), limits)


def _build_watch(settings: SandboxdSettings, choice: Choice) -> DiskWatch | None:
    return None if choice.workspaces.kind == "tmpfs" else DiskWatch(settings.state(), settings.host_free_bytes // 2)


def _equip(settings: SandboxdSettings, plans: Plans, session: Session, sandbox: Sandbox) -> None:
    if session.plan.network != "egress":
        return
    assert settings.egress_socket is not None  # Plans refuses a class with egress otherwise
    rules = plans.rules(session.tenant).model_dump(mode="json")
    preamble = {"v": 1, "tenant": session.tenant, "session": session.id.partition(":")[2], "rules": rules}
    connect = partial(open_proxy, settings.egress_socket, preamble, settings.proxy_uids())
    sandbox.tunnels = Tunnels(sandbox.send, sandbox.drain, connect, sandbox.end_hostile)


async def _prove(house: House, engine: Engine, profile: Profile, rebuild: Callable[[Choice], House]) -> House:
    """The house, or the same with other workspaces when the engine does not see the ones that were made.

    Raises SandboxUnavailable when the engine does not keep the profile.
    """
    fault = await _try_sandbox(house, engine, profile)
    if fault is None:
        return house
    if house.settings.sandbox_workspace != "auto" or house.choice.workspaces.kind == "tmpfs":
        raise SandboxUnavailable(f"a sandbox does not get its workspace: {fault}")
    settings = house.settings.model_copy(update={"sandbox_workspace": "tmpfs"})
    other = choose_workspaces("tmpfs", settings.state(), settings.sandbox_workspace_bytes, settings.host_free_bytes)
    weaker = rebuild(replace(other, note=f"the engine does not see workspace images made here ({fault})"))
    fault = await _try_sandbox(weaker, engine, profile)
    if fault is not None:
        raise SandboxUnavailable(f"a sandbox does not get its workspace: {fault}")
    return weaker


async def _try_sandbox(house: House, engine: Engine, profile: Profile) -> str | None:
    """A real sandbox of the standard plan, inspected and asked; gives what is wrong with its workspace. Raises for all else."""
    plan, maker = house.plans.standard(), house.maker
    await maker.room.take()
    workspace = await maker.make_workspace(plan)
    sandbox = await maker.make(plan, workspace, 1)
    try:
        inspected = await engine.inspect(sandbox.container)
        attestation = parse_attestation(await sandbox.ask({"op": "attest", "timeout_s": 10.0}))
    finally:
        await maker.discard(sandbox, workspace)
    bind = next((str(found["Source"]) for found in inspected.get("Mounts") or [] if found.get("Destination") == "/workspace"), None)
    drift = find_drift(profile.build_config(plan, WorkspaceMount(bind), {}), inspected)
    if drift:
        raise SandboxUnavailable("the engine does not keep the sandbox profile: " + "; ".join(drift))
    dirt = find_dirt(attestation)
    if dirt:
        raise SandboxUnavailable("a new sandbox is not clean: " + "; ".join(dirt))
    is_hard = house.choice.workspaces.is_hard
    misfits = find_misfits(attestation, plan.workspace_bytes, plan.workspace_inodes) if is_hard else []
    return "; ".join(misfits) or None
