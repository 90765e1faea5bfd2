"""A model that replies from a script, for tests and for a demo without a model."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolcrew.contract.errors import ModelUnavailable
from toolcrew.orchestrator.dialects.model import Chunk, Message, ModelRequest
from toolcrew.orchestrator.dialects.tag_values import build_tag_call
from toolcrew.orchestrator.models.capabilities import Capabilities

CHUNK_CHARS = 7
ALL_CAPABILITIES = Capabilities(native_tools=True, parallel=True, strict=True, tool_choice=True, json_schema=True)
"""The capabilities of a scripted model. A script ignores the fields of requests, so it supports all of them."""


@dataclass(frozen=True)
class Calls:
    """A reply with text and then native calls, each as (tool, arguments). Arguments given as a string are sent
    unchanged.
    """

    calls: Sequence[tuple[str, dict[str, Any] | str]]
    text: str = ""


@dataclass(frozen=True)
class Raw:
    """A reply that consists of these chunks, unchanged. Tests use it to imitate servers that deviate from OpenAI's
    format.
    """

    chunks: Sequence[Chunk]


Reply = str | Calls | Raw
Turn = Reply | Callable[[list[Message]], Reply]
"""A scripted reply, or a function that makes one from the request's messages."""


@dataclass
class ScriptedModel:
    """Answers the first request with the first of `turns`, the next one with the next, in small chunks. If `turns` is a
    function, it answers every request.

    `requests` records all requests. Raises ModelUnavailable when no turn is left.
    """

    turns: Sequence[Turn] | Callable[[list[Message]], Reply]
    name: str = "scripted"
    chunk_chars: int = CHUNK_CHARS
    requests: list[ModelRequest] = field(default_factory=list)
    capabilities: Capabilities = ALL_CAPABILITIES

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        # Copied, because the loop continues to append to its messages.
        self.requests.append(ModelRequest(list(request.messages), list(request.tools), dict(request.extra)))
        reply = self._choose_reply(len(self.requests) - 1, request.messages)
        for chunk in _split_reply(reply, self.chunk_chars, f"call{len(self.requests)}"):
            yield chunk

    async def aclose(self) -> None:
        """Do nothing: the model has no resources."""

    def _choose_reply(self, number: int, messages: list[Message]) -> Reply:
        if callable(self.turns):
            return self.turns(messages)
        if number >= len(self.turns):
            raise ModelUnavailable(
                f"the script has {len(self.turns)} turns, and turn {number + 1} was requested. Add turns to the script."
            )
        turn = self.turns[number]
        return turn(messages) if callable(turn) else turn


def demo_script() -> Callable[[list[Message]], Reply]:
    """Return a function that does the three demo jobs: it calls the needed command, then answers with its output.

    The function reads only the system prompt (for the dialect) and the last message, so it serves any number of
    concurrent runs.
    """

    def reply(messages: list[Message]) -> Reply:
        last, system = messages[-1], str(messages[0].get("content") or "")
        content = str(last.get("content") or "")
        uses_json = '{"tool": null' in system
        if last.get("role") == "tool" or content.startswith(("Tool result", "[Tool result")):
            return _encode_answer(_demo_answer(content), uses_json)
        command = next((command for path, command in DEMO_COMMANDS.items() if path in content), None)
        if command is None:
            return _encode_answer(f"I only know the demo jobs; they are about {', '.join(DEMO_COMMANDS)}.", uses_json)
        if uses_json:
            return json.dumps({"tool": "bash_tool", "arguments": {"command": command}})
        if "<tool_action" in system:
            return build_tag_call("bash_tool", {"command": command})
        return Calls([("bash_tool", {"command": command})])

    return reply


def _encode_answer(text: str, uses_json: bool) -> str:
    return json.dumps({"tool": None, "reply": text}) if uses_json else text


DEMO_COMMANDS = {
    "/workspace/data.csv": "wc -l /workspace/data.csv",
    "/workspace/notes.txt": "sha256sum /workspace/notes.txt",
    "/workspace/numbers.txt": "awk '{sum += $1} END {print sum}' /workspace/numbers.txt",
}
"""File named in a demo request -> the command that answers the request."""


def _demo_answer(observation: str) -> str:
    head, _, rest = observation.partition("\n")
    output = (rest if head.startswith(("Tool result", "[Tool result")) else observation).strip()
    return f"The tool failed. {output}" if output.startswith("Error [") else f"The tool says: {output}"


def _split_reply(reply: Reply, size: int, call_id: str) -> Iterator[Chunk]:
    if isinstance(reply, Raw):
        yield from reply.chunks
        return
    text, calls = (reply, []) if isinstance(reply, str) else (reply.text, list(reply.calls))
    for start in range(0, len(text), size):
        yield _chunk({"content": text[start : start + size]})
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": ""}
        yield _chunk(
            {"tool_calls": [{"index": index, "id": f"{call_id}n{index}", "type": "function", "function": function}]}
        )
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        for start in range(0, len(raw), size):
            yield _chunk({"tool_calls": [{"index": index, "function": {"arguments": raw[start : start + size]}}]})
    yield _chunk({}, "tool_calls" if calls else "stop")
    usage = {"prompt_tokens": 1, "completion_tokens": len(text), "total_tokens": len(text) + 1}
    yield {"object": "chat.completion.chunk", "choices": [], "usage": usage}


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> Chunk:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }
