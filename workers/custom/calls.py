"""Runs operators' functions in the worker's own process, each call with its CallContext; whatever they give or raise is an Outcome."""

import asyncio
import contextlib
import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import structlog

from contract.errors import ToolFailure
from contract.functions.call_context import CallContext, CallHandler
from contract.functions.session_state import NoState, SessionState
from contract.registry import Tool
from workers.custom.call_loops import CallLoop
from workers.custom.model import CallerModel
from workers.custom.outcomes import build_error_outcome, build_outcome
from workers.custom.prints import PrintLog
from workers.tools.base import Handler, Outcome, Workbench

log = structlog.get_logger(__name__)


class States(Protocol):
    """Where the states of sessions lie. As workers/custom/state.py has it."""

    def open(self, tenant: str, session: str) -> SessionState: ...


class CustomCalls:
    """Makes handlers of tools. `config`: what the operator gives every call; `states` None: no session has a state here."""

    def __init__(self, config: Mapping[str, Any], states: States | None) -> None:
        self._config = config
        self._states = states

    def build_handler(self, tool: Tool[CallHandler]) -> Handler:
        """A handler that calls the tool's function in the calling thread, to its end. What it prints is logged."""

        def handle(arguments: dict[str, Any], bench: Workbench) -> Outcome:
            with contextlib.closing(PrintLog(tool.name, bench.call.id)) as prints, contextlib.redirect_stdout(prints):
                return self._outcome(tool, arguments, bench)

        return handle

    def _outcome(self, tool: Tool[CallHandler], arguments: dict[str, Any], bench: Workbench) -> Outcome:
        try:
            with CallLoop() as loop:
                value = loop.run_tool(tool.name, tool.handler(arguments, self._context(bench, loop)), bench.context.timeout_s)
                return build_outcome(bench.call, value)
        except ToolFailure as failure:
            return build_error_outcome(bench.call, failure)
        # The edge: an operator's function may raise anything, and must cost its call only. What interrupts the call is let through.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            log.exception("custom_tool_failed", tool=tool.name, call=bench.call.id)
            return build_error_outcome(bench.call, error)

    def _context(self, bench: Workbench, loop: CallLoop) -> CallContext:
        told = bench.context
        return CallContext(
            call_id=bench.call.id,
            tenant=told.tenant,
            run=told.run,
            session=told.session,
            cwd=told.cwd,
            # The operator's word is last: a caller must not turn a tool to another server. A copy: it is this call's.
            config=MappingProxyType(copy.deepcopy({**told.config, **self._config})),
            model=CallerModel(told.model, bench.events) if told.model is not None else None,
            state=NoState() if self._states is None or told.session is None else self._states.open(told.tenant, told.session),
            runner=loop,
        )
