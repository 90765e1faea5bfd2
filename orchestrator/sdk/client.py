"""Client for programs: connect to a pool or start one, open sessions, call tools, run instructions. The CLI uses this
client.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, ToolCall, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.masking import secrets_of_pool
from toolcrew.contract.registry import Switch, ToolState, find_state, switch_field
from toolcrew.contract.run_events import OnEvent, SandboxClosed
from toolcrew.contract.schema import find_nearest
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, DEFAULT_TTL_S, SandboxOptions, SessionSpec
from toolcrew.contract.session_views import BudgetState, By, Checkpoint
from toolcrew.contract.settings import OrchestratorSettings, load_settings
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.contract.tool_configs import parse_tool_config
from toolcrew.orchestrator.approvals import DEFAULT_POLICY, Approver
from toolcrew.orchestrator.approvals.approvers import is_interactive
from toolcrew.orchestrator.approvals.asking import choose_pool_approver, open_approvals
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, load_policy
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection, open_pool
from toolcrew.orchestrator.dispatch.tenant_catalog import Offer
from toolcrew.orchestrator.sessions.session import Session, delete_checkpoint
from toolcrew.orchestrator.sessions.workspace_files import name_path
from toolcrew.orchestrator.tracing import RunSpans, TracedRun, run_spans
from toolcrew.store.api_keys import ApiKeys, Credential
from toolcrew.store.approvals import ApprovalQueue
from toolcrew.store.audit import Actor, Audit, local_actor
from toolcrew.store.call_reader import CallLife, CallPage
from toolcrew.store.stored_bytes import StoredBytes
from toolcrew.store.tools import build_switch, find_skill
from toolcrew.store.usage import UsageRow, UsageStore, show_amounts, sum_rows

if TYPE_CHECKING:
    from toolcrew.contract.access_views import KeyView, SkillView
    from toolcrew.contract.model_endpoints import EndpointView
    from toolcrew.contract.session_views import UsageReport
    from toolcrew.orchestrator.dialects.model import Model
    from toolcrew.orchestrator.loop.agent import RunResult
    from toolcrew.orchestrator.loop.limits import ReActOptions
    from toolcrew.orchestrator.models.choice import ChosenModel
    from toolcrew.orchestrator.operations.local_stack import StackInfo
    from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
    from toolcrew.orchestrator.runs.client_batches import ClientBatches
    from toolcrew.orchestrator.sdk.batch_views import BatchViews
    from toolcrew.orchestrator.sdk.call_control import KilledCall
    from toolcrew.orchestrator.sdk.client_runs import ClientRuns, ViewedRuns
    from toolcrew.orchestrator.sdk.session_tools import Names, SessionTools
    from toolcrew.orchestrator.sdk.skill_installer import SkillInstaller
    from toolcrew.orchestrator.sdk.tenant_client import TenantSession
    from toolcrew.orchestrator.traces.recorder import Traces
    from toolcrew.store.session_list import SessionPage


class ToolClient:
    """Connection to one pool for one tenant. `connect` and `embedded` create it."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: PoolConnection,
        tenant: str,
        approver: Approver | None,
        policy: ApprovalPolicy | None = None,
        credential: Credential | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Create the client. `secrets` (kind -> value): values that traces mask, in addition to the secrets in the
        settings.
        """
        self._settings = settings
        self._dispatcher = pool.dispatcher
        self._catalog = pool.catalog
        self._blobs = pool.blobs
        self._switches = pool.switches
        self._tenants = pool.tenants
        self._credential = credential
        if approver is None:
            questions = open_approvals(settings, pool.redis, pool.keys)
            approver = choose_pool_approver(settings, questions, is_interactive=is_interactive())
        self._approver = approver
        self._policy = policy or (load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY)
        self._secrets = secrets or {}
        self._pool = pool
        self.tenant = tenant
        self.stack: StackInfo | None = None
        """The stack that `embedded` started for this client."""

    # What only runs, batches or single methods need is imported at its first use, so that a program that only calls
    # tools starts in half the time.

    @cached_property
    def _builder(self) -> AgentBuilder:
        from toolcrew.orchestrator.runs.agent_builder import AgentBuilder

        return AgentBuilder(self._settings, self._pool, self._approver, self._policy)

    @cached_property
    def traces(self) -> Traces:
        """The folder of the traces of runs."""
        from toolcrew.orchestrator.traces.recorder import Traces

        return Traces(self._settings, self._secrets)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        approver: Approver | None = None,
        policy: ApprovalPolicy | None = None,
        settings: OrchestratorSettings | None = None,
        needs_workers: bool = True,
    ) -> AsyncIterator[ToolClient]:
        """Connect to a running pool.

        `url` None: TOOLCREW_REDIS_URL. `tenant` None: the tenant of `api_key`, or without a key the default tenant. A
        key must be valid for the tenant. `approver` None: the approver that TOOLCREW_APPROVALS names. `policy` None:
        the rules of the file in TOOLCREW_APPROVAL_POLICY, if set. `needs_workers` False: also connect to a pool
        without live workers, where only batches work.

        Raises ConfigError (an invalid policy file, no Redis URL, no signing key, no worker), BrokerUnavailable (no
        answer, wrong password), ToolFailure (UNAUTHENTICATED for an unknown key, PERMISSION_DENIED for a key of
        another tenant).
        """
        settings = settings or load_settings()
        broker = settings.broker(url)
        secrets = {"API key of the tenant": api_key} if api_key else None
        async with open_pool(
            broker, queue_wait_s=settings.queue_wait_s, needs_workers=needs_workers, settings=settings, secrets=secrets
        ) as pool:
            credential = None
            if api_key is not None:
                keys = ApiKeys(pool.redis, settings.deployment, pool.keys)
                credential = Credential(keys, api_key)
                tenant = tenant or (await keys.authenticate(api_key)).tenant
                await credential.check(tenant)
            secrets = secrets_of_pool(broker.redis_url.get_secret_value(), api_key=api_key)
            yield cls(settings, pool, tenant or DEFAULT_TENANT, approver, policy, credential, secrets)

    @classmethod
    @asynccontextmanager
    async def embedded(
        cls,
        *,
        tenant: str = "default",
        approver: Approver | None = None,
        policy: ApprovalPolicy | None = None,
        settings: OrchestratorSettings | None = None,
        workers_only: bool = False,
    ) -> AsyncIterator[ToolClient]:
        """Start a stack, connect to it, and stop it at the end. Needs a Docker engine and the sandbox image.
        `workers_only`: start neither Flower nor the API, which is faster.

        Raises OperatorError with the part that did not start and the remedy.
        """
        from toolcrew.orchestrator.operations.local_stack import embedded_stack

        settings = (settings or load_settings()).with_secret()
        async with (
            embedded_stack(settings.for_children(), workers_only=workers_only) as stack,
            open_pool(settings.broker(stack.redis_url), queue_wait_s=settings.queue_wait_s, settings=settings) as pool,
        ):
            secrets = secrets_of_pool(stack.redis_url, flower_url=stack.flower_url)
            client = cls(settings, pool, tenant, approver, policy, secrets=secrets)
            client.stack = stack
            yield client

    async def open_session(
        self,
        workspace: Path | str | None = None,
        *,
        tenant: str | None = None,
        image: str | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        restore: Checkpoint | str | None = None,
        network: Literal["none", "egress"] | None = None,
        options: SandboxOptions | None = None,
        tool_config: Mapping[str, Mapping[str, Any]] | None = None,
        key: str | None = None,
    ) -> Session:
        """Open a session with its own sandbox. `close` removes the sandbox, and so do `ttl_s` seconds without a call.

        `workspace`: a folder, an archive (tar, also compressed, or zip) or a git bundle with the first files.
        `restore`: a checkpoint of the same tenant instead, or its id. `network`: "none", or "egress" where the
        tenant's class allows it; None: the default of the class (docs/sessions.md). `options`: sizes and user of the
        sandbox, within what the class allows; None: those of the class. `tool_config`: name of a tool -> the JSON
        object that the tool reads as `CallContext.config`; at most 64 KiB.

        The same `key` and options return the same session for a day after the last use of the key, no matter which
        process asks. SESSION_NOT_FOUND after the session has ended: a key never opens a second session.
        """
        if network not in (None, "none", "egress"):
            raise ConfigError(f"network '{network}' does not exist: use none or egress, or omit it")
        try:
            spec = SessionSpec(
                image=image,
                ttl_s=ttl_s,
                workspace=name_path(workspace) if workspace is not None else None,
                restore=restore.id if isinstance(restore, Checkpoint) else restore,
                network=network,
                tool_config=parse_tool_config(tool_config or {}),
            )
        except ValidationError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{find_invalid(error)}; correct the options") from None
        return await self.open_session_from(spec.with_defaults(options or DEFAULT_OPTIONS), tenant=tenant, key=key)

    async def open_session_from(
        self, spec: SessionSpec, *, tenant: str | None = None, key: str | None = None
    ) -> Session:
        """Open a session with these options. Like `open_session`, but `spec.workspace` may also be a file of the
        store.
        """
        if spec.workspace is not None and spec.restore is not None:
            raise ConfigError("a session starts from a workspace or from a checkpoint: pass only one of them")
        owner = await self._as_tenant(tenant)
        if key is None:
            return await Session.open(
                self._dispatcher, self._blobs, tenant=owner, spec=spec, credential=self._credential
            )
        from toolcrew.orchestrator.sessions.keyed_sessions import KeyedSessions
        from toolcrew.store.session_keys import SessionKeys

        keys = SessionKeys(self._pool.redis, self._settings.deployment)
        return await KeyedSessions(keys, self._dispatcher, self._blobs, self._credential).open(owner, key, spec)

    async def session(self, session: str, *, tenant: str | None = None) -> Session:
        """Return a handle of an open session, no matter which process opened the session. The end of a `with` block
        leaves the session open; `close` closes it.

        Raises ToolFailure(SESSION_NOT_FOUND). The failure is the same for a session that never existed, is closed, or
        belongs to another tenant.
        """
        owner = await self._as_tenant(tenant)
        return await Session.attach(
            self._dispatcher, self._blobs, tenant=owner, session=session, credential=self._credential
        )

    async def session_tools(
        self,
        session: Session,
        names: Names = "all",
        *,
        approver: Approver | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SessionTools:
        """Return a session's tools for the loop of another framework. `approver` None: the client's approver.
        `timeout_s`: the limit of calls without their own limit. Raises the same errors as SessionTools.open.
        """
        from toolcrew.orchestrator.sdk.session_tools import SessionTools

        return await SessionTools.open(self._builder, session, names, approver, timeout_s)

    async def sessions(self, tenant: str | None = None, *, cursor: str | None = None, limit: int = 50) -> SessionPage:
        """Return open sessions, the newest first. `tenant` None: all tenants, or with a tenant's key only that
        tenant.
        """
        from toolcrew.store.session_list import SessionList

        scope = await self._scope(tenant)
        return await SessionList(self._pool.redis, self._settings.deployment, self._pool.keys).read(
            scope, cursor, limit
        )

    async def usage(self, start: float, end: float, *, by: By = "day", tenant: str | None = None) -> list[UsageRow]:
        """Return what the tenant used from `start` until before `end`, in Unix seconds, by hour or day in UTC.

        Raises ToolFailure(INVALID_ARGUMENTS): the time is too long or negative. Raises BrokerUnavailable when Redis
        does not answer.
        """
        owner = await self._as_tenant(tenant)
        return await self.usage_store.read(owner, start, end, by)

    async def budgets(self, tenant: str | None = None) -> list[BudgetState]:
        """Return the budgets of the tenant's policy with the used amounts. Raises ToolFailure(UNKNOWN_TENANT)."""
        return await self._tenants.budgets(await self._as_tenant(tenant))

    async def usage_report(self, start: float, end: float, *, by: By = "day", tenant: str | None = None) -> UsageReport:
        """Return what `usage` and `budgets` return, with the sum. Raises the same errors."""
        from toolcrew.contract.session_views import UsageAmounts, UsagePeriod, UsageReport

        owner = tenant or self.tenant
        rows = await self.usage(start, end, by=by, tenant=owner)
        return UsageReport(
            tenant=owner,
            by=by,
            data=[UsagePeriod.model_validate(row.to_json()) for row in rows],
            total=UsageAmounts(**show_amounts(sum_rows(rows))),
            budgets=await self.budgets(owner),
        )

    async def session_usage(self, session: str, *, tenant: str | None = None) -> dict[str, float | int]:
        """Return what a session used until its last call, or a few seconds ago (store/usage.py: show_amounts). The
        amounts are kept for a day after its last use.
        """
        return show_amounts(await self.usage_store.read_session(await self._as_tenant(tenant), session))

    async def call_history(self, call: str, tenant: str | None = None) -> CallLife:
        """Return the history of a call, by its id or the id of its Celery task. `tenant` None: the tenant that has
        the call, or with a tenant's key only that tenant.

        Raises ToolFailure(INVALID_ARGUMENTS) for an unknown call, or when several tenants have a call of that id.
        """
        return await self._pool.calls.find(call, await self._scope(tenant))

    async def call_fields(self, call: str, tenant: str | None = None) -> dict[str, Any]:
        """Return what `call_history` returns, as the HTTP API shows it."""
        return (await self.call_history(call, tenant)).model_dump(mode="json")

    async def list_calls(self, tenant: str | None = None, limit: int = 100, position: str | None = None) -> CallPage:
        """Return the calls that wait, run, or ended recently. `tenant` None: all tenants, or with a tenant's key only
        that tenant. `position`: `next_position` of the previous page. Raises BrokerUnavailable,
        ToolFailure(INVALID_ARGUMENTS): the position is invalid.
        """
        owner = await self._scope(tenant)
        tenants = [owner] if owner is not None else await self._pool.calls.tenants()
        return await self._pool.calls.read_page(tenants, limit, position)

    async def kill_call(self, call: str, *, tenant: str | None = None, reason: str = "") -> KilledCall:
        """Kill a call that waits or runs, and return when it has ended. Its caller gets CANCELLED with the actor and
        the reason. Raises the same errors as `call_history`, and OperatorError when the call does not end.
        """
        from toolcrew.orchestrator.sdk.call_control import CallControl

        owner, call_id = await self._pool.calls.resolve(call, await self._scope(tenant))
        return await CallControl(self._pool, self._settings.deployment).kill(owner, call_id, await self.actor(), reason)

    async def delete_checkpoint(self, checkpoint: Checkpoint | str, *, tenant: str | None = None) -> bool:
        """Delete a checkpoint, given as object or id. Return False when the tenant has no such checkpoint. Raises
        SandboxUnavailable.
        """
        return await delete_checkpoint(
            self._dispatcher,
            await self._as_tenant(tenant),
            checkpoint.id if isinstance(checkpoint, Checkpoint) else checkpoint,
        )

    async def tools(
        self, names: Iterable[str] | Literal["all"] = "all", *, session: TenantSession | None = None
    ) -> list[ToolSpec]:
        """Return the tools that a model of the client's tenant may call. Disabled tools are not included.
        `session`: describe the tools with the network and the largest limit of that session.
        """
        info = await session.info() if session is not None else None
        return await self._builder.specs_for(await self._as_tenant(None), names, info)

    async def review(
        self, call: ToolCall, spec: ToolSpec, session: str | None, approver: Approver | None = None
    ) -> ToolCall | ToolResult:
        """Review a call that a model requests. Return the call to run, or the result that refuses the call. `approver`
        None: the client's approver.
        """
        return await self._builder.reviewer.review(call, spec, await self._as_tenant(None), session, approver=approver)

    async def tool_states(self, tenant: str | None = None) -> list[ToolState]:
        """Return all tools, sorted by name, with their states for the tenant. `tenant` None: the client's tenant."""
        owner, switches = await self._as_tenant(tenant), await self._switches.switches()
        policy = await self._tenants.policy(owner)
        specs = [spec for spec in (await self._pool.offers.of(owner)).tools if spec.audience == "model"]
        return [find_state(spec, switches, owner, policy) for spec in sorted(specs, key=lambda spec: spec.name)]

    async def tool_state(self, name: str, tenant: str | None = None) -> ToolState:
        """Return one tool with its state for the tenant. Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names,
        ConfigError when no worker serves the tool now.
        """
        if (spec := await self._find_tool(name, owner := await self._as_tenant(tenant))) is None:
            raise ConfigError(self._catalog.explain_missing(name) or f"no worker serves {name} now")
        return find_state(spec, await self._switches.switches(), owner, await self._tenants.policy(owner))

    async def skills(self) -> tuple[SkillSummary, ...]:
        """Return every skill of the client's tenant, by name: its own skills and those of the workers. Raises
        ConfigError when no worker lives.
        """
        return (await self.offer()).skills

    async def offer(self) -> Offer:
        """Return the tools and skills of the client's tenant, and which of the tenant's own skills replace skills of
        the workers. Raises the same errors as `skills`.
        """
        return await self._pool.offers.of(await self._as_tenant(None))

    async def skill(self, name: str) -> SkillSummary:
        """Return one skill. Raises ToolFailure(FILE_NOT_FOUND) with the nearest names."""
        return find_skill(name, await self.skills())

    async def own_skills(self) -> SkillInstaller:
        """Return the installer of skills for the client's tenant. Raises ToolFailure(UNKNOWN_TENANT)."""
        from toolcrew.orchestrator.sdk.skill_installer import SkillInstaller

        await self._tenants.policy(self.tenant)
        return SkillInstaller(self._pool.installed.acting_as(await self.actor()), self.tenant)

    async def switched_tenants(self, name: str) -> dict[str, Switch]:
        """Return the switches that turn the tool off for single tenants, by tenant. Raises
        ToolFailure(PERMISSION_DENIED) for a tenant's key.
        """
        await self._check_operator()
        switches = await self._switches.switches()
        return {
            field.removesuffix(f"/{name}"): switch
            for field, switch in sorted(switches.items())
            if field.endswith(f"/{name}")
        }

    async def disable(
        self, name: str, *, reason: str | None = None, by: str | None = None, tenant: str | None = None
    ) -> ToolState | None:
        """Disable a tool for the whole deployment or for one tenant. The switch takes effect everywhere within 2 s
        and stays until `enable`. Calls of the tool fail with TOOL_DISABLED and `reason`, and new runs do not get the
        tool. `by`: the name of the person; None: the client's tenant. Returns None when no worker serves the tool
        now.

        Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names, ToolFailure(INVALID_ARGUMENTS), BrokerUnavailable.
        """
        switches = self._switches.acting_as(await self._check_operator())
        await self._check_tenant(tenant)
        spec = await self._find_tool(name, tenant)
        # Read the switches first: if the read fails, nothing has been switched yet.
        switches_before, switch = await switches.switches(), build_switch(by or self.tenant, reason)
        await switches.turn_off(name, switch, tenant)
        switches_after, owner = {**switches_before, switch_field(name, tenant): switch}, tenant or self.tenant
        return find_state(spec, switches_after, owner, await self._tenants.policy(owner)) if spec is not None else None

    async def enable(self, name: str, *, tenant: str | None = None) -> ToolState | None:
        """Enable a tool for all tenants, or for one tenant. A tool that was also disabled for all tenants, or for the
        tenant alone, stays disabled there. Return None when no worker serves the tool now. Raises the same errors as
        `disable`.
        """
        switches = self._switches.acting_as(await self._check_operator())
        await self._check_tenant(tenant)
        switches_after = {
            field: switch
            for field, switch in (await switches.switches()).items()
            if field != switch_field(name, tenant)
        }
        was_off = await switches.turn_on(name, tenant)
        try:
            spec = await self._find_tool(name, tenant)
        except ToolFailure:
            if not was_off:
                raise
            return None
        owner = tenant or self.tenant
        return find_state(spec, switches_after, owner, await self._tenants.policy(owner)) if spec is not None else None

    @asynccontextmanager
    async def _own_session(self, workspace: Path | str | None, run: str, emit: OnEvent) -> AsyncIterator[Session]:
        """Open a session for one run."""
        async with await self.open_session(workspace) as session:
            yield session
        emit(SandboxClosed(run=run, session=session.id))

    def batch_runs(self, *, has_traces: bool = True) -> ClientBatches:
        """Return the batches of the client's tenant. `has_traces`: the events of every run are written to `traces`.
        The calls of a batch do not use the client's key, because another client with another key may continue the
        batch.
        """
        from toolcrew.orchestrator.runs.client_batches import ClientBatches

        traces = self.traces if has_traces else None
        return ClientBatches(self._settings, self._pool, self._builder, self.tenant, traces)

    @cached_property
    def runs(self) -> ClientRuns:
        """Return the durable runs of the client's tenant. The runs continue when this program ends (docs/agents.md)."""
        from toolcrew.orchestrator.runs.durable_runs import DurableRuns
        from toolcrew.orchestrator.runs.own_run import OwnRuns
        from toolcrew.orchestrator.sdk.client_runs import ClientRuns

        runs = DurableRuns.on(self._pool, self._settings)
        own = OwnRuns(self._settings, self._pool, self._builder, self.traces, runs)
        return ClientRuns(runs, own, self._as_tenant, self.actor)

    @property
    def run_views(self) -> ViewedRuns:
        """Return the durable runs of the client's tenant as the HTTP API shows them."""
        from toolcrew.orchestrator.sdk.client_runs import ViewedRuns

        return ViewedRuns(self.runs)

    @property
    def batch_views(self) -> BatchViews:
        """Return the stored batches of the client's tenant, as commands show them."""
        from toolcrew.orchestrator.sdk.batch_views import BatchViews

        return BatchViews(self.batch_runs())

    async def key(self) -> KeyView:
        """Return the API key of this client, without its text. Raises ConfigError without a key."""
        from toolcrew.orchestrator.operations.views import view_key

        if self._credential is None:
            raise ConfigError("this client uses no API key: set TOOLCREW_API_KEY")
        key_id = (await self._credential.check(self.tenant)).key_id
        found = await ApiKeys(self._pool.redis, self._settings.deployment, self._pool.keys).find(key_id)
        if found is None:
            raise ToolFailure(ErrorCode.UNAUTHENTICATED, "the API key was revoked: use another key")
        return view_key(key_id, found)

    async def models(self, tenant: str | None = None) -> Sequence[EndpointView]:
        """Return the model endpoints that the tenant's runs may use, without addresses. For an operator: those of all
        tenants, or of `tenant`, with addresses.
        """
        from toolcrew.store.model_endpoints import ModelEndpoints

        endpoints = ModelEndpoints(self._pool.redis, self._settings.deployment, self._pool.keys)
        owner, is_tenant = await self._scope(tenant), (await self.actor()).role == "tenant"
        policy = await self._tenants.policy(owner) if owner is not None else None
        return await endpoints.views(owner, policy, shows_addresses=not is_tenant)

    async def skill_views(self) -> Sequence[SkillView]:
        """Return what `offer` returns, as the HTTP API shows it."""
        from toolcrew.contract.access_views import SkillView

        offer = await self.offer()
        return [
            SkillView.model_validate({**skill.model_dump(), **offer.describe(skill.name)}) for skill in offer.skills
        ]

    async def _as_tenant(self, tenant: str | None) -> str:
        """Return the tenant of an operation. Raises ToolFailure when the client's key is not valid for that tenant."""
        checked = tenant or self.tenant
        if self._credential is not None:
            await self._credential.check(checked)
        return checked

    @property
    def approvals(self) -> ApprovalQueue:
        """Return the queue of calls that wait for a decision. `ToolClient.actor` returns the identity to decide
        with.
        """
        return open_approvals(self._settings, self._pool.redis, self._pool.keys)

    @property
    def usage_store(self) -> UsageStore:
        """Return the store of used resources. The store does not check the key of this client."""
        return UsageStore(self._pool.redis, self._settings.deployment)

    @property
    def stored_bytes(self) -> StoredBytes:
        """Return the counts of stored files, for uploads. They do not check the key of this client."""
        return self._pool.tenants.stored_bytes

    async def audit(self) -> Audit:
        """Return the log of changes by operators. Raises ToolFailure(PERMISSION_DENIED) for a tenant's key."""
        if (await self.actor()).role == "tenant":
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "a tenant's API key cannot read the audit: use a key with the role operator or admin",
            )
        return Audit(self._pool.redis, self._settings.deployment)

    async def _scope(self, tenant: str | None) -> str | None:
        """Return the tenant of a search; None: all tenants. Raises like `_as_tenant`."""
        is_tenant = (await self.actor()).role == "tenant"
        return await self._as_tenant(tenant) if tenant is not None or is_tenant else None

    async def _check_tenant(self, tenant: str | None) -> None:
        """Raise ToolFailure for a tenant that does not exist."""
        if tenant is not None:
            await self._tenants.policy(tenant)

    async def actor(self) -> Actor:
        """Return the user of this client: the holder of its key, or the user who runs the program."""
        return (await self._credential.check(self.tenant)).actor() if self._credential is not None else local_actor()

    async def _check_operator(self) -> Actor:
        """Return the operator who uses this client. Raises ToolFailure when the client's key belongs to a tenant,
        because a tenant must not undo an operator's switch.
        """
        actor = await self.actor()
        if actor.role == "tenant":
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "a tenant's API key cannot enable or disable tools: use a key with the role operator or admin",
            )
        return actor

    async def _find_tool(self, name: str, tenant: str | None = None) -> ToolSpec | None:
        """Return the tool for that tenant, or for an operator, who sees all tools. Return None when a tool of that
        name exists but no worker serves it now.
        """
        specs = {
            spec.name: spec
            for spec in (await self._catalog.specs() if tenant is None else (await self._pool.offers.of(tenant)).tools)
        }
        spec = specs.get(name)
        if name.startswith("session."):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{name} is a session verb and cannot be disabled: use the name of a tool",
            )
        if spec is None and self._catalog.explain_missing(name) is None:
            nearest = find_nearest(name, [spec.name for spec in specs.values() if spec.audience == "model"])
            raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name}", nearest=nearest)
        return spec

    async def run(
        self,
        instruction: str,
        *,
        workspace: Path | str | None = None,
        session: Session | None = None,
        model: Model | ChosenModel | str | None = None,
        dialect: str | None = None,
        profile: str | None = None,
        options: ReActOptions | None = None,
        on_event: OnEvent | None = None,
        shows_output: bool = True,
        tools: Iterable[str] | Literal["all"] | None = None,
        has_trace: bool = False,
    ) -> RunResult:
        """Run one instruction until the model answers or a limit is reached, in `session` or in a new session.

        `model` None: the model of the environment's settings, otherwise the embedded small model. `profile`: `small` or
        `standard`; None or `auto`: the one that suits the model. `tools` None: the tools of the profile. `on_event`
        gets OutputArrived while calls run, unless `shows_output` is False; then workers send no output. `has_trace`:
        the run's events are written to `traces` (docs/observe.md), under the result's `run`. Raises ModelUnavailable,
        SandboxUnavailable, ConfigError, and ToolFailure(PERMISSION_DENIED) for a model that the tenant may not use.
        """
        from toolcrew.orchestrator.loop.limits import ReActOptions
        from toolcrew.orchestrator.runs.executor import RunExecutor
        from toolcrew.orchestrator.runs.journal import MemoryJournal
        from toolcrew.orchestrator.runs.models import Models
        from toolcrew.orchestrator.runs.run_config import RunConfig

        if session is not None and workspace is not None:
            raise ConfigError("a run uses a session or a workspace: pass only one of them")
        run, shows_output = secrets.token_hex(8), on_event is not None and shows_output
        async with AsyncExitStack() as stack:
            tenant = session.tenant if session is not None else self.tenant
            name, own_model = (model, None) if isinstance(model, str) else (None, model)
            models = await stack.enter_async_context(Models(self._settings, self._pool, own_model))
            executor = RunExecutor(self._pool, self._builder, models, self.traces if has_trace else None)
            spans = None
            if self._pool.tracer is not None:
                traced = TracedRun(tenant, run, session=session.id if session is not None else None)
                spans = stack.enter_context(run_spans(RunSpans(self._pool.tracer, traced)))
            emit = stack.enter_context(executor.observe(tenant, run, on_event or (lambda _: None), spans))
            chosen_model = await models.get(tenant, name)
            if session is None:
                session = await stack.enter_async_context(self._own_session(workspace, run, emit))
            config = RunConfig(
                run=run,
                tenant=tenant,
                journal=MemoryJournal(partial(self._builder.usage.count_reply, tenant, session.id)),
                dialect=dialect,
                profile=profile,
                options=options or ReActOptions(),
                tools=tools,
                on_event=emit,
                shows_output=shows_output,
            )
            return await executor.run_agent(session, chosen_model, config, instruction)
