"""What a tool gets and gives: a bound sandbox in, an Outcome out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from pydantic import JsonValue

from contract.calls import Spill, ToolCall, ToolContext
from contract.errors import ErrorCode
from contract.functions.call_context import CallContext, CoroutineRunner
from contract.registry import Tool, ToolRegistry
from workers.call_events import CallEvents
from workers.sandbox_client import GuestResponse

OnData = Callable[[str, bytes], None]


@dataclass(frozen=True)
class Outcome:
    """What a handler made of a call. `blob`: bytes for the orchestrator that do not go into the text."""

    output: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    truncated: bool = False
    error: str | None = None
    error_code: ErrorCode | None = None
    blob: bytes | None = None
    spill: Spill | None = None


class Workbench(Protocol):
    """A call's bench: its sandbox, its context, its content."""

    call: ToolCall
    context: ToolContext
    events: CallEvents
    """The way to the caller while the call runs."""
    content: bytes
    """Bytes that came beside the arguments; empty when none did."""

    def run(self, request: Mapping[str, Any], body: bytes = b"", on_data: OnData | None = None) -> GuestResponse:
        """One request to the guest of the call's session. `on_data` gets (stream, bytes) as they come, else they are gathered.

        While `on_data` does not return nothing more is read, and the guest waits. Raises ToolFailure and SandboxUnavailable.
        """
        ...

    def call_context(self, runner: CoroutineRunner | None = None) -> CallContext:
        """The call's surroundings as every tool gets them: configuration, working directory, model of the caller, state of the session.

        `runner` runs the coroutines of model and state for a tool that is not asynchronous.
        """
        ...

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to see output before the call ends."""
        ...

    def show(self, stream: str, text: str) -> None:
        """A piece of output for whoever watches, now; nothing when nobody does. May wait for a slow one, for a bounded time."""
        ...

    def place_skill(self, digest: str, pack: Callable[[], IO[bytes]], *, is_shared: bool) -> str:
        """The folder of the skill with that digest in the sandbox, where it cannot be changed. `pack`: gives its files as a tar archive, in the order of
        their paths, when they are not there yet; `is_shared`: for every tenant, else for this call's."""
        ...

    def open_sandbox(
        self,
        image: str | None,
        ttl_s: float,
        *,
        restore: str | None = None,
        network: str | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """`restore`: a checkpoint's id; `moved`: another host had the session (SandboxClient.describe_open).

        Gives `image`, `network`, `workspace` (its kind) and `start_s`.
        """
        ...

    def checkpoint(self) -> Mapping[str, Any]:
        """Gives `checkpoint` (its id), `bytes`, `sha256`, `skipped` (sockets) and `torn`."""
        ...

    def delete_checkpoint(self, checkpoint: str) -> bool: ...

    def close_sandbox(self) -> bool: ...

    def host_facts(self) -> Mapping[str, str]:
        """`host` and `queue` of this worker."""
        ...


Handler = Callable[[dict[str, Any], Workbench], Outcome]
WorkerTool = Tool[Handler]
WorkerRegistry = ToolRegistry[Handler]
