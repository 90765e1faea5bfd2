"""Record the replies of a real endpoint and play the replies again. A request is matched by the content of its
messages, not by ids.
"""

import asyncio
import base64
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field, JsonValue, ValidationError

from tests.model_server.chat_request import ChatRequest, read_body, text_of
from tests.model_server.replies import build_error
from tests.model_server.script import BadScript
from tests.model_server.wire import BrokenOff, Plan, Request
from toolcrew.contract.calls import Record

CONNECT_S = 10.0
READ_S = 600.0
MASK = "[secret]"
_SECRET_HEADERS = ("authorization", "api-key", "x-api-key", "cookie", "proxy-authorization")
_SENT_HEADERS = ("authorization", "api-key", "x-api-key", "openai-organization", "openai-project", "accept")
_MIN_SECRET_CHARS = 6
"""Shorter values are not treated as secrets, because removing them would damage texts. Servers without authentication
use such keys.
"""


class Pair(Record):
    """A request and its reply. `body` is base64 when `is_binary`: the reply was not UTF-8."""

    kind: Literal["pair"] = "pair"
    digest: str
    is_stream: bool
    request: dict[str, JsonValue]
    status: int = Field(ge=100, le=599)
    content_type: str
    retry_after: str | None = None
    body: str
    is_binary: bool = False


def digest_messages(messages: Sequence[Mapping[str, Any]], ignored: Sequence["re.Pattern[str]"] = ()) -> str:
    """Return a digest of roles, texts and calls. The ids of calls, the order of arguments and the whitespace around
    texts do not count. Matches of `ignored` do not count either.
    """

    def plain(text: str) -> str:
        for pattern in ignored:
            text = pattern.sub("", text)
        return text.strip().encode(errors="replace").decode()

    lines = [
        [message.get("role"), plain(text_of(message)), [_call(call, plain) for call in _calls(message)]]
        for message in messages
    ]
    return hashlib.sha256(json.dumps(lines, ensure_ascii=True, sort_keys=True).encode()).hexdigest()


def _encodable(value: Any) -> Any:
    """Remove lone surrogates, which JSON can escape but a file cannot contain."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(part) for key, part in value.items()}
    return [_encodable(part) for part in value] if isinstance(value, list) else value


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [function for function in functions if isinstance(function, dict)]


def _call(function: Mapping[str, Any], plain: Any) -> list[Any]:
    raw = str(function.get("arguments") or "")
    try:
        arguments: Any = json.loads(raw)
    except (ValueError, RecursionError):
        arguments = raw
    return [function.get("name"), plain(json.dumps(arguments, sort_keys=True))]


class Recorder:
    """Forward requests to `url` (the base, as in OPENAI_BASE_URL) and append each pair to `file` after its complete
    reply.

    The client's key is forwarded to the endpoint but never written. Headers are not written, and the key is removed
    where request or reply repeat it.
    """

    def __init__(
        self,
        url: str,
        file: Path,
        ignored: Sequence["re.Pattern[str]"] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/") + "/chat/completions"
        self._ignored = ignored
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(READ_S, connect=CONNECT_S), transport=transport)
        try:
            self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadScript(
                f"{file} cannot be written ({error.strerror}): give --to a file in a folder that is there and yours"
            ) from None

    def reset(self) -> None:
        """Do nothing: the recorded pairs stay."""

    def answer(self, request: Request, chat: ChatRequest) -> Awaitable[Plan]:
        return self._pass_on(request, chat)

    async def aclose(self) -> None:
        await self._client.aclose()
        os.close(self._file)

    async def _pass_on(self, request: Request, chat: ChatRequest) -> Plan:
        headers = {name: request.headers[name] for name in _SENT_HEADERS if name in request.headers}
        sent = self._client.build_request(
            "POST", self._url, content=request.body, headers={**headers, "content-type": "application/json"}
        )
        try:
            response = await self._client.send(sent, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Plan(
                502,
                pieces=[
                    build_error(
                        f"the endpoint that is recorded does not answer ({type(error).__name__}): check --record",
                        "bad_gateway",
                    )
                ],
            )
        after = response.headers.get("retry-after")
        return Plan(
            status=response.status_code,
            content_type=response.headers.get("content-type", "application/octet-stream"),
            headers=(("retry-after", after),) if after is not None else (),
            pieces=self._copy(request, chat, response),
            is_stream=True,
        )

    async def _copy(self, request: Request, chat: ChatRequest, response: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. The pair is written before the end of the body is sent. So a client with a
        complete reply finds the pair in the file.
        """
        parts: list[bytes] = []
        try:
            async for piece in response.aiter_bytes():
                parts.append(piece)
                yield piece
        except httpx.HTTPError:
            raise BrokenOff from None
        finally:
            await response.aclose()
        pair = self._build_pair(request, chat, response, b"".join(parts))
        await asyncio.to_thread(os.write, self._file, pair.model_dump_json().encode() + b"\n")

    def _build_pair(self, request: Request, chat: ChatRequest, response: httpx.Response, raw: bytes) -> Pair:
        secrets = _secrets(request.headers)
        try:
            body, is_binary = _strike_pieces(_strike(raw.decode(), secrets), secrets), False
        except UnicodeDecodeError:
            for secret in secrets:
                raw = raw.replace(secret.encode(), MASK.encode())
            body, is_binary = base64.b64encode(raw).decode(), True
        request_body = _encodable(read_body(_strike(request.body.decode(errors="replace"), secrets).encode()))
        return Pair(
            digest=digest_messages(request_body["messages"], self._ignored),
            is_stream=chat.is_stream,
            request=request_body,
            status=response.status_code,
            content_type=response.headers.get("content-type", "application/octet-stream"),
            retry_after=response.headers.get("retry-after"),
            body=body,
            is_binary=is_binary,
        )


def _secrets(headers: Mapping[str, str]) -> list[str]:
    """Return the secrets of the headers: each value, the token without its scheme, and the JSON spelling of both.
    Long secrets come first, because one secret may contain another.
    """
    values = [headers[name] for name in _SECRET_HEADERS if name in headers]
    found = {part for value in values for part in (value, value.split(" ", 1)[-1].strip())}
    found |= {json.dumps(part)[1:-1] for part in found}
    return sorted((part for part in found if len(part) >= _MIN_SECRET_CHARS), key=len, reverse=True)


def _strike(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


def _strike_pieces(body: str, secrets: Sequence[str]) -> str:
    """Remove secrets that are split over several pieces of one text in a stream. The first piece then gets the whole
    text without the secret. A stream without such a secret is unchanged.
    """
    events = [_Event(part) for part in re.split(r"(?<=\n\n)", body)]
    places: dict[tuple[Any, ...], list[tuple[dict[str, Any], str]]] = {}
    for event in events:
        for place, holder, key in event.texts():
            places.setdefault(place, []).append((holder, key))
    is_struck = False
    for pieces in places.values():
        whole = "".join(holder[key] for holder, key in pieces)
        if (struck := _strike(whole, secrets)) != whole:
            is_struck = True
            for at, (holder, key) in enumerate(pieces):
                holder[key] = "" if at else struck
    return "".join(event.tell() for event in events) if is_struck else body


class _Event:
    """An event of a stream, and the pieces of text in the event."""

    def __init__(self, written: str) -> None:
        self._written = written
        try:
            self._chunk: Any = json.loads(written.removeprefix("data:"))
        except (ValueError, RecursionError):
            self._chunk = None

    def texts(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], str]]:
        """Yield the text that each piece belongs to, and the position of the piece."""
        choices = self._chunk.get("choices") if isinstance(self._chunk, dict) else None
        for choice in choices if isinstance(choices, list) else []:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                continue
            yield from (
                (("text", choice.get("index"), key), delta, key)
                for key, value in delta.items()
                if isinstance(value, str)
            )
            calls = delta.get("tool_calls")
            for call in calls if isinstance(calls, list) else []:
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                    yield ("call", choice.get("index"), call.get("index")), function, "arguments"

    def tell(self) -> str:
        return f"data: {json.dumps(self._chunk)}\n\n" if isinstance(self._chunk, dict) else self._written


class Replay:
    """Play pairs again. Pairs with the same messages are played in the order of recording; the last pair is repeated."""

    def __init__(self, pairs: Sequence[Pair], ignored: Sequence["re.Pattern[str]"] = ()) -> None:
        self._ignored = ignored
        self._pairs: dict[tuple[str, bool], list[Pair]] = {}
        for pair in pairs:
            # The digest is computed again, because the ignored patterns may differ from the patterns of the
            # recording.
            self._pairs.setdefault((_pair_digest(pair, ignored), pair.is_stream), []).append(pair)
        self._played: Counter[tuple[str, bool]] = Counter()

    def reset(self) -> None:
        self._played.clear()

    def answer(self, request: Request, chat: ChatRequest) -> Plan:
        digest = digest_messages(read_body(request.body)["messages"], self._ignored)
        key = (digest, chat.is_stream)
        pairs = self._pairs.get(key)
        if pairs is None:
            other = "streamed" if chat.is_stream else "whole"
            state = f"only not {other}" if (digest, not chat.is_stream) in self._pairs else "not at all"
            sentence = f"these messages (hash {digest[:12]}) were recorded {state}: record them, or give --ignore a pattern of what differs each time"
            return Plan(404, pieces=[build_error(sentence, "not_recorded")])
        pair = pairs[min(self._played[key], len(pairs) - 1)]
        self._played[key] += 1
        body = base64.b64decode(pair.body) if pair.is_binary else pair.body.encode(errors="surrogatepass")
        is_events = pair.content_type.startswith("text/event-stream")
        return Plan(
            status=pair.status,
            content_type=pair.content_type,
            headers=(("retry-after", pair.retry_after),) if pair.retry_after is not None else (),
            pieces=[part for part in re.split(rb"(?<=\n\n)", body) if part] if is_events else [body],
            is_stream=is_events,
        )


def _pair_digest(pair: Pair, ignored: Sequence["re.Pattern[str]"]) -> str:
    messages = pair.request.get("messages")
    return digest_messages(
        [entry for entry in messages if isinstance(entry, dict)] if isinstance(messages, list) else [], ignored
    )


def load_pairs(path: Path) -> list[Pair]:
    """Return the pairs of a recording. Raises BadScript. An incomplete last line is left out: the recorder was killed
    during the write, and no client had received that reply completely.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadScript(
            f"{path} cannot be read ({error.strerror}): give --replay a file that --record has written"
        ) from None
    lines = raw.split(b"\n")[:-1]
    pairs: list[Pair] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            pairs.append(Pair.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "line"
            raise BadScript(
                f"{path.name}:{number}: {place}: {first['msg']}: take the line out, or record again"
            ) from None
    if not pairs:
        raise BadScript(f"{path} holds no pair: record some first, with --record URL --to {path.name}")
    return pairs
