"""Search for operators' tools in installed packages and named modules. A broken tool stops the start of the worker."""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, cast

from jsonschema.exceptions import SchemaError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.functions.call_context import CallHandler, FunctionHandler
from toolcrew.contract.functions.function_tools import tool
from toolcrew.contract.names import BUILTIN_TOOLS
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.workers.custom.calls import CustomCalls
from toolcrew.workers.tools.base import WorkerTool
from toolcrew.workers.tools.builtin import build_registry

ENTRY_POINT_GROUP = "toolcrew.tools"

FindEntryPoints = Callable[[], Collection[EntryPoint]]


@dataclass(frozen=True)
class LoadedTool:
    """A tool and its source. The source is a phrase for error messages."""

    tool: Tool[CallHandler]
    source: str


def load_custom_tools(
    modules: Sequence[str] = (),
    *,
    config: Mapping[str, Any] | None = None,
    find_entry_points: FindEntryPoints | None = None,
) -> tuple[WorkerTool, ...]:
    """Return the operators' tools as this worker runs them.

    The tools come from every installed package with entry points in `toolcrew.tools`, then from `modules`. `config`
    is added to `CallContext.config`. Raises ConfigError with the package or module: it cannot be imported, has no
    tool, or a name is in use.
    """
    loaded = [
        *_from_entry_points(find_entry_points or _find_installed),
        *(entry for name in modules for entry in _from_module(name)),
    ]
    calls = CustomCalls(config or {})
    return tuple(_build_worker_tool(entry, calls) for entry in _drop_duplicates(loaded))


def serve_values(values: Sequence[Any], calls: CustomCalls, source: str) -> tuple[WorkerTool, ...]:
    """Return the tools in `values`, as a worker runs them. A value is a tool, a function, a list of them, or a module.

    `source` names the owner in error messages. Raises ConfigError in the cases of load_custom_tools.
    """
    loaded = [entry for value in values for entry in _tools_of(value, source, "fix the tool")]
    return tuple(_build_worker_tool(entry, calls) for entry in _drop_duplicates(loaded))


def _find_installed() -> Collection[EntryPoint]:
    return entry_points(group=ENTRY_POINT_GROUP)


def _from_entry_points(find: FindEntryPoints) -> Iterator[LoadedTool]:
    for point in sorted(find(), key=lambda point: (point.name, point.value)):
        package = point.dist.name if point.dist is not None else "unknown"
        source = f"the package '{package}' (entry point '{point.name} = {point.value}')"
        advice = "fix the package, or uninstall it from the worker's environment"
        yield from _tools_of(_import_source(point.load, source, advice), source, advice)


def _from_module(name: str) -> Iterator[LoadedTool]:
    source = f"the module '{name}' of TOOLCREW_TOOL_MODULES"
    advice = "fix the module, check that it is on the worker's Python path, or remove it from the list"
    yield from _tools_of(_import_source(lambda: importlib.import_module(name), source, advice), source, advice)


def _import_source(load: Callable[[], Any], source: str, advice: str) -> Any:
    try:
        return load()
    except (
        Exception,
        SystemExit,
        # The outermost handler: a foreign module may raise anything, and the operator must see which module failed.
    ) as error:
        raise ConfigError(f"{source} cannot be loaded: {type(error).__name__}: {error}; {advice}") from error


def _tools_of(value: Any, source: str, advice: str) -> list[LoadedTool]:
    """Return the tools of an entry point or module. `value` is a tool, a function, a list of them, or a module."""
    if isinstance(value, ModuleType):
        values = [part for part in vars(value).values() if _is_ready(part)]
        if not values:
            raise ConfigError(
                f"{source} contains no tool: decorate a function with @tool of toolcrew.contract.functions; {advice}"
            )
    else:
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values:
            raise ConfigError(f"{source} is an empty list: add a tool; {advice}")
    return [LoadedTool(_as_tool(candidate, source, advice), source) for candidate in values]


def _is_ready(value: Any) -> bool:
    """Return whether the value is a tool from `@tool` or `toolcrew.as_tool`.

    A tool whose handler takes a ToolEnvironment is not.
    """
    return isinstance(value, Tool) and isinstance(value.handler, FunctionHandler)


def _as_tool(value: Any, source: str, advice: str) -> Tool[CallHandler]:
    if _is_ready(value):
        return cast("Tool[CallHandler]", value)
    if not inspect.isroutine(value):
        raise ConfigError(
            f"{source} is a {type(value).__name__}: use a tool, a function, a list of them, or a module; {advice}"
        )
    try:
        return tool(value)
    except TypeError as error:
        raise ConfigError(f"{source}: {error}; {advice}") from error


def _drop_duplicates(loaded: Sequence[LoadedTool]) -> Iterator[LoadedTool]:
    """Return each tool once, even if it was named several times.

    Raises ConfigError: two tools have the same name, or a tool has the name of a built-in tool.
    """
    builtin = _builtin_names()
    by_name: dict[str, LoadedTool] = {}
    for entry in loaded:
        name = entry.tool.name
        if name in builtin:
            raise ConfigError(
                f"{entry.source} has a tool '{name}', which is also the name of a built-in tool: rename the tool, for "
                "example with @tool(name=...)"
            )
        first = by_name.setdefault(name, entry)
        if first is entry:
            yield entry
        elif first.tool is not entry.tool:
            raise ConfigError(
                f"'{name}' is the name of two tools, in {first.source} and in {entry.source}: rename or remove one"
            )


@functools.cache
def _builtin_names() -> frozenset[str]:
    return frozenset(spec.name for spec in build_registry().specs()) | BUILTIN_TOOLS


def _build_worker_tool(loaded: LoadedTool, calls: CustomCalls) -> WorkerTool:
    custom = loaded.tool
    spec = custom.spec.model_copy(update={"pool": "tools"})
    worker_tool = WorkerTool(spec, calls.build_handler(custom), custom.validators)
    try:
        ToolRegistry([worker_tool])
    except SchemaError as error:
        raise ConfigError(f"{loaded.source}: tool '{spec.name}': {error.message}") from error
    return worker_tool
