"""The part of a client that commands of a tenant and the MCP server use. The client of a pool (sdk/client.py) and the
one over HTTP (sdk/http_tenant_client.py) both have it.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from toolcrew.contract.access_views import KeyView, Page, SkillView
from toolcrew.contract.calls import ExecResult, ToolCall, ToolResult
from toolcrew.contract.model_endpoints import EndpointView
from toolcrew.contract.registry import Switch, ToolState
from toolcrew.contract.run_events import OnEvent
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.run_views import BatchStatus, DurableRunState, RunView
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.session_views import By, Checkpoint, UsageReport
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.approvals import Approver
from toolcrew.orchestrator.dispatch.call_event_listener import OnOutput
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.sdk.call_control import KilledCall
from toolcrew.orchestrator.sessions.session import SessionInfo
from toolcrew.store.audit import Actor
from toolcrew.store.batches import RowLocation
from toolcrew.store.call_reader import CallPage
from toolcrew.store.run_records import DurableRun
from toolcrew.store.session_list import SessionPage


class TenantSession(Protocol):
    """An open session (orchestrator/sessions/session.py)."""

    id: str
    tenant: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    async def info(self) -> SessionInfo: ...

    async def send(self, request: Request, on_output: OnOutput | None = None) -> ToolResult: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30,
        on_output: OnOutput | None = None,
    ) -> ExecResult: ...

    async def read_file(self, path: str) -> bytes: ...

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def import_folder(self, folder: Path | str, path: str = "/workspace") -> None: ...

    async def export(self, folder: Path | str, path: str = "/workspace") -> list[str]: ...

    async def fork(self, n: int = 1, *, leave_jobs: bool = False) -> "Sequence[TenantSession]": ...

    async def set_ttl(self, seconds: float) -> None: ...

    async def checkpoint(self) -> Checkpoint: ...

    async def close(self) -> None: ...


class TenantRuns(Protocol):
    """The runs of a tenant (orchestrator/sdk/client_runs.py: ViewedRuns)."""

    async def list(
        self, *, cursor: str | None, limit: int, state: DurableRunState | None, tenant: str
    ) -> Page[RunView]: ...

    async def execute(self, body: RunBody, session: str, on_event: OnEvent) -> DurableRun: ...

    async def get(self, run: str) -> RunView: ...

    async def fork(self, run: str, *, step: int, n: int = 1) -> Sequence[RunView]: ...

    async def cancel(self, run: str) -> RunView: ...

    async def transcript(self, run: str) -> Sequence[dict[str, Any]]: ...

    def follow(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]: ...

    def stored_events(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]: ...


class TenantBatches(Protocol):
    """The stored batches of a tenant (orchestrator/sdk/batch_views.py)."""

    async def list(self, tenant: str) -> Sequence[BatchStatus]: ...

    async def get(self, batch: str) -> tuple[BatchStatus, RowLocation | None]: ...

    async def cancel(self, batch: str) -> int: ...

    async def delete(self, batch: str) -> None: ...

    def lines(self, batch: str) -> AsyncIterator[str]: ...


class TenantClient(Protocol):
    """A client of one tenant (orchestrator/sdk/client.py)."""

    tenant: str

    @property
    def run_views(self) -> TenantRuns: ...

    @property
    def batch_views(self) -> TenantBatches: ...

    async def actor(self) -> Actor: ...

    async def key(self) -> KeyView: ...

    async def models(self, tenant: str | None = None) -> Sequence[EndpointView]: ...

    async def skill_views(self) -> Sequence[SkillView]: ...

    async def open_session(self) -> TenantSession: ...

    async def open_session_from(self, spec: SessionSpec) -> TenantSession: ...

    async def session(self, session: str, *, tenant: str | None = None) -> TenantSession: ...

    async def sessions(
        self, tenant: str | None = None, *, cursor: str | None = None, limit: int = 50
    ) -> SessionPage: ...

    async def tools(
        self, names: Iterable[str] | Literal["all"] = "all", *, session: TenantSession | None = None
    ) -> list[ToolSpec]: ...

    async def tool_states(self) -> list[ToolState]: ...

    async def tool_state(self, name: str) -> ToolState: ...

    async def switched_tenants(self, name: str) -> dict[str, Switch]: ...

    async def disable(self, name: str, *, reason: str | None = None, tenant: str | None = None) -> ToolState | None: ...

    async def enable(self, name: str, *, tenant: str | None = None) -> ToolState | None: ...

    async def review(
        self, call: ToolCall, spec: ToolSpec, session: str | None, approver: Approver | None = None
    ) -> ToolCall | ToolResult: ...

    async def usage_report(self, start: float, end: float, *, by: By, tenant: str | None = None) -> UsageReport: ...

    async def call_fields(self, call: str, tenant: str | None = None) -> dict[str, Any]: ...

    async def list_calls(
        self, tenant: str | None = None, limit: int = 100, position: str | None = None
    ) -> CallPage: ...

    async def kill_call(self, call: str, *, tenant: str | None = None, reason: str = "") -> KilledCall: ...
