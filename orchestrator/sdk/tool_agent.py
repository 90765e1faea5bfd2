"""Agents for programs that handle messages themselves. ToolAgent binds tools and asks the model; CustomAgent runs a
conversation to an answer.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ModelInterrupted
from toolcrew.orchestrator.dialects.base import CallRequested, MalformedCall, Text
from toolcrew.orchestrator.dialects.finish_reasons import classify_ending
from toolcrew.orchestrator.dialects.model import Message, Model, ModelRequest, TokenUsage
from toolcrew.orchestrator.dialects.native import NativeCallAssembler
from toolcrew.orchestrator.dialects.observations import NAMELESS_TOOL, build_wire_messages
from toolcrew.orchestrator.dialects.prompt_json import PromptJsonDialect
from toolcrew.orchestrator.dialects.reader import build_call_event, explain_unrun, read_usage
from toolcrew.orchestrator.dialects.reply_fields import MESSAGE_FIELDS, ORIGIN
from toolcrew.orchestrator.functions.function_tools import as_tool, convert_to_openai_tool
from toolcrew.orchestrator.loop.call_runner import CallRunner, Requested
from toolcrew.orchestrator.loop.chat_messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    build_tool_call,
    convert_to_wire,
)
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.sdk.local_tools import LocalTools
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

INTERRUPTIONS = 2
"""Limit of repeated requests after an interrupted reply. Repeating is safe, because no caller has seen a part of that
reply.
"""


@dataclass(frozen=True)
class LLMClient:
    """A model, and whether it supports native function calls. If not, the system prompt contains the schemas, and
    calls are parsed from the model's text.
    """

    model: Model
    function_calling: bool = True


class ToolAgent:
    """Asks a model that has tools bound to it. Each reply is one AIMessage. The agent runs no tools."""

    def __init__(self, llm: LLMClient | Model) -> None:
        self._llm = llm if isinstance(llm, LLMClient) else LLMClient(llm)
        self._fallback = None if self._llm.function_calling else PromptJsonDialect()
        self.tools: list[Any] = []
        self.schemas: list[dict[str, Any]] = []

    def bind_tools(self, tools: Sequence[Any]) -> "ToolAgent":
        """Bind these tools, and no others, to all later requests. Accepts everything that `convert_to_openai_tool`
        accepts. Return the agent.
        """
        self.schemas = [convert_to_openai_tool(tool) for tool in tools]
        self.tools = list(tools)
        return self

    async def invoke(self, messages: Sequence[ChatMessage | Message]) -> AIMessage:
        """Return the model's reply to those messages.

        Raises ValueError with tool name and raw text when native arguments are not JSON, ModelUnavailable.
        """
        return await self._generate(messages)

    async def _generate(self, messages: Sequence[ChatMessage | Message]) -> AIMessage:
        wire = [convert_to_wire(message) for message in messages]
        for _ in range(INTERRUPTIONS):
            try:
                return await self._request_reply(wire)
            except ModelInterrupted as error:
                log.warning("reply_interrupted", message=f"{error}; the reply is requested again")
        return await self._request_reply(wire)

    async def _request_reply(self, wire: list[Message]) -> AIMessage:
        return await (
            self._generate_native(wire) if self._fallback is None else self._generate_from_text(wire, self._fallback)
        )

    async def _generate_native(self, wire: list[Message]) -> AIMessage:
        assembler, usage = NativeCallAssembler(secrets.token_hex(4)), TokenUsage()
        async for chunk in self._llm.model.stream(ModelRequest(wire, self.schemas)):
            assembler.feed(chunk)
            usage = read_usage(chunk) or usage
        reply = assembler.finish()
        calls = [build_tool_call(call.id, call.name, call.arguments, call.fields) for call in reply.calls]
        return AIMessage(reply.text, calls, reply.finish_reason, usage, reply.fields)

    async def _generate_from_text(self, wire: list[Message], dialect: PromptJsonDialect) -> AIMessage:
        specs = [as_tool(tool).spec for tool in self.tools]
        has_system = bool(wire) and wire[0]["role"] == "system"
        instruction, messages = (str(wire[0].get("content") or ""), wire[1:]) if has_system else ("", wire)
        converted: list[Message] = [
            {"role": "system", "content": dialect.build_system(instruction, specs)},
            *_as_text(messages),
        ]
        reader = dialect.open_reader(secrets.token_hex(4), 1)
        async for chunk in self._llm.model.stream(dialect.build_request(converted, specs)):
            reader.feed(chunk)
        events, end = reader.finish()
        calls = [event.call for event in events if isinstance(event, CallRequested)]
        text = "".join(
            event.text if isinstance(event, Text) else "" if isinstance(event, CallRequested) else event.raw
            for event in events
        )
        fields = {name: end.message[name] for name in end.message if name == ORIGIN or name not in MESSAGE_FIELDS}
        tool_calls = [build_tool_call(call.id, call.name, call.arguments) for call in calls]
        return AIMessage(text, tool_calls, end.finish_reason, end.usage, fields)


class CustomAgent:
    """Runs a conversation with a ToolAgent to its answer. `tools`: the tools that it runs; None: the tools that are
    bound to the agent.

    `history` contains all messages of the conversation.
    """

    def __init__(
        self,
        agent: ToolAgent,
        tools: Sequence[Any] | LocalTools | None = None,
        *,
        instruction: str = "",
        max_iterations: int = 5,
    ) -> None:
        self._options = ReActOptions(max_iterations=max_iterations)
        self._agent = agent
        self._tools = tools if isinstance(tools, LocalTools) else LocalTools(tools or ())
        self._runs_bound_tools = tools is None
        if tools is not None and not agent.tools:
            agent.bind_tools([spec for spec in self._tools.specs()])
        self.history: list[ChatMessage] = [SystemMessage(instruction)] if instruction else []

    async def run(self, message: str) -> AIMessage:
        """Return the model's answer to `message`, after all tool calls. If the model still calls tools at the limit,
        return its last reply.

        Raises ValueError for native arguments that are not JSON, ModelUnavailable. The model gets an exception of a
        tool as its result.
        """
        bound = [self._tools.register(tool).name for tool in self._agent.tools] if self._runs_bound_tools else "all"
        runner = CallRunner(
            secrets.token_hex(8),
            self._tools.specs(bound),
            self._tools.run_call,
            lambda _: None,
            self._options.max_parallel_calls,
        )
        self.history.append(HumanMessage(message))
        for _ in range(self._options.max_iterations):
            reply = await self._agent._generate(self.history)
            observed = await runner.run(_requests(reply, len(self.history)))
            # Appended together: after a cancellation, a call without its result would make servers refuse every later
            # request.
            self.history += [reply, *(_tool_message(call_id, result) for call_id, result in observed)]
            if not reply.tool_calls:
                return reply
        log.warning(
            "max_iterations_reached",
            steps=self._options.max_iterations,
            message="the model still called tools; its last reply is returned",
        )
        return reply


def _requests(reply: AIMessage, step: int) -> list[Requested]:
    """Return the calls of a reply. The last call of a truncated reply may be incomplete, so it does not run."""
    calls = [
        _build_request(call, f"{step}-{number}-{secrets.token_hex(8)}") for number, call in enumerate(reply.tool_calls)
    ]
    reason = explain_unrun(classify_ending(reply.finish_reason), reply.finish_reason)
    if calls and reason is not None:
        last = reply.tool_calls[-1]
        calls[-1] = MalformedCall(f"{step}-cut-{secrets.token_hex(8)}", last["name"], reason, "", last["id"])
    return calls


def _build_request(call: dict[str, Any], call_id: str) -> Requested:
    return build_call_event(call_id, call["name"], call["arguments"], "", model_id=call["id"])


def _tool_message(call_id: str, result: ToolResult) -> ToolMessage:
    return ToolMessage(
        result.text(), call_id, result.name, "success" if result.success else "error", dict(result.metadata)
    )


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a model without native tool calls: its calls become decisions as text, and results become
    messages of the user.
    """
    plain: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        calls = [(entry["id"], entry["function"]) for entry in message.get("tool_calls") or ()]
        names |= {call_id: function["name"] for call_id, function in calls}
        if message["role"] == "tool":
            plain.append({"name": names.get(message.get("tool_call_id", ""), NAMELESS_TOOL), **message})
            continue
        converted = {key: value for key, value in message.items() if key != "tool_calls"} | {
            "content": message.get("content") or ""
        }
        if calls:
            decisions = "\n".join(_decision_text(function) for _, function in calls)
            converted["content"] = f"{converted['content']}{decisions}"
        plain.append(converted)
    return build_wire_messages(plain)


def _decision_text(function: Mapping[str, Any]) -> str:
    return f'{{"tool": {json.dumps(function["name"])}, "arguments": {function.get("arguments") or "{}"}}}'
