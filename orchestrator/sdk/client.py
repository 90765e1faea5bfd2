"""The SDK: connect to a pool or start one, open sessions, call tools, run instructions. The CLI uses nothing else."""

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

from contract.calls import DEFAULT_TIMEOUT_S, ToolCall, ToolResult
from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.registry import Switch, ToolState, find_state, switch_field
from contract.run_events import OnEvent, SandboxClosed
from contract.schema import find_nearest
from contract.specs import SkillSummary, ToolSpec
from contract.tenancy import DEFAULT_TENANT
from orchestrator.approvals import DEFAULT_POLICY, Approver
from orchestrator.approvals.asking import choose_pool_approver, open_approvals
from orchestrator.approvals.policies import ApprovalPolicy, load_policy
from orchestrator.dialects.model import Model
from orchestrator.dispatch.pool_connection import PoolConnection, open_pool
from orchestrator.dispatch.sessions import Checkpoint, Session, Start, delete_checkpoint
from orchestrator.dispatch.tenant_catalog import Offer
from orchestrator.loop.agent import RunResult
from orchestrator.loop.limits import ReActOptions
from orchestrator.models.choice import ChosenModel, choose_model
from orchestrator.operations.local_stack import StackInfo, embedded_stack
from orchestrator.runs.batch_runs import BatchRuns
from orchestrator.runs.hosted import HostedRuns
from orchestrator.runs.run_parts import RunConfig, RunParts
from orchestrator.sdk.call_control import CallControl, KilledCall
from orchestrator.sdk.client_runs import ClientRuns
from orchestrator.sdk.session_tools import Names, SessionTools
from orchestrator.sdk.skill_desk import SkillDesk
from orchestrator.settings import OrchestratorSettings, is_interactive, load_settings, with_secret
from orchestrator.traces.opening import Traces, secrets_of_pool
from orchestrator.tracing import RunSpans, TracedRun, run_spans
from store.api_keys import ApiKeys, Credential
from store.approvals import ApprovalQueue
from store.audit import Actor, Audit, local_actor
from store.call_life import CallLife, CallLives
from store.call_list import CallList, CallPage
from store.catalog import find_skill
from store.sessions import SessionList, SessionPage
from store.switches import build_switch


class ToolClient:
    """A connection to one pool for one tenant. Made by `connect` or `embedded`."""

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
        """`secrets`: what traces mask beside what the settings hold (kind -> value)."""
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
        policy = policy or (load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY)
        self._parts = RunParts(settings, pool, approver, policy)
        self.traces = Traces(settings, secrets or {})
        self._pool = pool
        self.tenant = tenant
        self.stack: StackInfo | None = None
        """The stack that `embedded` has started for this client."""

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
    ) -> "AsyncIterator[ToolClient]":
        """A client of a running pool. `url` None: TOOLCREW_REDIS_URL. `tenant` None: the one of `api_key`, or without a
        key the default one; the key must be good for the tenant. `approver` None: as TOOLCREW_APPROVALS says. `policy`
        None: the rules of the file that TOOLCREW_APPROVAL_POLICY names, else none. `needs_workers` False: also of a
        pool whose workers are gone, of which only batches can be asked then.

        Raises ConfigError (a bad policy file, no Redis named, nothing to sign with, no worker), BrokerUnavailable (no
        answer, wrong password), ToolFailure (UNAUTHENTICATED for a key that is none, PERMISSION_DENIED for another
        tenant's).
        """
        settings = settings or load_settings()
        broker = settings.broker(url)
        told = {"API key of the tenant": api_key} if api_key else None
        async with open_pool(
            broker, queue_wait_s=settings.queue_wait_s, needs_workers=needs_workers, settings=settings, secrets=told
        ) as pool:
            credential = None
            if api_key is not None:
                keys = ApiKeys(pool.redis, settings.deployment, pool.keys)
                credential = Credential(keys, api_key)
                tenant = tenant or (await keys.authenticate(api_key)).tenant
                await credential.check(tenant)
            known = secrets_of_pool(broker.redis_url.get_secret_value(), api_key=api_key)
            yield cls(settings, pool, tenant or DEFAULT_TENANT, approver, policy, credential, known)

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
    ) -> "AsyncIterator[ToolClient]":
        """A client of a stack of its own, started now and taken down at the end. Needs a Docker engine and the sandbox
        image. `workers_only`: the stack has neither Flower nor the API, and starts sooner.

        Raises OperatorError with what did not start and what to do about it.
        """
        settings = with_secret(settings or load_settings())
        async with (
            embedded_stack(settings.for_children(), workers_only=workers_only) as stack,
            open_pool(settings.broker(stack.redis_url), queue_wait_s=settings.queue_wait_s, settings=settings) as pool,
        ):
            known = secrets_of_pool(stack.redis_url, flower_url=stack.flower_url)
            client = cls(settings, pool, tenant, approver, policy, secrets=known)
            client.stack = stack
            yield client

    async def open_session(
        self,
        workspace: Path | str | None = None,
        *,
        tenant: str | None = None,
        image: str | None = None,
        ttl_s: float = Start.ttl_s,
        restore: Checkpoint | str | None = None,
        network: Literal["none", "egress"] | None = None,
    ) -> Session:
        """A sandbox of one's own. It is removed by `close`, or after `ttl_s` seconds without a call.

        `workspace`: a folder, an archive (tar, also compressed, or zip) or a git bundle to begin with. `restore`: a
        checkpoint of the same tenant instead, or its id. `network`: "egress" where the tenant's class allows it,
        "none"; None: what the class says (docs/sessions.md).
        """
        if network not in (None, "none", "egress"):
            raise ConfigError(f"network '{network}' cannot be had: give none or egress, or leave it out")
        if workspace is not None and restore is not None:
            raise ConfigError("give either a workspace or a checkpoint to begin with, not both")
        start = Start(
            image=image,
            ttl_s=ttl_s,
            workspace=Path(workspace) if workspace is not None else None,
            restore=restore.id if isinstance(restore, Checkpoint) else restore,
            network=network,
        )
        return await Session.open(
            self._dispatcher,
            self._blobs,
            tenant=await self._as_tenant(tenant),
            start=start,
            credential=self._credential,
        )

    async def session(self, session: str, *, tenant: str | None = None) -> Session:
        """A session that is open, whichever process has opened it. The end of a `with` block leaves it open; its
        `close` closes it.

        Raises ToolFailure(SESSION_NOT_FOUND), the same for one that never was, is closed, or is another tenant's.
        """
        chosen = await self._as_tenant(tenant)
        return await Session.attach(
            self._dispatcher, self._blobs, tenant=chosen, session=session, credential=self._credential
        )

    async def session_tools(
        self,
        session: Session,
        names: Names = "all",
        *,
        approver: Approver | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SessionTools:
        """A session's tools for a loop of somebody else's. `approver` None: the client's. `timeout_s`: of calls without
        a limit. Raises as SessionTools.open.
        """
        return await SessionTools.open(self._parts, session, names, approver, timeout_s)

    async def sessions(self, tenant: str | None = None, *, cursor: str | None = None, limit: int = 50) -> SessionPage:
        """Open sessions, the newest first: the tenant's, else those of all, or of a tenant's key its own."""
        scope = await self._scope(tenant)
        return await SessionList(self._pool.redis, self._settings.deployment, self._pool.keys).read(
            scope, cursor, limit
        )

    async def call_life(self, call: str, tenant: str | None = None) -> CallLife:
        """What is known of a call, by its id or that of its task in Flower: of the tenant, else of whichever has it, or
        of a tenant's key its own.

        Raises ToolFailure(INVALID_ARGUMENTS) when nothing is, or when several tenants have one of that id.
        """
        return await self._lives().find(call, await self._scope(tenant))

    async def list_calls(self, tenant: str | None = None, most: int = 100) -> CallPage:
        """Return the calls that wait, run, or ended lately: of the tenant, else of all tenants, or with a tenant's key
        of its own. Raises BrokerUnavailable.
        """
        owner = await self._scope(tenant)
        tenants = [owner] if owner is not None else await self._lives().tenants()
        return await CallList(self._pool.redis, self._settings.deployment).read(tenants, most)

    async def kill_call(self, call: str, *, tenant: str | None = None, reason: str = "") -> KilledCall:
        """End a call that waits or runs, wherever; returns when it has ended. Its caller gets CANCELLED with who did it
        and why. Raises as `call_life`, and OperatorError when it does not end."""
        owner, call_id = await self._lives().resolve(call, await self._scope(tenant))
        return await CallControl(self._pool, self._settings.deployment).kill(owner, call_id, await self.actor(), reason)

    async def delete_checkpoint(self, checkpoint: Checkpoint | str, *, tenant: str | None = None) -> bool:
        """Delete a checkpoint, or the one of that id. False when the tenant has none of it. Raises
        SandboxUnavailable.
        """
        return await delete_checkpoint(
            self._dispatcher,
            await self._as_tenant(tenant),
            checkpoint.id if isinstance(checkpoint, Checkpoint) else checkpoint,
        )

    async def tools(
        self, names: Iterable[str] | Literal["all"] = "all", *, session: Session | None = None
    ) -> list[ToolSpec]:
        """The tools a model of the client's tenant may call: as the workers publish them, without those that are turned
        off. `session`: with what that has of the network."""
        reach = (await session.info()).describe_network() if session is not None else None
        return await self._parts.specs_for(await self._as_tenant(None), names, reach)

    async def review(
        self, call: ToolCall, spec: ToolSpec, session: str | None, approver: Approver | None = None
    ) -> ToolCall | ToolResult:
        """A call that somebody's model asks for, as it may run, or the result that refuses it. `approver` None: the
        client's.
        """
        return await self._parts.review(call, spec, await self._as_tenant(None), session, approver=approver)

    async def tool_states(self, tenant: str | None = None) -> list[ToolState]:
        """Return every tool by name, with its state for the tenant: the client's own, if none is named."""
        chosen, switches = await self._as_tenant(tenant), await self._switches.switches()
        policy = await self._tenants.policy(chosen)
        there = [spec for spec in (await self._pool.offers.of(chosen)).tools if spec.audience == "model"]
        return [find_state(spec, switches, chosen, policy) for spec in sorted(there, key=lambda spec: spec.name)]

    async def tool_state(self, name: str, tenant: str | None = None) -> ToolState:
        """One tool with its state for the tenant. Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names,
        ConfigError when no worker serves it now.
        """
        if (spec := await self._find_tool(name, chosen := await self._as_tenant(tenant))) is None:
            raise ConfigError(self._catalog.explain_missing(name) or f"no worker serves {name} now")
        return find_state(spec, await self._switches.switches(), chosen, await self._tenants.policy(chosen))

    async def skills(self) -> tuple[SkillSummary, ...]:
        """Every skill that there is for the client's tenant, by name: its own, then those of the workers. Raises
        ConfigError when no worker lives.
        """
        return (await self.offer()).skills

    async def offer(self) -> Offer:
        """The client's tenant's tools and skills, and where its own skills stand before the workers'. Raises as
        `skills`.
        """
        return await self._pool.offers.of(await self._as_tenant(None))

    async def skill(self, name: str) -> SkillSummary:
        """One skill. Raises ToolFailure(FILE_NOT_FOUND) with the nearest names."""
        return find_skill(name, await self.skills())

    async def own_skills(self) -> SkillDesk:
        """Where skills are installed for the client's tenant. Raises ToolFailure(UNKNOWN_TENANT)."""
        await self._tenants.policy(self.tenant)
        return SkillDesk(self._pool.installed.acting_as(await self.actor()), self.tenant)

    async def switched_tenants(self, name: str) -> dict[str, Switch]:
        """The tenants for whom alone the tool is off. Raises ToolFailure(PERMISSION_DENIED) for a tenant's key."""
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
        """Turn a tool off for the whole deployment, or for one tenant, everywhere within 2 s: its calls fail with
        TOOL_DISABLED and `reason`, and models that start then do not get it. It stays off until `enable`. `by`: who did
        it, else the client's tenant. None: no worker serves it now.

        Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names, ToolFailure(INVALID_ARGUMENTS), BrokerUnavailable.
        """
        switches = self._switches.acting_as(await self._check_operator())
        await self._check_tenant(tenant)
        spec = await self._find_tool(name, tenant)
        # Read before: what was switched is not reported as failed because nothing can be read.
        known, switch = await switches.switches(), build_switch(by or self.tenant, reason)
        await switches.turn_off(name, switch, tenant)
        known, owner = {**known, switch_field(name, tenant): switch}, tenant or self.tenant
        return find_state(spec, known, owner, await self._tenants.policy(owner)) if spec is not None else None

    async def enable(self, name: str, *, tenant: str | None = None) -> ToolState | None:
        """Turn a tool on again for all tenants, or for one: it stays off while the other switch is off. None: no worker
        serves it now. Raises as `disable`.
        """
        switches = self._switches.acting_as(await self._check_operator())
        await self._check_tenant(tenant)
        known = {
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
        return find_state(spec, known, owner, await self._tenants.policy(owner)) if spec is not None else None

    @asynccontextmanager
    async def _own_session(self, workspace: Path | str | None, run: str, tell: OnEvent) -> AsyncIterator[Session]:
        """A session of one run."""
        async with await self.open_session(workspace) as session:
            yield session
        tell(SandboxClosed(run=run, session=session.id))

    def batch_runs(self, *, has_traces: bool = True) -> BatchRuns:
        """Batches of the client's tenant, and the work on them. `has_traces`: every run is written down in `traces`. A
        batch's calls are made without the client's key: whoever goes on with it has another.
        """
        return BatchRuns(self._settings, self._pool, self._parts, self.tenant, self.traces if has_traces else None)

    @cached_property
    def runs(self) -> ClientRuns:
        """Runs of the client's tenant that the pool's orchestrators work, whether this program lives on or not
        (docs/agents.md).
        """
        hosted = HostedRuns.on(self._pool, self._settings)
        return ClientRuns(hosted, lambda: self._as_tenant(None), self.actor)

    async def _as_tenant(self, tenant: str | None) -> str:
        """For whom something is done. Raises ToolFailure when the client's key is not good for it."""
        chosen = tenant or self.tenant
        if self._credential is not None:
            await self._credential.check(chosen)
        return chosen

    @property
    def approvals(self) -> ApprovalQueue:
        """The questions that wait for people; `actor` says who asks and answers."""
        return open_approvals(self._settings, self._pool.redis, self._pool.keys)

    async def audit(self) -> Audit:
        """Who changed what. Raises ToolFailure(PERMISSION_DENIED) for a tenant's key."""
        if (await self.actor()).role == "tenant":
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "a tenant's API key cannot read the audit: use one of the role operator or admin",
            )
        return Audit(self._pool.redis, self._settings.deployment)

    async def _scope(self, tenant: str | None) -> str | None:
        """Of whom something is looked for: None for all tenants. Raises as `_as_tenant`."""
        is_tenant = (await self.actor()).role == "tenant"
        return await self._as_tenant(tenant) if tenant is not None or is_tenant else None

    def _lives(self) -> CallLives:
        return CallLives(self._pool.redis, self._settings.deployment, self._dispatcher.keys, self._settings.flower_url)

    async def _check_tenant(self, tenant: str | None) -> None:
        """Raises ToolFailure for a tenant that there is not."""
        if tenant is not None:
            await self._tenants.policy(tenant)

    async def actor(self) -> Actor:
        """Who uses this client: the holder of its key, else whoever runs the program."""
        return (await self._credential.check(self.tenant)).actor() if self._credential is not None else local_actor()

    async def _check_operator(self) -> Actor:
        """Who it is. Raises ToolFailure when the client's key is a tenant's: what an operator has turned off is not a
        tenant's to turn on.
        """
        actor = await self.actor()
        if actor.role == "tenant":
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "a tenant's API key cannot switch tools: use one of the role operator or admin",
            )
        return actor

    async def _find_tool(self, name: str, tenant: str | None = None) -> ToolSpec | None:
        """The tool, for that tenant or for an operator, who sees all; None when there is one that no worker serves
        now.
        """
        specs = {
            spec.name: spec
            for spec in (await self._catalog.specs() if tenant is None else (await self._pool.offers.of(tenant)).tools)
        }
        spec = specs.get(name)
        if name.startswith("session."):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"{name} is a verb of sessions, which cannot be turned off; turn off tools"
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
        options: ReActOptions | None = None,
        on_event: OnEvent | None = None,
        shows_output: bool = True,
        tools: Iterable[str] | Literal["all"] | None = None,
        has_trace: bool = False,
    ) -> RunResult:
        """Work one instruction to an answer or a limit, in `session` or in one of its own.

        `model` None: as the environment says, else the embedded small one. `tools` None: all that the model can cope
        with. `on_event` gets OutputArrived while calls run, unless `shows_output` is False: then no worker sends any.
        `has_trace`: the run's events are written to `traces` (docs/observe.md), under the result's `run`. Raises
        ModelUnavailable, SandboxUnavailable, ConfigError.
        """
        if session is not None and workspace is not None:
            raise ConfigError("give either a session or a workspace to run in, not both")
        run, tell = secrets.token_hex(8), on_event or (lambda _: None)
        async with AsyncExitStack() as stack:
            tenant = session.tenant if session is not None else self.tenant
            if has_trace:
                tell = stack.enter_context(self.traces.open(tenant, run, tell)).on_event
            spans = None
            if self._pool.tracer is not None:
                traced = TracedRun(tenant, run, session=session.id if session is not None else None)
                spans = RunSpans(self._pool.tracer, traced)
                stack.enter_context(run_spans(spans))
                tell = spans.before(tell)
            chosen = await stack.enter_async_context(choose_model(self._settings, model))
            if spans is not None:
                spans.know_model(chosen.model)
            if session is None:
                session = await stack.enter_async_context(self._own_session(workspace, run, tell))
            shows_output = on_event is not None and shows_output
            config = RunConfig(
                run=run,
                dialect=dialect,
                options=options or ReActOptions(),
                tools=tools,
                on_event=tell,
                shows_output=shows_output,
            )
            agent = await self._parts.build_agent(session, chosen, config)
            return await agent.run(instruction)
