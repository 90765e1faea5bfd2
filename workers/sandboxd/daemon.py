"""sandboxd as a whole: refuse to start where isolation cannot be had, sweep, listen, and take everything down at the end."""

import asyncio
import secrets
import signal
from collections.abc import Mapping
from typing import Any

import structlog

from contract.errors import SandboxUnavailable
from workers.sandboxd.engine import Engine, EngineFacts
from workers.sandboxd.hardening import SandboxLimits, build_container_config, find_drift
from workers.sandboxd.seccomp import load_seccomp_profile
from workers.sandboxd.server import Server
from workers.sandboxd.sessions import Sessions
from workers.settings import SandboxdSettings

log = structlog.get_logger(__name__)


async def run(settings: SandboxdSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises SandboxUnavailable when this host cannot isolate, OSError when the socket is taken."""
    engine = Engine()
    try:
        sessions, facts = await prepare(settings, engine)
        boot = secrets.token_hex(4)
        server = Server(
            sessions,
            images=settings.allowed_images(),
            default_image=settings.sandbox_image,
            uids=settings.allowed_uids(),
            facts={"boot": boot, "engine": facts.version, "runtime": settings.sandbox_runtime, "name": settings.sandboxd_name},
        )
        await _serve(settings, server, sessions)
    finally:
        engine.close()


async def prepare(settings: SandboxdSettings, engine: Engine) -> tuple[Sessions, EngineFacts]:
    """Check the engine and prove the profile on a real sandbox. Raises SandboxUnavailable with what is missing and how to mend it."""
    facts = await engine.facts()
    await check_host(settings, engine, facts)
    sessions = Sessions(engine, settings.sandboxd_name, container_configs(settings, facts), settings.max_sandboxes)
    swept = await sessions.sweep_leftovers()
    if swept:
        log.warning("leftovers_removed", containers=swept)
    await _prove_profile(settings, engine, facts, sessions)
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
    try:
        inspected = await engine.inspect(session.sandbox.container)
        drift = find_drift(container_configs(settings, facts)(settings.sandbox_image, {}), inspected)
        if drift:
            raise SandboxUnavailable("the engine does not keep the sandbox profile: " + "; ".join(drift))
    finally:
        await sessions.close("start-up-check")


async def _serve(settings: SandboxdSettings, server: Server, sessions: Sessions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listening = await server.listen(settings.sandboxd_socket, settings.sandboxd_socket_mode)
    expiry = asyncio.ensure_future(sessions.expire_idle())
    log.info("sandboxd_ready", socket=str(settings.sandboxd_socket), image=settings.sandbox_image, runtime=settings.sandbox_runtime)
    try:
        await stop.wait()
    finally:
        listening.close()
        expiry.cancel()
        await sessions.close_all()
        await server.close_connections()
        settings.sandboxd_socket.unlink(missing_ok=True)
        log.info("sandboxd_stopped")
