"""Child processes that read trees of untrusted users. Their memory and processor time are limited and are not those of
sandboxd, and sandboxd's interpreter stays free.
"""

import asyncio
import contextlib
import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.programs import program
from toolcrew.workers.sandboxd.budgets import FairBudget
from toolcrew.workers.sandboxd.cgroups import HELPERS_BYTES, Cgroups

MEMORY_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of the memory of one child."""
_PROCESSOR_S: Final = 600
_NICE: Final = 10
_ERROR_CHARS: Final = 500
_EXPENDABLE: Final = b"1000"
"""Value of /proc/self/oom_score_adj: when memory is short, the kernel kills this process first."""


_places: "WeakKeyDictionary[asyncio.AbstractEventLoop, FairBudget]" = WeakKeyDictionary()


async def run_child(tenant: str, module: str, descriptors: Sequence[int], within_s: float) -> int:
    """Run a module of toolcrew as a program, with numbers of descriptors as its arguments, which it inherits. Wait
    while the programs of other trees use all memory of their control group. Return the exit code if that is 0 or above
    1. Raises TimeoutError, and SandboxUnavailable when the program fails (exit code 1, or a signal).
    """
    places = _places.setdefault(asyncio.get_running_loop(), FairBudget(HELPERS_BYTES))
    async with places.hold(tenant, MEMORY_BYTES):
        return await _run_child(module, descriptors, within_s)


async def _run_child(module: str, descriptors: Sequence[int], within_s: float) -> int:
    argv = program(module, *map(str, descriptors))
    child = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE, pass_fds=descriptors)
    try:
        Cgroups().add_helper(child.pid)
        async with asyncio.timeout(within_s):
            _, error_output = await child.communicate()
    except BaseException:
        # Wait for the end of the process, which holds mounts: they must be free when the caller removes them.
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        raise
    code = child.returncode if child.returncode is not None else 1
    if code < 0 or code == 1:
        message = error_output.decode(errors="replace").strip()[-_ERROR_CHARS:]
        raise SandboxUnavailable(message or f"{module} ended with {code}")
    return code


def limit_child() -> None:
    """Limit this process, which `run_child` has started. Call this before anything is read."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_EXPENDABLE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
