"""The parts of a request that a script uses: the conversation, its progress, and the result of the last call."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["native", "tags", "json"]
_RESULT_HEADS = ("Tool result for ", "[Tool result for ")


class BadRequest(ValueError):
    """A body that is not a chat request. The message is sent to the client."""


@dataclass(frozen=True)
class ChatRequest:
    """A parsed request.

    `step`: the number of replies in the conversation so far. `observation`: the result of the last call; None right
    after a message of the user. `digest`: of the observation's bytes. `probe`: the capability that the client tests,
    else None.
    """

    conversation: str
    step: int
    user: str
    observation: str | None
    dialect: Dialect
    is_stream: bool
    wants_usage: bool
    model: str
    prompt_tokens: int
    digest: bytes
    probe: Literal["tool", "schema"] | None = None


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the parsed body. Raises BadRequest."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON: send a chat completion request") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("the body has no messages: send a chat completion request with at least one")
    if not all(isinstance(message, dict) for message in body["messages"]):
        raise BadRequest("a message is not an object: send messages as {role, content}")
    return body


def read_chat_request(body: Mapping[str, Any], raw: bytes, key: "re.Pattern[str]") -> ChatRequest:
    """Return the parsed request. `body`: the result of `read_body` for `raw`."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    user = next((text_of(message) for message in messages if message.get("role") == "user"), "")
    found = key.search(user)
    options = body.get("stream_options")
    return ChatRequest(
        conversation=found.group(1)
        if found and found.group(1)
        else hashlib.sha256(user.encode(errors="replace")).hexdigest()[:16],
        step=sum(message.get("role") == "assistant" for message in messages),
        user=user,
        observation=_observation(messages[-1]),
        dialect=_dialect(body),
        is_stream=body.get("stream") is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=str(body.get("model") or "played"),
        prompt_tokens=max(1, len(raw) // 4),
        digest=hashlib.blake2b(raw, digest_size=16).digest(),
        probe=_probe(body),
    )


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, also if the text consists of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _observation(last: Mapping[str, Any]) -> str | None:
    """Return the result of the last call. A message with several results has a head before each result; the last
    result is returned.
    """
    text = text_of(last)
    if last.get("role") == "tool":
        return text
    if last.get("role") != "user" or not text.startswith(_RESULT_HEADS):
        return None
    at = max(text.rfind(f"\n\n{head}") for head in _RESULT_HEADS)
    return text[at + 2 if at >= 0 else 0 :].partition("\n")[2]


def _dialect(body: Mapping[str, Any]) -> Dialect:
    """Return the dialect of a request. A request with tools uses native calls; otherwise the system prompt specifies
    the format of calls.
    """
    if body.get("tools"):
        return "native"
    first = body["messages"][0]
    system = text_of(first) if first.get("role") == "system" else ""
    if "<tool_action" in system:
        return "tags"
    return "json" if '{"tool": null' in system else "native"


def _probe(body: Mapping[str, Any]) -> Literal["tool", "schema"] | None:
    """Return the capability that a client tests, or None. Such a client requests a call of a tool named echo, or an
    answer with a schema of that name.
    """
    tools = body.get("tools")
    if isinstance(tools, list) and len(tools) == 1 and isinstance(tools[0], dict):
        function = tools[0].get("function")
        if isinstance(function, dict) and function.get("name") == "echo":
            return "tool"
    form = body.get("response_format")
    schema = form.get("json_schema") if isinstance(form, dict) else None
    return "schema" if isinstance(schema, dict) and schema.get("name") == "echo" else None
