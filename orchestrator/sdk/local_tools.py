"""Tools that run in this process: a registry, calls with checks and limits, approvals. There is no pool and no
sandbox.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.functions.call_context import CallContext, CallHandler, ModelAdapter
from toolcrew.contract.functions.session_state import SessionState
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.run_events import OnEvent
from toolcrew.contract.settings import load_settings
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.orchestrator.approvals import DEFAULT_POLICY, Approver, RefusingApprover, review
from toolcrew.orchestrator.dialects.model import Model
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.in_process_transport import InProcessTransport
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from toolcrew.orchestrator.functions.blocking_calls import BlockingCalls
from toolcrew.orchestrator.functions.function_tools import LocalTool, as_tool
from toolcrew.orchestrator.functions.loop_waits import LoopRunner
from toolcrew.orchestrator.functions.session_state import MemoryState
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.loop.limits import ReActOptions, with_window
from toolcrew.orchestrator.models.adapter import BudgetedModel
from toolcrew.orchestrator.models.capabilities import CapabilityCache
from toolcrew.orchestrator.models.choice import (
    ChosenModel,
    choose_dialect,
    choose_model,
    choose_profile,
    find_needed_capabilities,
)
from toolcrew.store.tools import RegistrySwitches

FITTING_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Pattern of `toolcrew.contract.calls.Identifier`."""
QUEUE_WAIT_S = 60.0
"""Seconds that a call of a plain function waits for a free thread."""

_NO_APPROVER = "the call needs approval, and LocalTools has no approver: pass `approver`"


@dataclass(frozen=True)
class LocalContext:
    """Context of calls, in addition to their arguments: the tenant, session and run, and the values for
    `CallContext`.
    """

    tenant: str
    cwd: str
    config: Mapping[str, Any]
    model: ModelAdapter | Model | None
    state: SessionState
    timeout_s: float
    session: str | None = None
    run: str | None = None


class RegistryCatalog:
    """Adapter that offers the tools of a ToolRegistry to the dispatcher. Every call reads the registry, so a new tool
    can be called immediately.
    """

    def __init__(self, registry: ToolRegistry[CallHandler]) -> None:
        self._registry = registry

    async def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(state.spec for state in self._registry.describe())

    async def skills(self) -> tuple[SkillSummary, ...]:
        return ()

    def explain_missing(self, name: str) -> str | None:
        return None


class LocalTools:
    """Tools of a program. One instance may serve many runs at once; `for_run` gives a run or session its own model and
    state.

    `tools`: values that `as_tool` accepts, or a registry; later changes of the registry take effect. `timeout_s`: the
    limit of tools without their own limit. Tools marked requires_permission or dangerous need an approval; without an
    `approver` they are refused. `model`: the model to which tools may send requests. If it is a plain Model, each call
    gets it wrapped in a BudgetedModel, which limits the tokens of the call. Functions run with the rights of the
    program: give a model only functions that it may use.
    """

    def __init__(
        self,
        tools: Iterable[Any] | ToolRegistry[CallHandler] = (),
        *,
        model: ModelAdapter | Model | None = None,
        config: Mapping[str, Any] | None = None,
        cwd: Path | str | None = None,
        approver: Approver | None = None,
        tenant: str = "default",
        timeout_s: float = 30,
    ) -> None:
        self.registry: ToolRegistry[CallHandler] = (
            tools if isinstance(tools, ToolRegistry) else ToolRegistry(as_tool(tool) for tool in tools)
        )
        self._approver = approver or RefusingApprover(_NO_APPROVER)
        self._key = SigningKeys.of(secrets.token_hex(32))
        self._threads = BlockingCalls()
        self._context = LocalContext(
            tenant=tenant,
            cwd=str(cwd if cwd is not None else Path.cwd()),
            config=MappingProxyType({} if config is None else config),
            model=model,
            state=MemoryState(),
            timeout_s=timeout_s,
        )
        self._states: dict[str, SessionState] = {}
        self._dispatcher = self._create_dispatcher(self._context)

    def register(self, tool: Any) -> LocalTool:
        """Add a tool, or replace the tool of its name, for later calls. Accepts the same values as `as_tool` and
        raises the same exceptions.

        Raises jsonschema.SchemaError for parameters that no call could satisfy.
        """
        local_tool = as_tool(tool)
        self.registry.register(local_tool)
        return local_tool

    def specs(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        """Return the specifications of the tools for a model, by name."""
        return self.registry.specs(names)

    async def run(
        self,
        instruction: str,
        *,
        model: Model | ChosenModel | str | None = None,
        dialect: str | None = None,
        options: ReActOptions | None = None,
        on_event: OnEvent | None = None,
        session: str | None = None,
    ) -> RunResult:
        """Run one instruction with these tools until the model answers or a limit is reached. No pool and no sandbox
        are used. `session`: the session whose state the tools see.

        `model` None: the model of the environment's settings, otherwise the embedded small model. `options` None: the
        defaults, with the `timeout_s` of these tools. Raises ModelUnavailable, ConfigError.
        """
        settings = load_settings()
        options = options or ReActOptions(tool_timeout_s=self._context.timeout_s)
        run = secrets.token_hex(8)
        async with choose_model(settings, model) as chosen_model:
            cache = CapabilityCache(settings.capability_folder)
            profile, _ = await choose_profile(None, chosen_model, cache)
            dialect_name = dialect or settings.dialect or profile.dialect
            capabilities = await find_needed_capabilities(chosen_model, dialect_name, cache)
            bound = self.for_run(run=run, session=session, model=chosen_model.model, timeout_s=options.tool_timeout_s)
            agent = Agent(
                chosen_model.model,
                choose_dialect(dialect_name, capabilities, profile),
                self.specs(),
                bound.run_call,
                # The instruction of a profile with certain tools would mislead a model that has others.
                instruction=profile.instruction if "all" in profile.tools else "",
                profile=profile,
                options=with_window(options, settings, capabilities),
                on_event=on_event or (lambda _: None),
                run_id=run,
                switched_off={
                    state.name: state.switch for state in self.registry.describe() if state.switch is not None
                },
            )
            return await agent.run(instruction)

    async def run_call(self, call: ToolCall) -> ToolResult:
        """Return the one result of a model's call, after review and checks, within its limit. A failed call never
        raises an exception.
        """
        return await self._run_call(self._dispatcher, self._context, call)

    def for_run(
        self,
        *,
        run: str | None = None,
        session: str | None = None,
        model: ModelAdapter | Model | None = None,
        state: SessionState | None = None,
        timeout_s: float | None = None,
    ) -> "BoundTools":
        """Return the same tools for one run. Calls of the run use this model and this state.

        `state` None: the session's state, which lives until `forget_session`; a run without a session gets a new
        state. `timeout_s` None: the limit of these tools. Raises ValueError for an id that no call can have.
        """
        base = self._context
        for identifier in (run, session):
            if identifier is not None and not FITTING_ID.fullmatch(identifier):
                raise ValueError(
                    f"'{identifier[:80]}' is not a valid run or session id: use 1 to 64 letters, digits, '_' or '-'"
                )
        if state is None:
            state = MemoryState() if session is None else self.state_of(session)
        local = replace(
            base,
            run=run,
            session=session,
            model=model or base.model,
            state=state,
            timeout_s=timeout_s or base.timeout_s,
        )
        return BoundTools(self, self._create_dispatcher(local), local)

    def state_of(self, session: str) -> SessionState:
        """Return the state of a session. The session id may be any text."""
        return self._states.setdefault(session, MemoryState())

    def forget_session(self, session: str) -> None:
        """Delete the state of a session that has ended."""
        self._states.pop(session, None)

    async def _run_call(self, dispatcher: Dispatcher, local: LocalContext, call: ToolCall) -> ToolResult:
        tool = self.registry.get(call.name)
        timeout_s = local.timeout_s
        if tool is not None and self.registry.switch(call.name) is None:
            reviewed = await review(
                call,
                tool.spec,
                self._approver,
                policy=DEFAULT_POLICY,
                tenant=local.tenant,
                session=local.session,
                checks=tool.validators,
            )
            if isinstance(reviewed, ToolResult):
                return reviewed
            if self.registry.get(call.name) is not tool:
                message = f"{call.name} was replaced during the review, so the call was not run: call the tool again"
                return ToolResult.failed(call, ErrorCode.PERMISSION_DENIED, message)
            call = reviewed
            timeout_s = tool.spec.timeout_s or timeout_s
        # The limit is explicit, because an argument named `timeout` belongs to the function.
        return await dispatcher.dispatch(
            Request(call, local.tenant, local.session, "local", timeout_s=timeout_s, run=local.run)
        )

    def _create_dispatcher(self, local: LocalContext) -> Dispatcher:
        def context_for(call: ToolCall, context: ToolContext) -> CallContext:
            return CallContext(
                call_id=call.id,
                tenant=context.tenant,
                run=context.run,
                session=context.session,
                cwd=local.cwd,
                config=local.config,
                model=_limit_model(local.model),
                state=local.state,
                runner=LoopRunner(asyncio.get_running_loop()),
            )

        transport = InProcessTransport(self.registry, self._key, contexts=context_for, threads=self._threads)
        rules = CallRules(switches=RegistrySwitches(self.registry))
        return Dispatcher(
            transport, TenantCatalog(RegistryCatalog(self.registry)), self._key, queue_wait_s=QUEUE_WAIT_S, rules=rules
        )


class BoundTools:
    """LocalTools for one run or session, made by `LocalTools.for_run`. An Agent takes its `run_call`."""

    def __init__(self, tools: LocalTools, dispatcher: Dispatcher, local: LocalContext) -> None:
        self._tools = tools
        self._dispatcher = dispatcher
        self._context = local

    @property
    def state(self) -> SessionState:
        return self._context.state

    def specs(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        return self._tools.specs(names)

    async def run_call(self, call: ToolCall) -> ToolResult:
        """Return the one result of a model's call, like `LocalTools.run_call`."""
        return await self._tools._run_call(self._dispatcher, self._context, call)


def _limit_model(model: ModelAdapter | Model | None) -> ModelAdapter | None:
    return model if model is None or isinstance(model, ModelAdapter) else BudgetedModel(model)
