"""Tool loop of one session with JSON decisions: `run_tool_loop`, and its parts, each of which can be replaced."""

import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.functions.call_context import CallHandler
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.run_events import OnEvent
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.decisions import TOOL_DECISION_SCHEMA, ToolDecisionOutput, parse_tool_decision
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect, build_tool_system_prompt
from toolcrew.orchestrator.dialects.model import Chunk, Message, Model, ModelRequest
from toolcrew.orchestrator.dialects.reply_fields import MESSAGE_FIELDS
from toolcrew.orchestrator.functions.function_tools import LocalTool
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.loop.transcript import Transcript
from toolcrew.orchestrator.sdk.local_tools import FITTING_ID, BoundTools, LocalTools

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
"""Function that asks a model, plain or async. It takes messages and returns the raw content of the reply, as a string
or as a message with `content`.
"""


class OutputController(Protocol):
    """Parses the model's output. `parse` raises ValueError with a message for the model."""

    def parse(self, raw: str) -> ToolDecisionOutput: ...


class _DecisionController:
    def parse(self, raw: str) -> ToolDecisionOutput:
        return parse_tool_decision(raw)


@dataclass
class ContextEngine:
    """Stores the messages of each session in memory."""

    instruction: str = ""
    sessions: dict[str, list[Message]] = field(default_factory=dict)

    def messages(self, session_id: str) -> list[Message]:
        """Return the messages of the session so far, without a system prompt."""
        return list(self.sessions.get(session_id, ()))

    def append(self, session_id: str, messages: Sequence[Message]) -> None:
        """Add messages to the session."""
        self.sessions.setdefault(session_id, []).extend(messages)


class ToolLoopRegistry(LocalTools):
    """LocalTools with the methods for programs that call tools themselves: get, list, execute."""

    def get(self, name: str) -> LocalTool | None:
        """Return the tool of that name, or None."""
        return self.registry.get(name)

    def list(self) -> list[ToolSpec]:
        """Return the specifications of the tools. `convert_to_openai_tool` converts each one to an entry of an API's
        `tools`.
        """
        return self.specs()

    async def execute(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run the tool of that name and return its result, like `execute_tool_call`."""
        return await self.run_call(ToolCall(id=secrets.token_urlsafe(12), name=name, arguments=dict(arguments)))


@dataclass
class ToolLoopDeps:
    """Parts of the loop. `chat`: a function of the messages, or a Model. A ToolRegistry is wrapped in LocalTools."""

    chat: Chat | Model
    tool_registry: LocalTools | ToolRegistry[CallHandler]
    context_engine: ContextEngine = field(default_factory=ContextEngine)
    output_controller: OutputController = field(default_factory=_DecisionController)


@dataclass(frozen=True)
class ToolLoopResult:
    """Result of `run_tool_loop`. `reply`: the answer, or the raw text of the last reply when the rounds are used up."""

    reply: str
    rounds: int
    stop_reason: StopReason
    transcript: Transcript


def create_tool_registry(tools: Sequence[Any] = (), **options: Any) -> ToolLoopRegistry:
    """Create a registry that lists, finds and executes tools. `options`: the options of LocalTools."""
    return ToolLoopRegistry(tools, **options)


def create_output_controller() -> OutputController:
    """Create the strict parser of decisions."""
    return _DecisionController()


async def execute_tool_call(registry: LocalTools, call: ToolCall) -> ToolResult:
    """Return the result of one call. A tool that fails or does not exist gives a result, too."""
    return await registry.run_call(call)


async def run_tool_loop(
    deps: ToolLoopDeps | Mapping[str, Any],
    session_id: str,
    message: str,
    max_tool_rounds: int = 5,
    *,
    on_event: OnEvent = lambda _: None,
) -> ToolLoopResult:
    """Answer `message` in that session. The model decides, a tool runs, and its result is added as `[Tool result for
    NAME]`, until the model replies. Tools see the session's own state.

    `deps` may be a mapping with the same names. Raises ValueError for a round limit below 1, ModelUnavailable, and
    the exceptions of `chat`.
    """
    parts = deps if isinstance(deps, ToolLoopDeps) else ToolLoopDeps(**deps)
    context, tools = parts.context_engine, parts.tool_registry
    registry = tools if isinstance(tools, LocalTools) else LocalTools(tools)
    agent = Agent(
        _as_model(parts.chat),
        JsonDecisionDialect(parse=parts.output_controller.parse),
        registry.specs(),
        _bind_session(registry, session_id).run_call,
        instruction=context.instruction,
        options=ReActOptions(max_iterations=max_tool_rounds),
        on_event=on_event,
    )
    history = context.messages(session_id)
    result = await agent.run(message, history=history)
    new_messages = result.transcript.messages()[1 + len(history) :]
    context.append(session_id, new_messages)
    is_answer = result.answer or result.stop_reason is StopReason.EMPTY_REPLY
    last = next((message["content"] for message in reversed(new_messages) if message["role"] == "assistant"), "")
    return ToolLoopResult(
        result.answer if is_answer else last or "", result.steps, result.stop_reason, result.transcript
    )


def _bind_session(registry: LocalTools, session_id: str) -> BoundTools:
    """Return the tools for a session. The session id may be any text, but a call is sent only with a valid
    identifier.
    """
    return registry.for_run(
        session=session_id if FITTING_ID.fullmatch(session_id) else None, state=registry.state_of(session_id)
    )


def _as_model(chat: Chat | Model) -> Model:
    return cast(Model, chat) if hasattr(chat, "stream") else _ChatModel(chat)


class _ChatModel:
    """Presents a chat function as a Model. The reply is one chunk."""

    name = "chat"

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        content = self._chat(request.messages)
        content = await content if inspect.isawaitable(content) else content
        delta = {**_read_fields(content), "content": _read_content(content)}
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}

    async def aclose(self) -> None:
        """Do nothing: a chat function has no resources."""


def _read_fields(reply: Any) -> dict[str, Any]:
    """Return the other fields of a reply, such as its reasoning: of a mapping, or of a message object of OpenAI's SDK
    (`model_extra`) or LangChain (`additional_kwargs`).
    """
    objects = (getattr(reply, "model_extra", None), getattr(reply, "additional_kwargs", None))
    sources = [reply] if isinstance(reply, Mapping) else [fields for fields in objects if isinstance(fields, Mapping)]
    return {name: value for fields in sources for name, value in fields.items() if name not in MESSAGE_FIELDS}


def _read_content(reply: Any) -> str:
    content = reply.get("content") if isinstance(reply, Mapping) else getattr(reply, "content", reply)
    if not isinstance(content, str):
        raise TypeError(
            f"chat returned a {type(reply).__name__}: return the reply's content as a string, or a message with "
            f"`content`"
        )
    return content
