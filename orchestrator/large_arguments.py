"""Checks of large arguments run in a thread, so that the other requests of the process go on meanwhile."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from contract.schema import is_quick
from contract.specs import ToolSpec

T = TypeVar("T")


async def check_off_loop(
    spec: ToolSpec, arguments: Mapping[str, Any], check: Callable[[], T], *, text: bool = False
) -> T:
    """Return the result of `check`, a check of `arguments` against the schema of `spec`. Raises what it raises. `text`:
    as for `prepare_arguments`.
    """
    return check() if is_quick(spec, arguments, text=text) else await asyncio.to_thread(check)
