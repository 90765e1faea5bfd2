"""Collects what the table of promises is judged from: asks engine and host, and proves the profile on one real sandbox."""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from contract.errors import OperatorError
from workers.sandboxd.egress_link import connect_proxy
from workers.sandboxd.engine import Engine
from workers.sandboxd.host_facts import read_host_facts
from workers.sandboxd.house import open_house
from workers.sandboxd.plans import Plans
from workers.sandboxd.promises import Evidence, WorkspaceFacts
from workers.settings import SandboxdSettings

_KILLED_S: Final = 3600.0


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
    # A name and folder of its own: its sandbox is nobody's leftover, and nobody's sandboxes are its. On the disk that it is to judge.
    name = f"doctor-{secrets.token_hex(8)}"
    was_there = settings.state().exists()
    state = settings.state() / name
    await asyncio.to_thread(_clear_killed, settings.state())
    own = {"sandboxd_name": name, "sandboxd_state": state, "sandboxd_keep_sessions": False, "pool_target": 0}
    try:
        async with open_house(settings.model_copy(update=own), engine) as house:
            workspaces = house.choice.workspaces
            return WorkspaceFacts(workspaces.kind, workspaces.is_hard, house.choice.note)
    finally:
        await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):  # somebody has begun to use it
                settings.state().rmdir()


def _clear_killed(state: Path) -> None:
    """Remove what checks have left that were killed: none takes an hour."""
    for left in state.glob("doctor-*"):
        with contextlib.suppress(OSError):  # another check was quicker
            if left.stat().st_mtime < time.time() - _KILLED_S:
                shutil.rmtree(left)


async def _find_egress_problem(settings: SandboxdSettings, plans: Plans) -> str | None:
    """None where the proxy answers, or no class uses one."""
    if all(terms.network != "egress" for terms in plans.classes.values()):
        return None
    path = settings.egress_socket
    assert path is not None  # Plans refuses a class with egress otherwise
    try:
        _, writer = await connect_proxy(path, settings.proxy_uids())
    except OSError as error:
        return f"no proxy at {path} ({error})"
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return None
