"""Agents for programs that are written in messages: one binds tools and asks the model, the other carries the
conversation to an answer.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.calls import ToolResult
from contract.errors import ModelInterrupted
from orchestrator.dialects.base import CallRequested, MalformedCall, Text
from orchestrator.dialects.model import Message, Model, ModelRequest, Usage
from orchestrator.dialects.native import NativeCallAssembler
from orchestrator.dialects.observations import NAMELESS_TOOL, build_wire_messages
from orchestrator.dialects.prompt_json import PromptJsonDialect
from orchestrator.dialects.reader import CUT, build_call_event, read_usage
from orchestrator.functions.function_tools import as_tool, convert_to_openai_tool
from orchestrator.loop.call_runner import CallRunner, Requested
from orchestrator.loop.chat_messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    build_tool_call,
    convert_to_wire,
)
from orchestrator.loop.limits import ReActOptions
from orchestrator.sdk.local_tools import LocalTools
from telemetry.logs import get_logger

log = get_logger(__name__)

INTERRUPTIONS = 2
"""How often a reply that broke off is asked for again: nobody has seen a part of it."""


@dataclass(frozen=True)
class LLMClient:
    """A model, and whether it calls functions natively. False: schemas go into the system prompt and calls are read
    from its text.
    """

    model: Model
    function_calling: bool = True


class ToolAgent:
    """Asks a model that has tools bound to it. Each reply is one AIMessage; nothing is run here."""

    def __init__(self, llm: LLMClient | Model) -> None:
        self._llm = llm if isinstance(llm, LLMClient) else LLMClient(llm)
        self._fallback = None if self._llm.function_calling else PromptJsonDialect()
        self.tools: list[Any] = []
        self.schemas: list[dict[str, Any]] = []

    def bind_tools(self, tools: Sequence[Any]) -> "ToolAgent":
        """These tools, and no others, go with every request from now on; anything that `convert_to_openai_tool` takes.
        Gives itself.
        """
        self.schemas = [convert_to_openai_tool(tool) for tool in tools]
        self.tools = list(tools)
        return self

    async def invoke(self, messages: Sequence[ChatMessage | Message]) -> AIMessage:
        """The model's reply to those messages.

        Raises ValueError with tool name and raw text when native arguments are not JSON, ModelUnavailable.
        """
        return await self._generate(messages)

    async def _generate(self, messages: Sequence[ChatMessage | Message]) -> AIMessage:
        wire = [convert_to_wire(message) for message in messages]
        for _ in range(INTERRUPTIONS):
            try:
                return await self._ask(wire)
            except ModelInterrupted as error:
                log.warning("reply_interrupted", message=f"{error}; the reply is asked for again")
        return await self._ask(wire)

    async def _ask(self, wire: list[Message]) -> AIMessage:
        return await (
            self._generate_native(wire) if self._fallback is None else self._generate_from_text(wire, self._fallback)
        )

    async def _generate_native(self, wire: list[Message]) -> AIMessage:
        assembler, usage = NativeCallAssembler(secrets.token_hex(4)), Usage()
        async for chunk in self._llm.model.stream(ModelRequest(wire, self.schemas)):
            assembler.feed(chunk)
            usage = read_usage(chunk) or usage
        reply = assembler.finish()
        calls = [build_tool_call(call.id, call.name, call.arguments) for call in reply.calls]
        return AIMessage(reply.text, calls, reply.finish_reason, usage)

    async def _generate_from_text(self, wire: list[Message], dialect: PromptJsonDialect) -> AIMessage:
        specs = [as_tool(tool).spec for tool in self.tools]
        has_system = bool(wire) and wire[0]["role"] == "system"
        instruction, rest = (str(wire[0].get("content") or ""), wire[1:]) if has_system else ("", wire)
        told: list[Message] = [{"role": "system", "content": dialect.build_system(instruction, specs)}, *_as_text(rest)]
        reader = dialect.open_reader(secrets.token_hex(4), 1)
        async for chunk in self._llm.model.stream(dialect.build_request(told, specs)):
            reader.feed(chunk)
        events, end = reader.finish()
        asked = [event.call for event in events if isinstance(event, CallRequested)]
        text = "".join(
            event.text if isinstance(event, Text) else "" if isinstance(event, CallRequested) else event.raw
            for event in events
        )
        return AIMessage(
            text, [build_tool_call(call.id, call.name, call.arguments) for call in asked], end.finish_reason, end.usage
        )


class CustomAgent:
    """Carries a conversation with a ToolAgent to its answer. `tools`: what it runs; None: those that are bound to the
    agent.

    `history` is all of it, as messages.
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
        """The model's answer to `message`, after it has called what tools it wants; its last reply when it calls on and
        on.

        Raises ValueError for native arguments that are not JSON, ModelUnavailable; what a tool raises is told to the
        model.
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
            # Together: a call without its result, when this is cancelled, would make every later request one that
            # servers refuse.
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
    """The calls of a reply. The last one of a reply that was cut may lack what its model meant to write: it is not
    run.
    """
    asked = [_requested(call, f"{step}-{at}-{secrets.token_hex(8)}") for at, call in enumerate(reply.tool_calls)]
    if asked and reply.finish_reason == "length":
        last = reply.tool_calls[-1]
        asked[-1] = MalformedCall(f"{step}-cut-{secrets.token_hex(8)}", last["name"], CUT, "", last["id"])
    return asked


def _requested(call: dict[str, Any], call_id: str) -> Requested:
    return build_call_event(call_id, call["name"], call["arguments"], "", model_id=call["id"])


def _tool_message(call_id: str, result: ToolResult) -> ToolMessage:
    return ToolMessage(
        result.text(), call_id, result.name, "success" if result.success else "error", dict(result.metadata)
    )


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Messages for a model that knows of no tool calls: those that it made become decisions again, results the
    user's.
    """
    plain: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        calls = [(entry["id"], entry["function"]) for entry in message.get("tool_calls") or ()]
        names |= {call_id: function["name"] for call_id, function in calls}
        if message["role"] == "tool":
            plain.append({"name": names.get(message.get("tool_call_id", ""), NAMELESS_TOOL), **message})
            continue
        told = {key: value for key, value in message.items() if key != "tool_calls"} | {
            "content": message.get("content") or ""
        }
        if calls:
            decisions = "\n".join(_decision_text(function) for _, function in calls)
            told["content"] = f"{told['content']}{decisions}"
        plain.append(told)
    return build_wire_messages(plain)


def _decision_text(function: Mapping[str, Any]) -> str:
    return f'{{"tool": {json.dumps(function["name"])}, "arguments": {function.get("arguments") or "{}"}}}'
