"""Tasks that are begun by whoever needs them first, and work for everybody."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def begin_shared(work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """A task that does not belong to the call, or the run, that happened to begin it: its log lines do not carry their names, and it keeps nothing of
    them alive."""
    return asyncio.create_task(work, name=name, context=contextvars.Context())
