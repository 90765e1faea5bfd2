"""Every setting of every process of a deployment, as the environment of this one makes them: what `toolcrew config
show` prints.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from contract.errors import ConfigError, OperatorError
from contract.setting_rows import build_rows
from orchestrator.settings import child_environment, load_settings, program
from telemetry.settings import load_tracing_settings

ANSWER_S = 30.0
PROCESSES: dict[str, Callable[[], BaseModel]] = {
    "orchestrator": load_settings,
    "tracing, of all": load_tracing_settings,
}


async def read_settings() -> list[dict[str, Any]]:
    """Of each process: `process`, `settings` (name, value, default, origin), `problem`: why it would not start. Raises
    OperatorError.
    """
    return [_told(process, load) for process, load in PROCESSES.items()] + await _of_workers()


def _told(process: str, load: Callable[[], BaseModel]) -> dict[str, Any]:
    try:
        return {"process": process, "problem": "", "settings": [asdict(row) for row in build_rows(load())]}
    except ConfigError as error:
        return {"process": process, "problem": str(error), "settings": []}


async def _of_workers() -> list[dict[str, Any]]:
    """Asked of a process of their own: neither side knows the other's settings."""
    process = await asyncio.create_subprocess_exec(
        *program("workers.setting_list"),
        env=child_environment({}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            out, err = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise OperatorError(
                f"the worker side did not tell its settings within {ANSWER_S:g} s: try again when the host is less busy"
            ) from None
        raise
    if process.returncode:
        said = err.decode(errors="replace").strip()[-300:]
        raise OperatorError(
            f"the worker side did not tell its settings ({said}): install toolcrew again, with the extra 'worker'"
        )
    return list(json.loads(out))
