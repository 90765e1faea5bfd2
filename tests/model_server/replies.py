"""Replies of a script in the format of a server: the events of a stream, or one chat completion."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.model_server.chat_request import ChatRequest
from tests.model_server.script import Call, Reply
from tests.model_server.templates import TemplateError, fill
from toolcrew.orchestrator.dialects.tag_values import build_tag_call

CREATED = 1_700_000_000
"""The creation time of every reply. A fixed time keeps a script's replies identical."""
DONE = b"data: [DONE]\n\n"
# Created once, because json.dumps creates an encoder for each call with non-default separators.
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dump(value: Any) -> bytes:
    try:
        return _ENCODE(value).encode()
    except UnicodeEncodeError:
        # A lone surrogate, which a request may contain as an escape. The reply contains the same escape.
        return json.dumps(value).encode()


def event(chunk: Any) -> bytes:
    """Return one event of a stream. A text is sent unchanged."""
    return b"data: " + (chunk.encode(errors="surrogatepass") if isinstance(chunk, str) else dump(chunk)) + b"\n\n"


def build_error(message: str, code: str) -> bytes:
    return dump({"error": {"message": message, "type": code, "code": code}})


class Written:
    """A reply with every placeholder filled, in the format that the request needs. Raises TemplateError if a
    placeholder cannot be filled.
    """

    def __init__(self, reply: Reply, chat: ChatRequest, values: Mapping[str, str]) -> None:
        self._chat = chat
        self._reply = reply
        self._text = str(fill(reply.text, values))
        self._calls = [(str(fill(call.name, values)), _arguments(call, values)) for call in reply.calls]
        self._chunks: Sequence[Any] | None = fill(list(reply.chunks), values) if reply.chunks is not None else None
        self._whole = fill(reply.whole, values)
        spelling = chat.dialect if reply.spelling == "auto" else reply.spelling
        if reply.chunks is None and spelling != "native":
            self._spell(spelling)
        digest = hashlib.blake2b(
            f"{chat.conversation}\0{chat.step}".encode(errors="replace"), digest_size=6
        ).hexdigest()
        self._head = {"id": f"chatcmpl-{digest}", "created": CREATED, "model": chat.model}
        self._call_id = f"call_{digest}"

    def _spell(self, spelling: str) -> None:
        """Write calls as text in this spelling."""
        if spelling == "tags":
            tags = [
                build_tag_call(name, {key: _as_text(value) for key, value in _as_record(given).items()})
                for name, given in self._calls
            ]
            self._text = "\n".join(part for part in [self._text, *tags] if part)
        elif len(self._calls) > 1:
            raise TemplateError("the request's dialect has room for one call a reply: give the others in later steps")
        elif self._calls:
            name, arguments = self._calls[0]
            self._text = json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False)
        else:
            self._text = json.dumps({"tool": None, "reply": self._text}, ensure_ascii=False)
        self._calls = []

    def events(self, chunk_chars: int, *, has_end: bool = True) -> list[bytes]:
        """Return the events of the reply's stream. `has_end`: False leaves out everything that marks the end. Chunks
        from the script are unchanged.
        """
        if self._chunks is not None:
            return [event(chunk) for chunk in self._chunks]
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": None if self._calls and not self._text else ""}
        ]
        deltas += [{"content": self._text[at : at + chunk_chars]} for at in range(0, len(self._text), chunk_chars)]
        for place, (name, given) in enumerate(self._calls):
            raw = _as_text(given)
            function = {"name": name, "arguments": ""}
            deltas.append(
                {
                    "tool_calls": [
                        {"index": place, "id": f"{self._call_id}_{place}", "type": "function", "function": function}
                    ]
                }
            )
            pieces = [raw[at : at + chunk_chars] for at in range(0, len(raw), chunk_chars)]
            deltas += [{"tool_calls": [{"index": place, "function": {"arguments": piece}}]} for piece in pieces]
        events = [self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
        if not has_end:
            return events
        events.append(self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": self._finish_reason()}]}))
        if self._chat.wants_usage:
            events.append(self._event({"choices": [], "usage": self._usage()}))
        return [*events, DONE]

    def whole(self) -> bytes:
        """Return the reply as one chat completion. Raises TemplateError for chunks without a `whole`."""
        if self._chunks is not None:
            if self._whole is None:
                raise TemplateError(
                    "the request wants no stream and the script has only chunks: add whole to the reply"
                )
            return self._whole.encode() if isinstance(self._whole, str) else dump(self._whole)
        message: dict[str, Any] = {"role": "assistant", "content": self._text or (None if self._calls else "")}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": f"{self._call_id}_{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": _as_text(given)},
                }
                for place, (name, given) in enumerate(self._calls)
            ]
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason()}
        return dump({**self._head, "object": "chat.completion", "choices": [choice], "usage": self._usage()})

    def more(self) -> bytes:
        """Return one event for a stream that never ends."""
        return self._event({"choices": [{"index": 0, "delta": {"content": "and on "}, "finish_reason": None}]})

    def _event(self, fields: dict[str, Any]) -> bytes:
        return event({**self._head, "object": "chat.completion.chunk", **fields})

    def _finish_reason(self) -> str:
        return self._reply.finish_reason or ("tool_calls" if self._calls else "stop")

    def _usage(self) -> dict[str, int]:
        """Return the usage from the script; the default is one token for four characters."""
        counted = self._reply.usage
        prompt = counted.prompt_tokens if counted else self._chat.prompt_tokens
        characters = len(self._text) + sum(len(name) + len(_as_text(given)) for name, given in self._calls)
        completion = counted.completion_tokens if counted else max(1, characters // 4)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def build_probe_reply(chat: ChatRequest) -> Written:
    """Return the reply of a fully capable server to a request that tests a capability."""
    if chat.probe == "tool":
        return Written(Reply(calls=(Call(name="echo", arguments={"text": "hello"}),), spelling="native"), chat, {})
    return Written(Reply(text='{"text": "hello"}', spelling="native"), chat, {})


def _arguments(call: Call, values: Mapping[str, str]) -> Any:
    return fill(call.arguments, values)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_record(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    raise TemplateError(
        "arguments given as a text can only be spelled natively: give them as an object, or spelling native"
    )
