"""The tool loop of one session by JSON decisions: `run_tool_loop`, and the parts that it is made of, each
replaceable.
"""

import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from contract.calls import ToolCall, ToolResult
from contract.functions.call_context import CallHandler
from contract.registry import ToolRegistry
from contract.run_events import OnEvent
from contract.specs import ToolSpec
from orchestrator.dialects.decisions import TOOL_DECISION_SCHEMA, ToolDecisionOutput, parse_tool_decision
from orchestrator.dialects.json_decision import JsonDecisionDialect, build_tool_system_prompt
from orchestrator.dialects.model import Chunk, Message, Model, ModelRequest
from orchestrator.functions.function_tools import LocalTool
from orchestrator.loop.agent import Agent
from orchestrator.loop.limits import ReActOptions, StopReason
from orchestrator.loop.transcript import Transcript
from orchestrator.sdk.local_tools import FITTING_ID, BoundTools, LocalTools

__all__ = [
    "TOOL_DECISION_SCHEMA",
    "ContextEngine",
    "OutputController",
    "ToolDecisionOutput",
    "ToolLoopDeps",
    "ToolLoopRegistry",
    "ToolLoopResult",
    "build_tool_system_prompt",
    "create_output_controller",
    "create_tool_registry",
    "execute_tool_call",
    "parse_tool_decision",
    "run_tool_loop",
]


Chat = Callable[[list[Message]], Any]
"""A gateway, plain or async: messages in, the raw content of the reply out, as a string or as a message that has it as
`content`.
"""


class OutputController(Protocol):
    """Reads what the model wrote. `parse` raises ValueError with a sentence for the model."""

    def parse(self, raw: str) -> ToolDecisionOutput: ...


class _DecisionController:
    def parse(self, raw: str) -> ToolDecisionOutput:
        return parse_tool_decision(raw)


@dataclass
class ContextEngine:
    """The messages of each session, in memory."""

    instruction: str = ""
    sessions: dict[str, list[Message]] = field(default_factory=dict)

    def messages(self, session_id: str) -> list[Message]:
        """Those of the session so far, without a system prompt."""
        return list(self.sessions.get(session_id, ()))

    def append(self, session_id: str, messages: Sequence[Message]) -> None:
        """Add messages to the session."""
        self.sessions.setdefault(session_id, []).extend(messages)


class ToolLoopRegistry(LocalTools):
    """LocalTools by the names that a program calls them by itself: get, list, execute."""

    def get(self, name: str) -> LocalTool | None:
        """The tool of that name, or None."""
        return self.registry.get(name)

    def list(self) -> list[ToolSpec]:
        """What a prompt describes; each through `convert_to_openai_tool` what an API's `tools` takes."""
        return self.specs()

    async def execute(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The result of the tool of that name, as `execute_tool_call` gives it."""
        return await self.run_call(ToolCall(id=secrets.token_urlsafe(12), name=name, arguments=dict(arguments)))


@dataclass
class ToolLoopDeps:
    """What the loop is made of. `chat`: a function of the messages, or a Model. A ToolRegistry becomes LocalTools over
    it.
    """

    chat: Chat | Model
    tool_registry: LocalTools | ToolRegistry[CallHandler]
    context_engine: ContextEngine = field(default_factory=ContextEngine)
    output_controller: OutputController = field(default_factory=_DecisionController)


@dataclass(frozen=True)
class ToolLoopResult:
    """`reply`: the answer, or the last reply as the model wrote it when the rounds were used up."""

    reply: str
    rounds: int
    stop_reason: StopReason
    transcript: Transcript


def create_tool_registry(tools: Sequence[Any] = (), **options: Any) -> ToolLoopRegistry:
    """A registry that lists tools, finds them by name and executes them; `options` are those of LocalTools."""
    return ToolLoopRegistry(tools, **options)


def create_output_controller() -> OutputController:
    """The strict reader of decisions."""
    return _DecisionController()


async def execute_tool_call(registry: LocalTools, call: ToolCall) -> ToolResult:
    """The result of one call; a tool that fails or is not there is a result, too."""
    return await registry.run_call(call)


async def run_tool_loop(
    deps: ToolLoopDeps | Mapping[str, Any],
    session_id: str,
    message: str,
    max_tool_rounds: int = 5,
    *,
    on_event: OnEvent = lambda _: None,
) -> ToolLoopResult:
    """Answer `message` in that session: decide, execute, inject the result as `[Tool result for NAME]`, until the model
    replies. Tools see the session's own state.

    `deps` may be a mapping with the same names. Raises ValueError for a round limit below 1, ModelUnavailable, and what
    `chat` raises.
    """
    parts = deps if isinstance(deps, ToolLoopDeps) else ToolLoopDeps(**deps)
    context, tools = parts.context_engine, parts.tool_registry
    registry = tools if isinstance(tools, LocalTools) else LocalTools(tools)
    agent = Agent(
        _as_model(parts.chat),
        JsonDecisionDialect(parse=parts.output_controller.parse),
        registry.specs(),
        _for_session(registry, session_id).run_call,
        instruction=context.instruction,
        options=ReActOptions(max_iterations=max_tool_rounds),
        on_event=on_event,
    )
    history = context.messages(session_id)
    result = await agent.run(message, history=history)
    told = result.transcript.messages()[1 + len(history) :]
    context.append(session_id, told)
    is_answer = result.answer or result.stop_reason is StopReason.EMPTY_REPLY
    last = next((message["content"] for message in reversed(told) if message["role"] == "assistant"), "")
    return ToolLoopResult(
        result.answer if is_answer else last or "", result.steps, result.stop_reason, result.transcript
    )


def _for_session(registry: LocalTools, session_id: str) -> BoundTools:
    """Any text is a session here; only some is a name that travels with a call."""
    return registry.for_run(
        session=session_id if FITTING_ID.fullmatch(session_id) else None, state=registry.state_of(session_id)
    )


def _as_model(chat: Chat | Model) -> Model:
    return cast(Model, chat) if hasattr(chat, "stream") else _ChatModel(chat)


class _ChatModel:
    """A chat function as a Model: its reply is one chunk."""

    name = "chat"

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        content = self._chat(request.messages)
        told = await content if inspect.isawaitable(content) else content
        yield {"choices": [{"index": 0, "delta": {"content": _content_of(told)}, "finish_reason": "stop"}]}

    async def aclose(self) -> None:
        """Nothing to close."""


def _content_of(reply: Any) -> str:
    content = reply.get("content") if isinstance(reply, Mapping) else getattr(reply, "content", reply)
    if not isinstance(content, str):
        raise TypeError(
            f"chat must give the reply's content as a string, or a message with it, not {type(reply).__name__}"
        )
    return content
