"""Checks of large arguments run in a thread, so that the other requests of the process go on meanwhile."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from contract.schema import has_more_values

LARGE_VALUES = 1000
"""A check of as many takes some milliseconds."""

T = TypeVar("T")


async def check_off_loop(arguments: Mapping[str, Any], check: Callable[[], T]) -> T:
    """The result of `check`, a check of `arguments`. Raises what it raises."""
    return await asyncio.to_thread(check) if has_more_values(arguments, LARGE_VALUES) else check()
