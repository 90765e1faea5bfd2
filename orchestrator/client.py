"""The SDK: connect to a pool or start one, open sessions, call tools, run instructions. The CLI uses nothing else."""

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.registry import ToolState, filter_specs
from contract.specs import ToolSpec
from contract.tenancy import DEFAULT_TENANT
from orchestrator.agent import RunResult
from orchestrator.api_keys import ApiKeys, Credential
from orchestrator.approvals import DEFAULT_POLICY, Approver, choose_approver
from orchestrator.approvals.policies import ApprovalPolicy, load_policy
from orchestrator.batch_runs import BatchRuns
from orchestrator.dispatcher import find_nearest
from orchestrator.events import OnEvent, SandboxClosed
from orchestrator.limits import ReActOptions
from orchestrator.local_stack import StackInfo, embedded_stack
from orchestrator.models.base import Model
from orchestrator.models.choice import ChosenModel, choose_model
from orchestrator.pool_connection import PoolConnection, open_pool
from orchestrator.run_parts import RunAs, RunParts
from orchestrator.sessions import Checkpoint, Session, Start, delete_checkpoint
from orchestrator.settings import OrchestratorSettings, is_interactive, load_settings
from orchestrator.switches import build_switch
from orchestrator.traces.opening import Traces, secrets_of_pool


class ToolClient:
    """A connection to one pool for one tenant. Made by `connect` or `embedded`."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: PoolConnection,
        tenant: str,
        approver: Approver | None,
        stack: StackInfo | None,
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
        approver = approver or choose_approver(settings.approvals, is_interactive=is_interactive())
        policy = policy or (load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY)
        self._parts = RunParts(settings, pool, approver, policy)
        self.traces = Traces(settings, secrets or {})
        self._pool = pool
        self.tenant = tenant
        self.stack = stack

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str = "default",
        approver: Approver | None = None,
        policy: ApprovalPolicy | None = None,
        settings: OrchestratorSettings | None = None,
        needs_workers: bool = True,
    ) -> "AsyncIterator[ToolClient]":
        """A client of a running pool. `url` None: TOOLCREW_REDIS_URL. `api_key`: the client is its tenant's, and `tenant` must be one that the key is good
        for, or left out. `approver` None: as TOOLCREW_APPROVALS says. `policy` None: the rules of the file that TOOLCREW_APPROVAL_POLICY names, else none.
        `needs_workers` False: also of a pool whose workers are gone, of which only batches can be asked then.

        Raises ConfigError (a bad policy file, no Redis named, nothing to sign with, no worker), BrokerUnavailable (no answer, wrong password),
        ToolFailure (UNAUTHENTICATED for a key that is none, PERMISSION_DENIED for another tenant's).
        """
        settings = settings or load_settings()
        broker = settings.broker(url)
        async with open_pool(broker, queue_wait_s=settings.queue_wait_s, needs_workers=needs_workers) as pool:
            credential = None
            if api_key is not None:
                keys = ApiKeys(pool.redis, settings.deployment)
                credential = Credential(keys, api_key)
                tenant = (await keys.authenticate(api_key)).tenant if tenant == DEFAULT_TENANT else tenant
                await credential.check(tenant)
            known = secrets_of_pool(broker.redis_url.get_secret_value(), api_key=api_key)
            yield cls(settings, pool, tenant, approver, None, policy, credential, known)

    @classmethod
    @asynccontextmanager
    async def embedded(
        cls,
        *,
        tenant: str = "default",
        approver: Approver | None = None,
        policy: ApprovalPolicy | None = None,
        settings: OrchestratorSettings | None = None,
    ) -> "AsyncIterator[ToolClient]":
        """A client of a stack of its own, started now and taken down at the end. Needs a Docker engine and the sandbox image.

        Raises OperatorError with what did not start and what to do about it.
        """
        settings = _with_secret(settings or load_settings())
        async with (
            embedded_stack(settings.for_children()) as stack,
            open_pool(settings.broker(stack.redis_url), queue_wait_s=settings.queue_wait_s) as pool,
        ):
            yield cls(
                settings, pool, tenant, approver, stack, policy, secrets=secrets_of_pool(stack.redis_url, flower_url=stack.flower_url)
            )

    async def open_session(
        self,
        workspace: Path | str | None = None,
        *,
        tenant: str | None = None,
        image: str | None = None,
        ttl_s: float = 1800,
        restore: Checkpoint | str | None = None,
        network: Literal["none", "egress"] | None = None,
    ) -> Session:
        """A sandbox of one's own. It is removed by `close`, or after `ttl_s` seconds without a call.

        `workspace`: a folder, an archive (tar, also compressed, or zip) or a git bundle to begin with. `restore`: a checkpoint of the same tenant
        instead, or its id. `network`: "egress" where the tenant's class allows it, "none"; None: what the class says (docs/sessions.md).
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
            self._dispatcher, self._blobs, tenant=await self._as_tenant(tenant), start=start, credential=self._credential
        )

    async def delete_checkpoint(self, checkpoint: Checkpoint | str, *, tenant: str | None = None) -> bool:
        """Delete a checkpoint, or the one of that id. False when the tenant has none of it. Raises SandboxUnavailable."""
        return await delete_checkpoint(
            self._dispatcher, await self._as_tenant(tenant), checkpoint.id if isinstance(checkpoint, Checkpoint) else checkpoint
        )

    async def tools(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        """The tools a model of the client's tenant may call: as the workers publish them, without those that are turned off."""
        policy = await self._tenants.policy(self.tenant)
        states = await self.tool_states()
        return filter_specs([state.spec for state in states if state.switch is None and policy.allows_tool(state.name)], names)

    async def tool_states(self) -> list[ToolState]:
        """Every tool that the workers publish, by name order, on or off."""
        switches = await self._switches.switches()
        specs = sorted(await self._catalog.specs(), key=lambda spec: spec.name)
        return [ToolState(spec, switches.get(spec.name)) for spec in specs if spec.audience == "model"]

    async def tool_state(self, name: str) -> ToolState:
        """One tool with its state. Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names, ConfigError when no worker serves it now."""
        spec = await self._find_tool(name)
        if spec is None:
            raise ConfigError(self._catalog.explain_missing(name) or f"no worker serves {name} now")
        return ToolState(spec, (await self._switches.switches()).get(name))

    async def disable(self, name: str, *, reason: str | None = None, by: str | None = None) -> ToolState | None:
        """Turn a tool off for the whole deployment, on every worker and orchestrator within 2 s: calls of it fail with TOOL_DISABLED and `reason`,
        models that start then are not told of it. It stays off until `enable`. `by`: who says so, else the client's tenant. None: it is off, and no
        worker serves it now.

        Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names, ToolFailure(INVALID_ARGUMENTS), BrokerUnavailable.
        """
        spec = await self._find_tool(name)
        await self._check_operator()
        switch = build_switch(by or self.tenant, reason)
        await self._switches.turn_off(name, switch)
        return ToolState(spec, switch) if spec is not None else None

    async def enable(self, name: str) -> ToolState | None:
        """Turn a tool on again. None: it is on, and no worker serves it now. Raises as `disable`."""
        await self._check_operator()
        was_off = await self._switches.turn_on(name)
        try:
            spec = await self._find_tool(name)
        except ToolFailure:
            if not was_off:
                raise
            return None
        return ToolState(spec) if spec is not None else None

    @asynccontextmanager
    async def _own_session(self, workspace: Path | str | None, run: str, tell: OnEvent) -> AsyncIterator[Session]:
        """A session of one run."""
        async with await self.open_session(workspace) as session:
            yield session
        tell(SandboxClosed(run=run, session=session.id))

    def batch_runs(self, *, has_traces: bool = True) -> BatchRuns:
        """Batches of the client's tenant, and the work on them. `has_traces`: every run is written down in `traces`. A batch's calls are made without the client's key: whoever goes on with it has another."""
        return BatchRuns(self._settings, self._pool, self._parts, self.tenant, self.traces if has_traces else None)

    async def _as_tenant(self, tenant: str | None) -> str:
        """For whom something is done. Raises ToolFailure when the client's key is not good for it."""
        chosen = tenant or self.tenant
        if self._credential is not None:
            await self._credential.check(chosen)
        return chosen

    async def _check_operator(self) -> None:
        """Raises ToolFailure when the client's key is a tenant's: what holds for everybody is not a tenant's to change."""
        if self._credential is not None and (await self._credential.check(self.tenant)).role == "tenant":
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "a tenant's API key cannot switch tools: use one of the role operator or admin")

    async def _find_tool(self, name: str) -> ToolSpec | None:
        """The tool; None when there is one that no worker serves now."""
        specs = {spec.name: spec for spec in await self._catalog.specs()}
        spec = specs.get(name)
        if name.startswith("session."):
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{name} is a verb of sessions, which cannot be turned off; turn off tools")
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

        `model` None: as the environment says, else the embedded small one. `tools` None: all that the model can cope with. `on_event` gets
        OutputArrived while calls run, unless `shows_output` is False: then no worker sends any. `has_trace`: it is written down in `traces`
        (docs/traces.md), under the result's `run`. Raises ModelUnavailable, SandboxUnavailable, ConfigError.
        """
        if session is not None and workspace is not None:
            raise ConfigError("give either a session or a workspace to run in, not both")
        run, tell = secrets.token_hex(8), on_event or (lambda _: None)
        async with AsyncExitStack() as stack:
            if has_trace:
                tell = stack.enter_context(self.traces.open(session.tenant if session is not None else self.tenant, run, tell)).on_event
            chosen = await stack.enter_async_context(choose_model(self._settings, model))
            if session is None:
                session = await stack.enter_async_context(self._own_session(workspace, run, tell))
            wanted = RunAs(
                run=run,
                dialect=dialect,
                options=options or ReActOptions(),
                tools=tools,
                tell=tell,
                shows_output=on_event is not None and shows_output,
            )
            agent = await self._parts.build_agent(session, chosen, wanted)
            return await agent.run(instruction)


def _with_secret(settings: OrchestratorSettings) -> OrchestratorSettings:
    """An embedded stack on a Redis without a password signs with a secret of its own."""
    if settings.redis_url is None or settings.secret is not None or settings.broker().has_password():
        return settings
    return settings.model_copy(update={"secret": SecretStr(secrets.token_urlsafe(32))})
