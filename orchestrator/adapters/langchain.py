"""The tools of a session as LangChain tools: their schemas as they are, failures as ToolMessages with status "error",
metadata as artifact.
"""

import asyncio
from typing import Any, Literal

from contract.calls import DEFAULT_TIMEOUT_S, ToolResult
from contract.extras import explain_missing
from contract.specs import ToolSpec
from orchestrator.adapters.artifacts import build_artifact
from orchestrator.approvals import Approver
from orchestrator.dispatch.sessions import Session
from orchestrator.sdk.client import ToolClient
from orchestrator.sdk.session_tools import Names, SessionTools

try:
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import BaseTool, ToolException
    from pydantic import PrivateAttr
except ModuleNotFoundError as error:
    raise explain_missing(error) from error


class PoolTool(BaseTool):  # type: ignore[misc, unused-ignore]
    """One tool of a session. `ainvoke` runs in the loop of the client; `invoke` is for other threads, while that loop
    runs.

    Called with a tool call, a failure gives a ToolMessage with status "error"; with bare arguments, the text of it. Set
    `handle_tool_error` to False to get ToolExceptions instead.
    """

    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    handle_tool_error: Any = True
    _tools: SessionTools = PrivateAttr()
    _loop: asyncio.AbstractEventLoop = PrivateAttr()

    @classmethod
    def build(cls, spec: ToolSpec, tools: SessionTools, loop: asyncio.AbstractEventLoop) -> "PoolTool":
        """A tool whose calls are made in `loop`."""
        made = cls(name=spec.name, description=spec.description, args_schema=dict(spec.parameters))
        made._tools, made._loop = tools, loop
        return made

    def _to_args_and_kwargs(
        self, tool_input: str | dict[str, Any], tool_call_id: str | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # As two values and not by their names: an argument may be called as LangChain's own are (config, callbacks,
        # run_manager).
        return (super()._parse_input(tool_input, tool_call_id), tool_call_id), {}

    async def _arun(self, arguments: dict[str, Any], tool_call_id: str | None) -> tuple[Any, dict[str, Any]]:
        if asyncio.get_running_loop() is self._loop:
            return self._told(await self._tools.call(self.name, arguments), tool_call_id)
        # The client's connections belong to its loop.
        calling = asyncio.run_coroutine_threadsafe(self._tools.call(self.name, arguments), self._loop)
        return self._told(await asyncio.wrap_future(calling), tool_call_id)

    def _run(self, arguments: dict[str, Any], tool_call_id: str | None) -> tuple[Any, dict[str, Any]]:
        self._check_thread()
        calling = asyncio.run_coroutine_threadsafe(self._tools.call(self.name, arguments), self._loop)
        try:
            return self._told(calling.result(), tool_call_id)
        except BaseException:
            # Ctrl-C while waiting: what runs in the sandbox is stopped.
            calling.cancel()
            raise

    def _check_thread(self) -> None:
        """Raises RuntimeError where waiting would last for ever."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise RuntimeError(
                f"{self.name}: invoke would wait for the loop that it runs in: use ainvoke, or invoke from another "
                "thread"
            )
        if not self._loop.is_running():
            raise RuntimeError(
                f"{self.name}: the event loop of its client has ended. Keep it running; docs/integrations.md shows how"
            )

    def _told(self, result: ToolResult, tool_call_id: str | None) -> tuple[Any, dict[str, Any]]:
        """Content and artifact, as LangChain takes them. Raises ToolException for a failure whose form the caller has
        chosen.
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
    """The tools of `session` for a LangChain model or a LangGraph ToolNode, good as long as it is open. To be awaited
    in the loop of `client`.

    `approver` None: the client's is asked about what needs approval. `timeout_s`: the limit of calls whose tool has
    none of its own. Raises ToolFailure(TOOL_NOT_FOUND) for a name that is none, SandboxUnavailable, BrokerUnavailable.
    """
    tools = await client.session_tools(session, names, approver=approver, timeout_s=timeout_s)
    loop = asyncio.get_running_loop()
    return [PoolTool.build(spec, tools, loop) for spec in tools.specs]
