"""Runs operators' functions in the worker's own process, each call with its CallContext; whatever they give or raise is
an Outcome.
"""

import asyncio
import contextlib
import copy
import io
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
from workers.tools.base import Handler, Outcome, ToolEnvironment

log = structlog.get_logger(__name__)


MAX_LINE_CHARS = 2000
MAX_CHARS = 64 * 1024
"""Of one call; what is more is counted."""


class PrintLog(io.TextIOBase):
    """A text file for one call's prints. `close` logs what stands on a line without end, and how much was left out."""

    def __init__(self, tool: str, call_id: str) -> None:
        self._log = log.bind(tool=tool, call=call_id)
        self._line = ""
        self._room = MAX_CHARS
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed:
            # A thread that outlives its call: there is no call any more that it could print for.
            return len(text)
        kept = text[: self._room]
        self._room -= len(kept)
        self._dropped += len(text) - len(kept)
        *lines, self._line = (self._line + kept).split("\n")
        while len(self._line) > MAX_LINE_CHARS:
            lines.append(self._line[:MAX_LINE_CHARS])
            self._line = self._line[MAX_LINE_CHARS:]
        for line in lines:
            self._log.info("tool_printed", text=line[:MAX_LINE_CHARS])
        return len(text)

    def close(self) -> None:
        if not self.closed:
            if self._line:
                self._log.info("tool_printed", text=self._line)
            if self._dropped:
                self._log.warning("tool_printed_too_much", dropped_chars=self._dropped)
        super().close()


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
