"""Runs operators' functions in the worker's own process.

Each call gets a CallContext, and every result or exception becomes an Outcome.
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

from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.functions.call_context import CallContext, CallHandler
from toolcrew.contract.registry import Tool
from toolcrew.workers.custom.call_loops import CallLoop
from toolcrew.workers.custom.outcomes import build_error_outcome, build_outcome
from toolcrew.workers.tools.base import Handler, Outcome, ToolEnvironment

log = structlog.get_logger(__name__)


MAX_LINE_CHARS = 2000
MAX_CHARS = 64 * 1024
"""Printed characters of one call that are logged. Further characters are only counted."""


class PrintLog(io.TextIOBase):
    """A text file that receives the printed text of one call and logs it.

    `close` logs an unfinished last line and the number of dropped characters.
    """

    def __init__(self, tool: str, call_id: str) -> None:
        self._log = log.bind(tool=tool, call=call_id)
        self._line = ""
        self._remaining_chars = MAX_CHARS
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed:
            # A thread may outlive its call. Its text belongs to no call and is dropped.
            return len(text)
        limited = text[: self._remaining_chars]
        self._remaining_chars -= len(limited)
        self._dropped += len(text) - len(limited)
        *lines, self._line = (self._line + limited).split("\n")
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
    """Builds the handlers of operators' tools. Every call gets the operator's configuration `config`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def build_handler(self, tool: Tool[CallHandler]) -> Handler:
        """Return a handler that calls the tool's function in the calling thread, until it ends. Printed text is
        logged.
        """

        def handle(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
            # `redirect_stdout` changes the whole process. This is safe because a pool process runs one call at a
            # time.
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
        # The outermost handler: an operator's function may raise anything, and must fail only its own call. The
        # interrupt of a call (CallInterrupted) is not caught.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            log.exception("custom_tool_failed", tool=tool.name, call=environment.call.id)
            return build_error_outcome(environment.call, error)

    def _context(self, environment: ToolEnvironment, loop: CallLoop) -> CallContext:
        context = environment.call_context(loop)
        # The operator's values replace the caller's: a caller must not direct a tool to another server. Each call gets
        # its own copy.
        return replace(context, config=MappingProxyType({**context.config, **copy.deepcopy(dict(self._config))}))
