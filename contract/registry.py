"""Tools by name: registering, looking up, filtering. Safe under concurrent access."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from contract.schema import check_schema
from contract.specs import ToolSpec

Handler = TypeVar("Handler")
Validator = Callable[[Mapping[str, Any]], str | None]
"""A custom check of valid arguments: None, or a sentence that says what is wrong and what to do."""


@dataclass(frozen=True)
class Tool(Generic[Handler]):
    """A spec, what runs it, and its custom checks. Each package of ours has its own handler type."""

    spec: ToolSpec
    handler: Handler
    validators: tuple[Validator, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def requires_permission(self) -> bool:
        return self.spec.requires_permission


class ToolRegistry(Generic[Handler]):
    """Tools by name. Registering a name again replaces the tool; an unknown name gives None, never an exception."""

    def __init__(self, tools: Iterable[Tool[Handler]] = ()) -> None:
        self._lock = threading.Lock()
        self._tools: dict[str, Tool[Handler]] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool[Handler]) -> None:
        """Add `tool` under its spec's name; a tool of that name is replaced. Raises jsonschema.SchemaError for parameters that no call could meet."""
        check_schema(tool.spec.parameters)
        with self._lock:
            self._tools[tool.spec.name] = tool

    def get(self, name: str) -> Tool[Handler] | None:
        """The tool of that name, or None."""
        with self._lock:
            return self._tools.get(name)

    def specs(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        """Specs of the registered tools, by name order; `names` keeps only those, "all" (alone or in the list) keeps every one."""
        with self._lock:
            tools = sorted(self._tools.values(), key=lambda tool: tool.spec.name)
        return filter_specs([tool.spec for tool in tools], names)

    def __len__(self) -> int:
        with self._lock:
            return len(self._tools)


def filter_specs(specs: Iterable[ToolSpec], names: Iterable[str] | Literal["all"]) -> list[ToolSpec]:
    """Those specs whose name is in `names`; "all" means every one."""
    if isinstance(names, str):
        names = [names]
    wanted = set(names)
    return [spec for spec in specs if "all" in wanted or spec.name in wanted]
