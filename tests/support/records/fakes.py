"""Fakes that replace a process of the product: catalog, transport, ledger, blobs and sandbox client."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import IO, Any

from tests.support.records.builders import KEY
from toolcrew.contract.calls import BLOB_TTL_S, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_call, encode_result
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.signing import ResultSeal
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.store.call_messages import ResultHub
from toolcrew.store.call_records import CallClaim
from toolcrew.workers.executor import CallPolicy, Executor
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient
from toolcrew.workers.tools.base import WorkerRegistry, WorkerResources

# Orchestrator


class StaticCatalog:
    """A catalog that never changes."""

    def __init__(self, *specs: ToolSpec) -> None:
        self._specs = specs

    async def specs(self) -> tuple[ToolSpec, ...]:
        return self._specs

    async def skills(self) -> tuple[SkillSummary, ...]:
        return ()

    def explain_missing(self, name: str) -> str | None:
        return None


class AnsweringTransport:
    """A transport whose worker is a function: (call, context) -> result. `deliver` raises what the function raises."""

    def __init__(self, answer: Callable[[ToolCall, ToolContext], ToolResult | Awaitable[ToolResult]]) -> None:
        self._answer = answer
        self.deliveries: list[Attempt] = []
        self.calls: list[ToolCall] = []
        self.contexts: list[ToolContext] = []
        self.commands: list[tuple[str, ToolCall]] = []
        self.settled: list[tuple[str, str]] = []

    async def deliver(self, attempt: Attempt) -> Any:
        call, context = decode_call(attempt.envelope, KEY)
        self.deliveries.append(attempt)
        self.calls.append(call)
        self.contexts.append(context)
        result = self._answer(call, context)
        return encode_result(
            result if isinstance(result, ToolResult) else await result,
            seal=ResultSeal(KEY, context.tenant, context.attempt),
        )

    def settle(self, tenant: str, call_id: str) -> None:
        self.settled.append((tenant, call_id))

    async def send_order(self, queue: str, envelope: str) -> None:
        call, context = decode_call(envelope, KEY)
        self.commands.append((queue, call))
        self.calls.append(call)
        self.contexts.append(context)

    async def aclose(self) -> None:
        """Close nothing."""


class MemoryAsyncBlobs:
    """Blobs in a dict, for the orchestrator. Tests can still read dropped blobs."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.dropped: list[str] = []

    async def leave(self, tenant: str, data: bytes, pool: str = "sandbox") -> str:
        key = f"{tenant}:{len(self.kept)}"
        self.kept[key] = data
        return key

    async def drop(self, key: str) -> None:
        self.dropped.append(key)

    async def take(self, tenant: str, key: str, *, keeps: bool = False) -> bytes:
        return self.kept[key] if keeps else self.kept.pop(key)


class StreamModel:
    """A model whose stream is a function of the request, for streams that stall, break or are observed."""

    name = "stream"

    def __init__(self, stream: Callable[[ModelRequest], AsyncIterator[Chunk]]) -> None:
        self._stream = stream

    def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        return self._stream(request)

    async def aclose(self) -> None:
        """Close nothing."""


async def close_hub(hub: ResultHub) -> None:
    """Close the hub, and cancel the close if it hangs. See the known defect about a swallowed cancellation."""
    closing = asyncio.create_task(hub.close())
    finished, _ = await asyncio.wait({closing}, timeout=1)
    if not finished:
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)


# Worker


class MemoryLedger:
    """A ledger with its claims in a set. `verdict`: the reply to claims instead of a grant."""

    def __init__(self, verdict: CallClaim | None = None) -> None:
        self.verdict = verdict
        self.claimed: set[tuple[str, str]] = set()
        self.refused: set[tuple[str, str]] = set()

    def claim(
        self, call: ToolCall, context: ToolContext, holder: str, meanwhile: Callable[[], object] = lambda: None
    ) -> CallClaim:
        key = (context.tenant, call.id)
        meanwhile()
        if self.verdict is not None:
            return self.verdict
        if key in self.claimed | self.refused:
            return CallClaim.STARTED
        self.claimed.add(key)
        return CallClaim.GRANTED

    def confirm(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        return CallClaim.STARTED

    def refuse(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        key = (context.tenant, call.id)
        if key in self.refused:
            return CallClaim.STARTED
        self.claimed.discard(key)
        self.refused.add(key)
        return CallClaim.GRANTED

    def forbid(self, tenant: str, call_id: str) -> bool:
        if (tenant, call_id) in self.claimed:
            return False
        self.refused.add((tenant, call_id))
        return True


class MemoryBlobs:
    """Blobs in a dict, for a worker."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def take(self, tenant: str, key: str) -> bytes:
        if key not in self.kept:
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, "gone")
        return self.kept.pop(key)

    def leave(self, tenant: str, data: bytes, ttl_s: int = BLOB_TTL_S) -> str:
        key = f"{tenant}:{len(self.kept)}"
        self.kept[key] = data
        return key


class FakeSandboxClient(SandboxClient):
    """A client that answers requests from a script. An entry is a GuestResponse, an exception, or a function of
    (request, body).
    """

    def __init__(self, *answers: Any) -> None:
        super().__init__("/nonexistent")
        self._answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.names: list[str] = []
        self.closed: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.skills: dict[str, tuple[str, bytes]] = {}
        """The placed skills: digest to the folder and the archive."""
        self.placed = 0

    def call(self, name: str, request: Mapping[str, Any], body: bytes = b"", **_: Any) -> GuestResponse:
        self.names.append(name)
        self.requests.append(dict(request))
        self.bodies.append(body)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(request, body)
        assert isinstance(answer, GuestResponse)
        return answer

    def find_skill(self, name: str, digest: str, *, shared: bool) -> str | None:
        return self.skills.get(digest, (None, b""))[0]

    def place_skill(self, name: str, digest: str, archive: IO[bytes], *, shared: bool) -> str:
        place = f"/skills/{digest[:8]}"
        archive.seek(0)
        self.skills[digest] = (place, archive.read())
        self.placed += 1
        return place

    def describe_open(self, name: str, spec: SessionSpec, **options: Any) -> dict[str, Any]:
        self.names.append(name)
        set_options = {field: value for field, value in options.items() if value is not None}
        self.requests.append({"spec": spec, **set_options})
        sandbox = {"id": "c0ffee", "generation": 1, "rebuilt": False}
        facts = {"image": spec.image or "default", "network": spec.network or "none", "hosts": []}
        return {"ok": True, "sandbox": sandbox, **facts, "workspace": "image", "start_s": 0.25}

    def checkpoint(self, name: str, *, automatic: bool = False) -> dict[str, Any]:
        self.names.append(name)
        return {"ok": True, "checkpoint": "c1", "bytes": 10240, "sha256": "0" * 64, "skipped": 0, "torn": False}

    def delete_checkpoint(self, name: str, checkpoint: str) -> dict[str, Any]:
        self.names.append(name)
        self.requests.append({"checkpoint": checkpoint})
        return {"deleted": True, "bytes": 10240}

    def close(self, name: str, *, fence: int | None = None) -> bool:
        self.closed.append(name)
        return True

    def cancel(self, name: str, call_id: str) -> bool:
        self.cancelled.append((name, call_id))
        return True


# sandboxd


def build_executor(
    registry: WorkerRegistry,
    client: SandboxClient | None,
    claims: Any,
    blobs: Any,
    facts: Mapping[str, str],
    holder: str = "",
    clock: Callable[[], float] = time.time,
    *,
    policy: CallPolicy | None = None,
    **resources: Any,
) -> Executor:
    """Build an executor without middleware. `resources`: further fields of WorkerResources."""
    shared = WorkerResources(facts, holder, client, **resources)
    return Executor(registry, claims, blobs, shared, policy or CallPolicy(registry), clock=clock)
