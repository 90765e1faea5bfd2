"""Tools of a session as LangChain tools. The schemas are unchanged, failures are ToolMessages with status "error",
and metadata is the artifact.
"""

import asyncio
from typing import Any, Literal

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, ToolResult
from toolcrew.contract.extras import explain_missing
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.adapters.artifacts import build_artifact
from toolcrew.orchestrator.approvals import Approver
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sdk.session_tools import Names, SessionTools
from toolcrew.orchestrator.sessions.session import Session

try:
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import BaseTool, ToolException
    from pydantic import PrivateAttr
except ModuleNotFoundError as error:
    raise explain_missing(error) from error


class PoolTool(BaseTool):  # type: ignore[misc, unused-ignore]
    """Tool of a session. `ainvoke` runs in the event loop of the client. `invoke` may be called from other threads
    only, while that loop runs.

    If the input is a tool call, a failure is returned as a ToolMessage with status "error". If the input is only the
    arguments, the text of the failure is returned. Set `handle_tool_error` to False to get ToolExceptions instead.
    """

    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    handle_tool_error: Any = True
    _tools: SessionTools = PrivateAttr()
    _loop: asyncio.AbstractEventLoop = PrivateAttr()

    @classmethod
    def build(cls, spec: ToolSpec, tools: SessionTools, loop: asyncio.AbstractEventLoop) -> "PoolTool":
        """Create a tool whose calls run in `loop`."""
        tool = cls(name=spec.name, description=spec.description, args_schema=dict(spec.parameters))
        tool._tools, tool._loop = tools, loop
        return tool

    def _to_args_and_kwargs(
        self, tool_input: str | dict[str, Any], tool_call_id: str | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Pass the arguments by position, because an argument may have a name that LangChain uses (config, callbacks,
        # run_manager).
        return (super()._parse_input(tool_input, tool_call_id), tool_call_id), {}

    async def _arun(self, arguments: dict[str, Any], tool_call_id: str | None) -> tuple[Any, dict[str, Any]]:
        if asyncio.get_running_loop() is self._loop:
            return self._build_output(await self._tools.call(self.name, arguments), tool_call_id)
        # The client's connections belong to the client's event loop.
        calling = asyncio.run_coroutine_threadsafe(self._tools.call(self.name, arguments), self._loop)
        return self._build_output(await asyncio.wrap_future(calling), tool_call_id)

    def _run(self, arguments: dict[str, Any], tool_call_id: str | None) -> tuple[Any, dict[str, Any]]:
        self._check_thread()
        calling = asyncio.run_coroutine_threadsafe(self._tools.call(self.name, arguments), self._loop)
        try:
            return self._build_output(calling.result(), tool_call_id)
        except BaseException:
            # Ctrl-C during the wait also stops the processes in the sandbox.
            calling.cancel()
            raise

    def _check_thread(self) -> None:
        """Raise RuntimeError in the thread of the event loop, where waiting for the call would never end."""
        try:
            running_loop = asyncio.get_running_loop()
        except RuntimeError:
            running_loop = None
        if running_loop is self._loop:
            raise RuntimeError(
                f"{self.name}: invoke would block the event loop that must run the call: use ainvoke, or invoke "
                "from another thread"
            )
        if not self._loop.is_running():
            raise RuntimeError(
                f"{self.name}: the event loop of its client has ended. Keep it running; docs/integrations.md shows how"
            )

    def _build_output(self, result: ToolResult, tool_call_id: str | None) -> tuple[Any, dict[str, Any]]:
        """Return content and artifact in LangChain's format. Raises ToolException for a failure if the caller has
        configured how failures are handled.
        """
        text, artifact = result.text(), build_artifact(result)
        if result.success:
            return text, artifact
        if tool_call_id is None or self.handle_tool_error is not True:
            raise ToolException(text)
        # A ToolException would lose the artifact.
        return ToolMessage(text, artifact=artifact, tool_call_id=tool_call_id, name=self.name, status="error"), artifact


async def as_langchain_tools(
    client: ToolClient,
    session: Session,
    names: Names = "all",
    *,
    approver: Approver | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[PoolTool]:
    """Return the tools of `session` for a LangChain model or a LangGraph ToolNode. The tools work while the session is
    open. Await this function in the event loop of `client`.

    `approver`: decides on calls that need approval; None: the client's approver. `timeout_s`: the limit of calls whose
    tool has no limit of its own. Raises ToolFailure(TOOL_NOT_FOUND) for an unknown name, SandboxUnavailable,
    BrokerUnavailable.
    """
    tools = await client.session_tools(session, names, approver=approver, timeout_s=timeout_s)
    loop = asyncio.get_running_loop()
    return [PoolTool.build(spec, tools, loop) for spec in tools.specs]
