"""The client of commands and of the MCP server over the HTTP API: the methods of ToolClient that a tenant may use."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from toolcrew.contract.access_views import KeyView, Page, SkillView, ToolView
from toolcrew.contract.calls import ExecResult, SandboxInfo, ToolCall, ToolResult
from toolcrew.contract.clock import parse_instant
from toolcrew.contract.errors import ConfigError, OperatorError, ToolFailure
from toolcrew.contract.model_endpoints import EndpointView
from toolcrew.contract.registry import Switch, ToolState
from toolcrew.contract.run_events import OnEvent, parse_event
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.contract.run_views import BatchStatus, DurableRunState, RunView
from toolcrew.contract.schema import prepare_arguments
from toolcrew.contract.session_spec import EMPTY_SESSION, SandboxOptions, SessionSpec, pick_options
from toolcrew.contract.session_views import By, Checkpoint, OpenSession, SessionView, UsageReport
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.admission import WaitNotice, waiting_listener
from toolcrew.orchestrator.approvals import DEFAULT_POLICY, Approver
from toolcrew.orchestrator.approvals.approvers import RefusingApprover, choose_approver, is_interactive
from toolcrew.orchestrator.approvals.gate import review
from toolcrew.orchestrator.approvals.policies import load_policy
from toolcrew.orchestrator.dispatch.call_event_listener import OnOutput
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.sdk.call_control import KilledCall
from toolcrew.orchestrator.sdk.http.async_client import AsyncClient, AsyncSession
from toolcrew.orchestrator.sdk.http.connection import Ask, parse, parse_object, segment, with_key
from toolcrew.orchestrator.sessions.session import SessionInfo
from toolcrew.store.audit import Actor
from toolcrew.store.batches import RowLocation
from toolcrew.store.call_reader import CallPage, ListedCall
from toolcrew.store.call_records import CallRecord
from toolcrew.store.run_records import DurableRun, RunEnd
from toolcrew.store.session_list import SessionPage
from toolcrew.store.slots import WaitReason

MAX_PAGE = 200


class HttpTenantSession:
    """An open session over HTTP (sdk/tenant_client.py: TenantSession)."""

    def __init__(self, client: "HttpTenantClient", session: AsyncSession, info: SessionInfo, *, is_guest: bool) -> None:
        """Create a handle. `is_guest`: the end of a `with` block leaves the session open."""
        self._client = client
        self._session = session
        self._info = info
        self._is_guest = is_guest
        self.id = info.session
        self.tenant = info.tenant

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_guest:
            await asyncio.shield(self.close())

    async def info(self) -> SessionInfo:
        """Return the session as it was opened or found."""
        return self._info

    async def send(self, request: Request, on_output: OnOutput | None = None) -> ToolResult:
        """Make the call of a request, and return its result. Its id is new. A cancellation kills the call."""
        call = request.call
        try:
            return await self._session.call(
                call.name,
                await self._client.prepare(call, is_text=request.text_arguments),
                timeout_s=request.timeout_s,
                on_output=on_output,
                on_waiting=self._notice_of(call),
            )
        except (ToolFailure, OperatorError) as error:
            metadata = dict(error.metadata) if isinstance(error, ToolFailure) else {}
            return ToolResult.failed(call, error.code, str(error), metadata=metadata)

    def _notice_of(self, call: ToolCall) -> Callable[[str, str], object] | None:
        """Return a function that passes a notice of the API to the listener of this task."""
        listener = waiting_listener()
        if listener is None:
            return None
        return lambda reason, message: listener(
            WaitNotice(call.id, self.tenant, call.name, WaitReason(reason), message)
        )

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a program, and return its whole output. `on_output` gets nothing before."""
        return await self._session.exec(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)

    async def read_file(self, path: str) -> bytes:
        return await self._session.files.read(path)

    async def write_file(self, path: str, data: bytes) -> None:
        await self._session.files.write(path, data)

    async def import_folder(self, folder: Path | str, path: str = "/workspace") -> None:
        await self._session.import_folder(folder, path)

    async def export(self, folder: Path | str, path: str = "/workspace") -> list[str]:
        return await self._session.export(folder, path)

    async def fork(self, n: int = 1, *, leave_jobs: bool = False) -> list["HttpTenantSession"]:
        forks = await self._session.fork(n, leave_jobs=leave_jobs)
        return [
            HttpTenantSession(
                self._client, fork, self._info.model_copy(update={"session": fork.id, "sandbox": None}), is_guest=False
            )
            for fork in forks
        ]

    async def set_ttl(self, seconds: float) -> None:
        await self._session.set_ttl(seconds)

    async def checkpoint(self) -> Checkpoint:
        return await self._session.checkpoint()

    async def close(self) -> None:
        await self._session.close()


class HttpTenantRuns:
    """The runs of a tenant over HTTP (sdk/tenant_client.py: TenantRuns)."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(
        self, *, cursor: str | None, limit: int, state: DurableRunState | None, tenant: str
    ) -> Page[RunView]:
        params = {"cursor": cursor, "limit": limit, "state": state and state.value}
        return await self._client.get(Page[RunView], "/v1/runs", params)

    async def execute(self, body: RunBody, session: str, on_event: OnEvent) -> DurableRun:
        """Start a run in an open session, and return it after its end. A cancellation of this method cancels it."""
        run = await self._client.runs.start(body, environment=ItemEnvironment(session=session))
        try:
            async for _, text in self._client.runs.follow(run.id):
                event = parse_event(parse_object(text.encode()))
                if event is not None:
                    on_event(event)
        except asyncio.CancelledError:
            await asyncio.shield(self._client.runs.cancel(run.id))
            raise
        return read_run(await self.get(run.id))

    async def get(self, run: str) -> RunView:
        return await self._client.runs.get(run)

    async def fork(self, run: str, *, step: int, n: int = 1) -> Sequence[RunView]:
        return await self._client.runs.fork(run, step=step, n=n)

    async def cancel(self, run: str) -> RunView:
        return await self._client.runs.cancel(run)

    async def transcript(self, run: str) -> Sequence[dict[str, Any]]:
        return await self._client.runs.transcript(run)

    def follow(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        return self._client.runs.follow(run, after)

    async def stored_events(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Yield the events of a run that has ended. Raises ConfigError for a run that has not."""
        if not (await self.get(run)).state.is_final:
            raise ConfigError(f"run {run} has not ended, and the HTTP API only streams its events: follow them")
        async for entry in self.follow(run, after):
            yield entry


class HttpTenantBatches:
    """The stored batches of a tenant over HTTP (sdk/tenant_client.py: TenantBatches)."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(self, tenant: str) -> Sequence[BatchStatus]:
        return [status async for status in self._client.batches.list()]

    async def get(self, batch: str) -> tuple[BatchStatus, RowLocation | None]:
        return await self._client.batches.get(batch), None

    async def cancel(self, batch: str) -> int:
        return (await self._client.batches.cancel(batch)).request_counts.waiting

    async def delete(self, batch: str) -> None:
        await self._client.batches.delete(batch)

    async def lines(self, batch: str) -> AsyncIterator[str]:
        ask = Ask("GET", f"/v1/batches/{segment(batch)}/results", repeats=True)
        async with self._client.stream(ask) as response:
            async for line in response.aiter_lines():
                yield f"{line}\n"


class HttpTenantClient:
    """A tenant's client over HTTP (sdk/tenant_client.py: TenantClient). `connect` creates it."""

    def __init__(
        self, client: AsyncClient, key: KeyView, tenant: str, settings: OrchestratorSettings, approver: Approver
    ) -> None:
        self.http = client
        self.tenant = tenant
        self._key = key
        self._settings = settings
        self._approver = approver
        self._policy = load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, settings: OrchestratorSettings, *, tenant: str | None = None
    ) -> AsyncIterator["HttpTenantClient"]:
        """Connect to TOOLCREW_URL with TOOLCREW_API_KEY. `tenant`: the tenant to act for, with an operator's key.
        Raises ConfigError, ApiUnavailable, ToolFailure (UNAUTHENTICATED, PERMISSION_DENIED).
        """
        api_key = settings.api_key.get_secret_value() if settings.api_key is not None else None
        async with AsyncClient(settings.url, api_key, tenant=tenant) as client:
            key = await client.key()
            yield cls(client, key, tenant or key.tenant, settings, _choose_approver(settings))

    @property
    def run_views(self) -> HttpTenantRuns:
        return HttpTenantRuns(self.http)

    @property
    def batch_views(self) -> HttpTenantBatches:
        return HttpTenantBatches(self.http)

    async def key(self) -> KeyView:
        return self._key

    async def models(self, tenant: str | None = None) -> Sequence[EndpointView]:
        return [model async for model in self.http.pages(Page[EndpointView], "/v1/models")]

    async def skill_views(self) -> Sequence[SkillView]:
        return [skill async for skill in self.http.pages(Page[SkillView], "/v1/skills")]

    async def actor(self) -> Actor:
        """Return the holder of the key."""
        return Actor.model_validate(
            {"key": self._key.id, "role": self._key.role, "name": self._key.name, "tenant": self._key.tenant}
        )

    async def open_session(self) -> HttpTenantSession:
        return await self.open_session_from(EMPTY_SESSION)

    async def open_session_from(self, spec: SessionSpec) -> HttpTenantSession:
        """Open a session. `spec.workspace`: a local folder. Raises ConfigError for another kind of workspace."""
        if spec.workspace is not None and not await asyncio.to_thread(Path(spec.workspace).is_dir):
            raise ConfigError(
                f"{spec.workspace} is not a folder: over TOOLCREW_URL a workspace is a folder. Unpack the archive, or "
                "set TOOLCREW_REDIS_URL"
            )
        session = await self.http.sessions.open(
            spec.workspace,
            image=spec.image,
            ttl_s=spec.ttl_s,
            restore=spec.restore,
            network=spec.network,
            options=pick_options(spec),
            tool_config=spec.tool_config or None,
        )
        return HttpTenantSession(self, session, read_info(await session.info()), is_guest=False)

    async def session(self, session: str, *, tenant: str | None = None) -> HttpTenantSession:
        handle = self.http.sessions.get(session)
        return HttpTenantSession(self, handle, read_info(await handle.info()), is_guest=True)

    async def sessions(self, tenant: str | None = None, *, cursor: str | None = None, limit: int = 50) -> SessionPage:
        params = {"cursor": cursor, "limit": min(limit, MAX_PAGE)}
        page = await self.http.get(Page[OpenSession], "/v1/sessions", params)
        return SessionPage(tuple(page.data), page.next_cursor)

    async def tools(self, names: Iterable[str] | Literal["all"] = "all", *, session: Any = None) -> list[ToolSpec]:
        """Return the enabled tools, described with the network and the largest limit of the session."""
        specs = [state.spec for state in await self.tool_states() if state.state == "enabled"]
        wanted = None if names == "all" else set(names)
        chosen = [spec for spec in specs if wanted is None or spec.name in wanted]
        if session is None:
            return chosen
        info: SessionInfo = await session.info()
        return [info.describe_tool(spec) for spec in chosen]

    async def tool_states(self) -> list[ToolState]:
        return [read_tool(view) for view in await self.http.tools()]

    async def tool_state(self, name: str) -> ToolState:
        return read_tool(await self.http.get(ToolView, f"/v1/tools/{segment(name)}"))

    async def switched_tenants(self, name: str) -> dict[str, Switch]:
        """Return nothing: the HTTP API does not list the switches of other tenants."""
        return {}

    async def disable(self, name: str, *, reason: str | None = None, tenant: str | None = None) -> ToolState | None:
        return await self._switch(name, {"enabled": False, "reason": reason, "tenant": tenant})

    async def enable(self, name: str, *, tenant: str | None = None) -> ToolState | None:
        return await self._switch(name, {"enabled": True, "tenant": tenant})

    async def _switch(self, name: str, body: Mapping[str, Any]) -> ToolState | None:
        answer = await self.http.send(Ask("PATCH", f"/v1/tools/{segment(name)}", repeats=True, body=body))
        return read_tool(parse(ToolView, answer)) if answer else None

    async def prepare(self, call: ToolCall, *, is_text: bool) -> Mapping[str, Any]:
        """Return the arguments of a call. Text is converted as the tool's schema says."""
        if not is_text:
            return call.arguments
        arguments, _ = prepare_arguments((await self.tool_state(call.name)).spec, call.arguments, text=True)
        return arguments

    async def review(
        self, call: ToolCall, spec: ToolSpec, session: str | None, approver: Approver | None = None
    ) -> ToolCall | ToolResult:
        """Review a call by the rules of TOOLCREW_APPROVAL_POLICY. The API applies those of the tenant's policy."""
        return await review(
            call,
            spec,
            approver or self._approver,
            policy=self._policy,
            tenant=self.tenant,
            session=session,
            ttl_s=self._settings.approval_wait_s,
        )

    async def usage_report(self, start: float, end: float, *, by: By, tenant: str | None = None) -> UsageReport:
        return await self.http.usage(datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC), by=by)

    async def call_fields(self, call: str, tenant: str | None = None) -> dict[str, Any]:
        return parse_object(await self.http.send(Ask("GET", f"/v1/calls/{segment(call)}", repeats=True)))

    async def list_calls(self, tenant: str | None = None, limit: int = 100, position: str | None = None) -> CallPage:
        params = {"cursor": position, "limit": min(limit, MAX_PAGE)}
        page = await self.http.get(Page[ListedCall], "/v1/calls", params)
        return CallPage(data=tuple(page.data), has_more=page.next_cursor is not None, next_position=page.next_cursor)

    async def kill_call(self, call: str, *, tenant: str | None = None, reason: str = "") -> KilledCall:
        ask = Ask("POST", f"/v1/calls/{segment(call)}/kill", body={"reason": reason}, wait_s=60)
        fields = parse_object(await self.http.send(with_key(ask)))
        record = CallRecord.model_validate({"state": fields["state"], "code": fields["error_code"] or ""})
        return KilledCall(record, fields["already_ended"])


def _choose_approver(settings: OrchestratorSettings) -> Approver:
    if settings.approvals == "queue":
        return RefusingApprover(
            "the call needs approval, and TOOLCREW_APPROVALS=queue needs the pool's Redis: set it to auto, never or ask"
        )
    return choose_approver(settings.approvals, is_interactive=is_interactive())


def read_info(view: SessionView) -> SessionInfo:
    """Return the properties of a session from its view."""
    sandbox = SandboxInfo(id=view.sandbox, generation=view.generation) if view.sandbox else None
    return SessionInfo(
        session=view.id,
        tenant=view.tenant,
        host=view.host,
        queue="",
        image=view.image,
        sandbox=sandbox,
        start_s=0.0,
        network=view.network,
        hosts=tuple(view.hosts),
        options=SandboxOptions(**{name: getattr(view, name) for name in SandboxOptions.model_fields}),
        timeout_s=view.timeout_s,
    )


def read_run(view: RunView) -> DurableRun:
    """Return an ended run from its view."""
    fields = {name: value for name, value in view.model_dump(mode="json").items() if value is not None}
    end = RunEnd.model_validate({name: value for name, value in fields.items() if name in RunEnd.model_fields})
    common = {name: value for name, value in fields.items() if name in DurableRun.model_fields}
    return DurableRun.model_validate({**common, "end": end})


def read_tool(view: ToolView) -> ToolState:
    """Return the state of a tool from its view."""
    fields = {name: getattr(view, name) for name in ToolSpec.model_fields.keys() & ToolView.model_fields.keys()}
    switch = None
    if view.off is not None:
        switch = Switch(by=view.off.by, at=parse_instant(view.off.at), reason=view.off.reason)
    return ToolState(ToolSpec(**fields), everywhere=switch, is_allowed=view.state != "forbidden")
