"""sandboxd as a whole: refuse to start where isolation cannot be had, sweep, listen, and take everything down at the end."""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from contract.errors import SandboxUnavailable
from workers.lifeline import hold_lifeline
from workers.sandboxd.engine import Engine, EngineFacts
from workers.sandboxd.hardening import SandboxLimits, build_container_config, find_drift
from workers.sandboxd.seccomp import load_seccomp_profile
from workers.sandboxd.server import Server, refuse_second
from workers.sandboxd.sessions import Sessions
from workers.settings import SandboxdSettings

log = structlog.get_logger(__name__)

ORPHAN_GRACE_S = 15.0
"""How long sandboxd outlives the keeper of an embedded stack: as long as that would have waited for the removal of all sandboxes."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run(settings: SandboxdSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises SandboxUnavailable when this host cannot isolate, OSError when the socket is taken."""
    hold_lifeline(ORPHAN_GRACE_S)
    engine = Engine()
    try:
        with cancelled_by_signals():
            await _run(settings, engine)
    except asyncio.CancelledError:
        log.info("sandboxd_stopped")
    finally:
        engine.close()


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT cancel the task that is in here, once: what it holds is then taken down in order."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    asked: list[int] = []

    def end(number: int) -> None:
        asked.append(number)
        if len(asked) == 1:
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _run(settings: SandboxdSettings, engine: Engine) -> None:
    sessions, facts = await prepare(settings, engine)
    # Before the sweep: the sandboxes of a sandboxd that lives are no leftovers.
    await refuse_second(settings.sandboxd_socket)
    swept = await sessions.sweep_leftovers()
    if swept:
        log.warning("leftovers_removed", containers=swept)
    server = Server(
        sessions,
        images=settings.allowed_images(),
        default_image=settings.sandbox_image,
        uids=settings.allowed_uids(),
        facts={
            "boot": secrets.token_hex(4),
            "engine": facts.version,
            "runtime": settings.sandbox_runtime,
            "name": settings.sandboxd_name,
        },
    )
    await _serve(settings, server, sessions)


async def prepare(settings: SandboxdSettings, engine: Engine) -> tuple[Sessions, EngineFacts]:
    """Check the engine and prove the profile on a real sandbox, which is gone at the end whatever happens.

    Raises SandboxUnavailable with what is missing and how to mend it.
    """
    facts = await engine.facts()
    await check_host(settings, engine, facts)
    sessions = Sessions(engine, settings.sandboxd_name, container_configs(settings, facts), settings.max_sandboxes)
    try:
        await _prove_profile(settings, engine, facts, sessions)
    except BaseException:
        await sessions.close_all()
        raise
    return sessions, facts


async def check_host(settings: SandboxdSettings, engine: Engine, facts: EngineFacts) -> None:
    """Raises SandboxUnavailable when seccomp, the runtime or the image is missing."""
    if not facts.seccomp:
        raise SandboxUnavailable("the Docker engine runs without seccomp, so sandboxes would not hold: use an engine built with it")
    if settings.sandbox_runtime not in facts.runtimes:
        raise SandboxUnavailable(
            f"the engine has no runtime '{settings.sandbox_runtime}' (it has: {', '.join(facts.runtimes)}): install it or set TOOLCREW_SANDBOX_RUNTIME"
        )
    if await engine.image_id(settings.sandbox_image) is None:
        raise SandboxUnavailable(
            f"the engine has no image {settings.sandbox_image}: build it with scripts/build-image, or set TOOLCREW_SANDBOX_IMAGE"
        )


def container_configs(settings: SandboxdSettings, facts: EngineFacts) -> Any:
    """A function (image, labels) -> raw container configuration under this host's profile."""
    seccomp = load_seccomp_profile()
    limits = SandboxLimits(
        memory_reserve_bytes=settings.sandbox_memory_reserve_bytes,
        workspace_bytes=settings.sandbox_workspace_bytes,
        cpus=settings.sandbox_cpus,
        pids=settings.sandbox_pids,
    )

    def build(image: str, labels: Mapping[str, str]) -> Mapping[str, Any]:
        return build_container_config(
            image=image,
            runtime=settings.sandbox_runtime,
            limits=limits,
            labels=labels,
            seccomp=seccomp,
            cgroup_version=facts.cgroup_version,
        )

    return build


async def _prove_profile(settings: SandboxdSettings, engine: Engine, facts: EngineFacts, sessions: Sessions) -> None:
    session = await sessions.open("start-up-check", settings.sandbox_image, 60)
    inspected = await engine.inspect(session.sandbox.container)
    drift = find_drift(container_configs(settings, facts)(settings.sandbox_image, {}), inspected)
    if drift:
        raise SandboxUnavailable("the engine does not keep the sandbox profile: " + "; ".join(drift))
    await sessions.close("start-up-check")


async def _serve(settings: SandboxdSettings, server: Server, sessions: Sessions) -> None:
    """Until it is cancelled."""
    path = settings.sandboxd_socket
    listening = await server.listen(path, settings.sandboxd_socket_mode)
    inode = path.stat().st_ino
    expiry = asyncio.ensure_future(sessions.expire_idle())
    log.info("sandboxd_ready", socket=str(path), image=settings.sandbox_image, runtime=settings.sandbox_runtime)
    try:
        await expiry
    finally:
        listening.close()
        _unlink_own(path, inode)
        expiry.cancel()
        await sessions.close_all()
        await server.close_connections()


def _unlink_own(path: Path, inode: int) -> None:
    """Before the long part of the end: a successor may listen at the same path by then."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()
