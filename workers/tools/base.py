"""What a tool gets and gives: a bound sandbox in, an Outcome out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import JsonValue

from contract.calls import ToolContext
from contract.errors import ErrorCode
from contract.registry import Tool, ToolRegistry
from workers.sandbox_client import GuestResponse


@dataclass(frozen=True)
class Outcome:
    """What a handler made of a call. `blob`: bytes for the orchestrator that do not go into the text."""

    output: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    truncated: bool = False
    error: str | None = None
    error_code: ErrorCode | None = None
    blob: bytes | None = None


class Workbench(Protocol):
    """A call's bench: its sandbox, its context, its content."""

    context: ToolContext
    content: bytes
    """Bytes that came beside the arguments; empty when none did."""

    def run(self, request: Mapping[str, Any], body: bytes = b"") -> GuestResponse:
        """One request to the guest of the call's session. Raises ToolFailure and SandboxUnavailable."""
        ...

    def open_sandbox(self, image: str | None, ttl_s: float) -> Mapping[str, Any]: ...

    def close_sandbox(self) -> bool: ...

    def host_facts(self) -> Mapping[str, str]:
        """`host` and `queue` of this worker."""
        ...


Handler = Callable[[dict[str, Any], Workbench], Outcome]
WorkerTool = Tool[Handler]
WorkerRegistry = ToolRegistry[Handler]
