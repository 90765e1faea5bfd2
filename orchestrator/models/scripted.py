"""A model that says what a script tells it: for tests and for a demo without a model."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ModelUnavailable
from orchestrator.dialects.model import Chunk, Message, ModelRequest
from orchestrator.dialects.tag_values import build_tag_call
from orchestrator.models.capabilities import Capabilities

CHUNK_CHARS = 7
EVERYTHING = Capabilities(native_tools=True, parallel=True, strict=True, tool_choice=True, json_schema=True)
"""Nobody reads the fields that are sent to a script."""


@dataclass(frozen=True)
class Calls:
    """A reply with native calls, (tool, arguments) each, after some text. Arguments given as a string are sent as they
    are.
    """

    calls: Sequence[tuple[str, dict[str, Any] | str]]
    text: str = ""


@dataclass(frozen=True)
class Raw:
    """A reply of chunks as they stand, for the quirks of servers."""

    chunks: Sequence[Chunk]


Reply = str | Calls | Raw
Turn = Reply | Callable[[list[Message]], Reply]
"""What the model answers: a reply, or a function that makes one of the request's messages."""


@dataclass
class ScriptedModel:
    """Answers request after request with `turns`, in small chunks; one function instead of a list answers every
    request.

    `requests` keeps what it was asked. Raises ModelUnavailable when the script has no turn left.
    """

    turns: Sequence[Turn] | Callable[[list[Message]], Reply]
    name: str = "scripted"
    chunk_chars: int = CHUNK_CHARS
    requests: list[ModelRequest] = field(default_factory=list)
    capabilities: Capabilities = EVERYTHING

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        # A snapshot: the loop goes on appending to its messages.
        self.requests.append(ModelRequest(list(request.messages), list(request.tools), dict(request.extra)))
        reply = self._reply(len(self.requests) - 1, request.messages)
        for chunk in _chunks(reply, self.chunk_chars, f"call{len(self.requests)}"):
            yield chunk

    async def aclose(self) -> None:
        """Nothing to release."""

    def _reply(self, number: int, messages: list[Message]) -> Reply:
        if callable(self.turns):
            return self.turns(messages)
        if number >= len(self.turns):
            raise ModelUnavailable(
                f"the script has {len(self.turns)} turns and was asked for number {number + 1}: write a longer one"
            )
        turn = self.turns[number]
        return turn(messages) if callable(turn) else turn


def demo_script() -> Callable[[list[Message]], Reply]:
    """Turns that do the three demo jobs: ask for the command that a request needs, then answer with what it printed.

    Looks at the system prompt (for the dialect) and the last message only, so it serves any number of runs at once.
    """

    def reply(messages: list[Message]) -> Reply:
        last, system = messages[-1], str(messages[0].get("content") or "")
        content = str(last.get("content") or "")
        decides = '{"tool": null' in system
        if last.get("role") == "tool" or content.startswith(("Tool result", "[Tool result")):
            return _said(_demo_answer(content), decides)
        command = next((command for path, command in DEMO_COMMANDS.items() if path in content), None)
        if command is None:
            return _said(f"I only know the demo jobs; they are about {', '.join(DEMO_COMMANDS)}.", decides)
        if decides:
            return json.dumps({"tool": "bash_tool", "arguments": {"command": command}})
        if "<tool_action" in system:
            return build_tag_call("bash_tool", {"command": command})
        return Calls([("bash_tool", {"command": command})])

    return reply


def _said(text: str, decides: bool) -> str:
    return json.dumps({"tool": None, "reply": text}) if decides else text


DEMO_COMMANDS = {
    "/workspace/data.csv": "wc -l /workspace/data.csv",
    "/workspace/notes.txt": "sha256sum /workspace/notes.txt",
    "/workspace/numbers.txt": "awk '{sum += $1} END {print sum}' /workspace/numbers.txt",
}
"""File that a demo request names -> the command that answers it."""


def _demo_answer(observation: str) -> str:
    head, _, rest = observation.partition("\n")
    output = (rest if head.startswith(("Tool result", "[Tool result")) else observation).strip()
    return f"The tool failed. {output}" if output.startswith("Error [") else f"The tool says: {output}"


def _chunks(reply: Reply, size: int, call_id: str) -> Iterator[Chunk]:
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
