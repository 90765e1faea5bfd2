"""Tools that run in this process, ready for the loop: a registry, a door with checks and limits, approvals. No pool, no
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

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.errors import ErrorCode
from contract.functions.call_context import CallContext, CallHandler, ModelAdapter
from contract.functions.session_state import SessionState
from contract.registry import ToolRegistry
from contract.run_events import OnEvent
from contract.signing import SigningKeys
from contract.specs import SkillSummary, ToolSpec
from orchestrator.approvals import DEFAULT_POLICY, Approver, RefusingApprover, review
from orchestrator.dialects.model import Model
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from orchestrator.dispatch.transport import InProcessTransport
from orchestrator.functions.blocking_calls import BlockingCalls
from orchestrator.functions.function_tools import LocalTool, as_tool
from orchestrator.functions.loop_waits import LoopRunner
from orchestrator.functions.session_state import MemoryState
from orchestrator.loop.agent import Agent, RunResult
from orchestrator.loop.limits import ReActOptions, with_window
from orchestrator.models.adapter import BudgetedModel
from orchestrator.models.capabilities import CapabilityCache
from orchestrator.models.choice import ChosenModel, choose_dialect, choose_model, find_needed_capabilities
from orchestrator.settings import load_settings
from store.switches import RegistrySwitches

FITTING_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""As `contract.calls.Identifier` has it."""
QUEUE_WAIT_S = 60.0
"""How long a plain function waits for a free thread."""

_NOBODY = "it needs approval and nobody was named to ask: give LocalTools an approver"


@dataclass(frozen=True)
class Surroundings:
    """What calls are told of beside their arguments: whose they are, and what `CallContext` carries for them."""

    tenant: str
    cwd: str
    config: Mapping[str, Any]
    model: ModelAdapter | Model | None
    state: SessionState
    timeout_s: float
    session: str | None = None
    run: str | None = None


class RegistryCatalog:
    """A registry as the dispatcher's catalog, read anew for every call: what is registered now is callable now."""

    def __init__(self, registry: ToolRegistry[CallHandler]) -> None:
        self._registry = registry

    async def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(state.spec for state in self._registry.describe())

    async def skills(self) -> tuple[SkillSummary, ...]:
        return ()

    def explain_missing(self, name: str) -> str | None:
        return None


class LocalTools:
    """A program's own tools. One may serve many runs at once; `for_run` gives a run or session its own model and state.

    `tools`: whatever `as_tool` takes, or a registry, which stays live. `timeout_s`: the limit of tools without one of
    their own. Tools marked requires_permission or dangerous are asked about; without an `approver` they are refused.
    `model`: what tools may ask; a plain Model is handed to each call as a BudgetedModel of its own, so that no call can
    spend more than that allows. Functions run with the program's own rights: give a model only what it may do.
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
        self._approver = approver or RefusingApprover(_NOBODY)
        self._key = SigningKeys.of(secrets.token_hex(32))
        self._threads = BlockingCalls()
        self._surroundings = Surroundings(
            tenant=tenant,
            cwd=str(cwd if cwd is not None else Path.cwd()),
            config=MappingProxyType({} if config is None else config),
            model=model,
            state=MemoryState(),
            timeout_s=timeout_s,
        )
        self._states: dict[str, SessionState] = {}
        self._door = self._open_door(self._surroundings)

    def register(self, tool: Any) -> LocalTool:
        """Add a tool, or replace the one of its name, from the next call on. Takes what `as_tool` does, and raises it.

        Raises jsonschema.SchemaError for parameters that no call could meet.
        """
        made = as_tool(tool)
        self.registry.register(made)
        return made

    def specs(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        """What a model is told of, by name order."""
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
        """Work one instruction with these tools to an answer or a limit; no pool, no sandbox. `session`: whose state
        the tools see.

        `model` None: as the environment says, else the embedded small one. `options` None: the defaults, with the
        `timeout_s` of these tools. Raises ModelUnavailable, ConfigError.
        """
        settings = load_settings()
        options = options or ReActOptions(tool_timeout_s=self._surroundings.timeout_s)
        run = secrets.token_hex(8)
        async with choose_model(settings, model) as chosen:
            wanted = dialect or settings.dialect
            known = await find_needed_capabilities(chosen, wanted, CapabilityCache(settings.capability_folder))
            bound = self.for_run(run=run, session=session, model=chosen.model, timeout_s=options.tool_timeout_s)
            agent = Agent(
                chosen.model,
                choose_dialect(wanted, known, is_small=chosen.is_small),
                self.specs(),
                bound.run_call,
                # What a model's recipe says of tools that are not here would only mislead it.
                instruction=chosen.instruction if "all" in chosen.tools else "",
                options=with_window(options, settings, known),
                on_event=on_event or (lambda _: None),
                run_id=run,
                switched_off={
                    state.name: state.switch for state in self.registry.describe() if state.switch is not None
                },
            )
            return await agent.run(instruction)

    async def run_call(self, call: ToolCall) -> ToolResult:
        """The one result of a model's call: reviewed, checked, run within its limit. Never raises for a call's
        failure.
        """
        return await self._run_call(self._door, self._surroundings, call)

    def for_run(
        self,
        *,
        run: str | None = None,
        session: str | None = None,
        model: ModelAdapter | Model | None = None,
        state: SessionState | None = None,
        timeout_s: float | None = None,
    ) -> "BoundTools":
        """The same tools for one run: its calls see this model and this state.

        `state` None: the session's, which is kept until `forget_session`; for a run without a session, a new one.
        Raises ValueError for ids that no call can carry. `timeout_s` None: theirs.
        """
        ours = self._surroundings
        for identifier in (run, session):
            if identifier is not None and not FITTING_ID.fullmatch(identifier):
                raise ValueError(
                    f"'{identifier[:80]}' is no id of a run or session: write 1 to 64 letters, digits, '_' or '-'"
                )
        if state is None:
            state = MemoryState() if session is None else self.state_of(session)
        told = replace(
            ours,
            run=run,
            session=session,
            model=model or ours.model,
            state=state,
            timeout_s=timeout_s or ours.timeout_s,
        )
        return BoundTools(self, self._open_door(told), told)

    def state_of(self, session: str) -> SessionState:
        """What is kept for a session, of any name."""
        return self._states.setdefault(session, MemoryState())

    def forget_session(self, session: str) -> None:
        """Drop what was kept for a session that has ended."""
        self._states.pop(session, None)

    async def _run_call(self, door: Dispatcher, told: Surroundings, call: ToolCall) -> ToolResult:
        tool = self.registry.get(call.name)
        timeout_s = told.timeout_s
        if tool is not None and self.registry.switch(call.name) is None:
            reviewed = await review(
                call,
                tool.spec,
                self._approver,
                policy=DEFAULT_POLICY,
                tenant=told.tenant,
                session=told.session,
                checks=tool.validators,
            )
            if isinstance(reviewed, ToolResult):
                return reviewed
            if self.registry.get(call.name) is not tool:
                sentence = f"{call.name} was not run: it was replaced while the call was reviewed; call it again"
                return ToolResult.failed(call, ErrorCode.PERMISSION_DENIED, sentence)
            call = reviewed
            timeout_s = tool.spec.timeout_s or timeout_s
        # Said outright: an argument that happens to be called `timeout` is the function's own business.
        return await door.dispatch(Request(call, told.tenant, told.session, "local", timeout_s=timeout_s, run=told.run))

    def _open_door(self, told: Surroundings) -> Dispatcher:
        def context_for(call: ToolCall, context: ToolContext) -> CallContext:
            return CallContext(
                call_id=call.id,
                tenant=context.tenant,
                run=context.run,
                session=context.session,
                cwd=told.cwd,
                config=told.config,
                model=_for_tools(told.model),
                state=told.state,
                runner=LoopRunner(asyncio.get_running_loop()),
            )

        transport = InProcessTransport(self.registry, self._key, contexts=context_for, threads=self._threads)
        rules = CallRules(switches=RegistrySwitches(self.registry))
        return Dispatcher(
            transport, TenantCatalog(RegistryCatalog(self.registry)), self._key, queue_wait_s=QUEUE_WAIT_S, rules=rules
        )


class BoundTools:
    """LocalTools for one run or session. Made by `LocalTools.for_run`; `run_call` is what an Agent takes."""

    def __init__(self, tools: LocalTools, door: Dispatcher, told: Surroundings) -> None:
        self._tools = tools
        self._door = door
        self._told = told

    @property
    def state(self) -> SessionState:
        return self._told.state

    def specs(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        return self._tools.specs(names)

    async def run_call(self, call: ToolCall) -> ToolResult:
        """As `LocalTools.run_call`."""
        return await self._tools._run_call(self._door, self._told, call)


def _for_tools(model: ModelAdapter | Model | None) -> ModelAdapter | None:
    return model if model is None or isinstance(model, ModelAdapter) else BudgetedModel(model)
