"""Runs operators' functions in the worker's own process, each call with its CallContext; whatever they give or raise is
an Outcome.
"""

import asyncio
import contextlib
import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import structlog

from contract.errors import ToolFailure
from contract.functions.call_context import CallContext, CallHandler
from contract.registry import Tool
from workers.custom.call_loops import CallLoop
from workers.custom.outcomes import build_error_outcome, build_outcome
from workers.custom.prints import PrintLog
from workers.tools.base import Handler, Outcome, ToolEnvironment

log = structlog.get_logger(__name__)


class CustomCalls:
    """Makes handlers of tools. `config`: what the operator gives every call."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def build_handler(self, tool: Tool[CallHandler]) -> Handler:
        """A handler that calls the tool's function in the calling thread, to its end. What it prints is logged."""

        def handle(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
            with (
                contextlib.closing(PrintLog(tool.name, environment.call.id)) as prints,
                contextlib.redirect_stdout(prints),
            ):
                return self._outcome(tool, arguments, environment)

        return handle

    def _outcome(self, tool: Tool[CallHandler], arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
        try:
            with CallLoop() as loop:
                value = loop.run_tool(
                    tool.name, tool.handler(arguments, self._context(environment, loop)), environment.context.timeout_s
                )
                return build_outcome(environment.call, value)
        except ToolFailure as failure:
            return build_error_outcome(environment.call, failure)
        # The edge: an operator's function may raise anything, and must cost its call only. What interrupts the call is
        # let through.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            log.exception("custom_tool_failed", tool=tool.name, call=environment.call.id)
            return build_error_outcome(environment.call, error)

    def _context(self, environment: ToolEnvironment, loop: CallLoop) -> CallContext:
        context = environment.call_context(loop)
        # The operator's values come last: a caller must not direct a tool to another server. A copy, which belongs to
        # this call.
        return replace(context, config=MappingProxyType({**context.config, **copy.deepcopy(dict(self._config))}))
