"""Collects what the table of promises is judged from: asks engine and host, and proves the profile on one real sandbox."""

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from contract.errors import OperatorError, SandboxUnavailable
from workers.sandboxd.engine import Engine
from workers.sandboxd.host_facts import read_host_facts
from workers.sandboxd.house import open_house
from workers.sandboxd.plans import Plans
from workers.sandboxd.promises import Evidence, WorkspaceFacts
from workers.settings import SandboxdSettings

_CONNECT_S = 3.0


async def examine(settings: SandboxdSettings, plans: Plans, engine: Engine) -> Evidence:
    """All that can be found out. Raises nothing for what is missing: that is evidence too."""
    evidence = Evidence(settings, read_host_facts(), plans, egress_problem=await _find_egress_problem(settings, plans))
    try:
        evidence = replace(evidence, facts=await engine.facts())
        evidence = replace(evidence, images=await _find_images(plans, engine))
        return replace(evidence, workspaces=await _prove(settings, engine))
    except OperatorError as error:
        return replace(evidence, problem=str(error))
    except OSError as error:
        return replace(
            evidence, problem=f"sandboxd's folders cannot be made: {error}; set TOOLCREW_SANDBOXD_STATE and TOOLCREW_SANDBOXD_LEASES"
        )


async def _find_images(plans: Plans, engine: Engine) -> Mapping[str, str | None]:
    return {image: await engine.image_id(image) for image in sorted(plans.images())}


async def _prove(settings: SandboxdSettings, engine: Engine) -> WorkspaceFacts:
    """One sandbox, as at the start of sandboxd. Raises SandboxUnavailable with what does not hold."""
    # A name and folder of its own: its sandbox is nobody's leftover, and nobody's sandboxes are its.
    name = f"doctor-{secrets.token_hex(8)}"
    state = settings.state().parent / name
    own = {"sandboxd_name": name, "sandboxd_state": state, "sandboxd_keep_sessions": False, "pool_target": 0}
    try:
        async with open_house(settings.model_copy(update=own), engine) as house:
            workspaces = house.choice.workspaces
            return WorkspaceFacts(workspaces.kind, workspaces.is_hard, house.choice.note)
    finally:
        await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)
        (settings.sandboxd_leases / f"{name}.name").unlink(missing_ok=True)


async def _find_egress_problem(settings: SandboxdSettings, plans: Plans) -> str | None:
    """None where the proxy answers, or no class uses one."""
    if all(terms.network != "egress" for terms in plans.classes.all.values()):
        return None
    try:
        if settings.egress_socket is None:
            raise SandboxUnavailable("TOOLCREW_EGRESS_SOCKET is not set")
        await _touch(settings.egress_socket)
    except (OSError, SandboxUnavailable, TimeoutError) as error:
        return str(error) or f"the proxy at {settings.egress_socket} does not answer"
    return None


async def _touch(path: Path) -> None:
    async with asyncio.timeout(_CONNECT_S):
        _, writer = await asyncio.open_unix_connection(str(path))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
