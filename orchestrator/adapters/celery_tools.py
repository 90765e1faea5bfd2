"""Tools that are tasks of the user's Celery application.

A call of such a tool is one task on that application's broker, with its routes, retries and limits. Its workers run it;
toolcrew only sends it and waits for its result.
"""

import asyncio
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from celery import Celery, Task
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.states import FAILURE, PENDING, REVOKED, SUCCESS

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.call_context import CallContext, CallHandler, FunctionHandler
from toolcrew.contract.functions.function_schemas import FunctionShape, read_function, tool_parameters
from toolcrew.contract.functions.function_tools import checked_spec
from toolcrew.contract.registry import Tool

OWN_TASKS = ("celery.*", "toolcrew.*")
"""Tasks that are never tools: those of Celery and those of `toolcrew.celery`."""
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
_NAMESPACE = uuid.UUID("6f7c1f7e-6d6b-5f0c-9d55-2f6f0b3a6a10")
_NAME_CHARS = 64
_OTHER_CHARS = re.compile(r"[^A-Za-z0-9_-]+")


def tools_from(
    app: Celery, names: Iterable[str] = ("*",), *, timeout_s: float | None = None
) -> list[Tool[CallHandler]]:
    """Return a tool for each registered task of a Celery application whose name matches one of the patterns `names`.

        tools = LocalTools(tools_from(app, ["shop.tasks.*"]))

    The signature of the task gives the schema, its docstring the description; dots of its name become underscores.
    `timeout_s`: the limit of a call; None: the task's own time limit, or that of the application. A call that ends at
    its limit, or is cancelled, is revoked. Raises TypeError for a task without a JSON form, and for an application
    without a result backend.
    """
    if isinstance(app.backend, DisabledBackend):
        raise TypeError("the Celery application has no result backend, so no result arrives: set result_backend")
    app.finalize()  # registers the tasks of decorators that have not run yet
    app.loader.import_default_modules()
    patterns = tuple(names)
    tools: dict[str, Tool[CallHandler]] = {}
    for task_name, task in sorted(app.tasks.items()):
        if not _matches(task_name, patterns) or _matches(task_name, OWN_TASKS):
            continue
        tool = _build_tool(app, task, timeout_s)
        if tool.spec.name in tools:
            raise TypeError(f"two tasks have the tool name {tool.spec.name}: select one of them with `names`")
        tools[tool.spec.name] = tool
    return list(tools.values())


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _build_tool(app: Celery, task: "Task[Any, Any]", timeout_s: float | None) -> Tool[CallHandler]:
    name = _OTHER_CHARS.sub("_", task.name)[-_NAME_CHARS:]
    shape = read_function(task.run, name=name)
    limits = (timeout_s, task.time_limit, task.soft_time_limit, app.conf.task_time_limit, app.conf.task_soft_time_limit)
    spec = checked_spec(
        name,
        description=shape.docstring.description or f"The task {task.name}.",
        parameters=tool_parameters(shape),
        timeout_s=next((float(limit) for limit in limits if limit), None),
    )
    return Tool(spec, FunctionHandler(TaskCalls(app, task, shape).run, returns_coroutine=True))


@dataclass(frozen=True)
class TaskCalls:
    """Calls of one task."""

    app: Celery
    task: "Task[Any, Any]"
    shape: FunctionShape

    async def run(self, arguments: dict[str, Any], context: CallContext) -> Any:
        """Run the task once and return its value. Raises the exception of the task, or ToolFailure."""
        # Only a check: the worker gets the arguments as JSON and converts them itself.
        self.shape.bind(arguments, context)
        task_id = str(uuid.uuid5(_NAMESPACE, "/".join((context.tenant, context.run or "", context.call_id))))
        try:
            await asyncio.to_thread(self._send, task_id, arguments)
            return await self._wait(task_id)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.to_thread(self.app.control.revoke, task_id, terminate=True))
            raise

    def _send(self, task_id: str, arguments: dict[str, Any]) -> None:
        # The call may be sent again after its process died. The task has then a state, unless it still waits.
        if self.app.backend.get_task_meta(task_id)["status"] != PENDING:
            return
        positional = [arguments[name] for name in self.shape.positional if name in arguments]
        named = {name: value for name, value in arguments.items() if name not in self.shape.positional}
        self.task.apply_async(tuple(positional), named, task_id=task_id, ignore_result=False)

    async def _wait(self, task_id: str) -> Any:
        pause_s = _FIRST_PAUSE_S
        while True:
            meta = await asyncio.to_thread(self.app.backend.get_task_meta, task_id)
            if meta["status"] == SUCCESS:
                return meta["result"]
            if meta["status"] in (FAILURE, REVOKED):
                raise _build_error(self.task.name, meta["result"])
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _build_error(task: str, error: object) -> BaseException:
    if isinstance(error, TimeLimitExceeded | SoftTimeLimitExceeded):
        return ToolFailure(ErrorCode.TIMEOUT, f"the task {task} reached its time limit")
    if isinstance(error, TaskRevokedError):
        return ToolFailure(ErrorCode.CANCELLED, f"the task {task} was revoked")
    if isinstance(error, BaseException):
        return error
    return ToolFailure(ErrorCode.INTERNAL, f"the task {task} failed: {error}")
