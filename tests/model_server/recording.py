"""Replies of a real endpoint, kept as they came and played again: matched by what the messages say, not by their
ids.
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

from contract.calls import Record
from tests.model_server.asked import Asked, read_body, text_of
from tests.model_server.replies import build_error
from tests.model_server.script import BadScript
from tests.model_server.wire import BrokenOff, Plan, Request

CONNECT_S = 10.0
READ_S = 600.0
MASK = "[secret]"
_SECRET_HEADERS = ("authorization", "api-key", "x-api-key", "cookie", "proxy-authorization")
_SENT_HEADERS = ("authorization", "api-key", "x-api-key", "openai-organization", "openai-project", "accept")
_MIN_SECRET_CHARS = 6
"""Shorter ones are no secrets, and striking them out would tear texts: the keys of servers that want none."""


class Pair(Record):
    """A request and its reply. `body` is base64 when `is_binary`: the reply was no UTF-8."""

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
    """Of roles, texts and calls: ids of calls, the order of arguments and blanks around texts do not count. What
    `ignored` finds neither.
    """

    def plain(text: str) -> str:
        for pattern in ignored:
            text = pattern.sub("", text)
        return text.strip().encode(errors="replace").decode()

    said = [
        [message.get("role"), plain(text_of(message)), [_call(call, plain) for call in _calls(message)]]
        for message in messages
    ]
    return hashlib.sha256(json.dumps(said, ensure_ascii=True, sort_keys=True).encode()).hexdigest()


def _encodable(value: Any) -> Any:
    """Without halves of characters, which JSON can escape and no file can hold."""
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
    """Passes requests on to `url` (its base, as in OPENAI_BASE_URL) and appends each pair to `file` once its reply has
    come whole. The client's key goes on to the endpoint and is written nowhere: headers are not, and it is struck out
    where request or reply repeat it."""

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
        """What is written stays."""

    def answer(self, request: Request, asked: Asked) -> Awaitable[Plan]:
        return self._pass_on(request, asked)

    async def aclose(self) -> None:
        await self._client.aclose()
        os.close(self._file)

    async def _pass_on(self, request: Request, asked: Asked) -> Plan:
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
            pieces=self._copy(request, asked, response),
            is_stream=True,
        )

    async def _copy(self, request: Request, asked: Asked, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it comes; the pair is written before its end is told, so that whoever has the reply finds it in
        the file.
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
        pair = self._build_pair(request, asked, response, b"".join(parts))
        await asyncio.to_thread(os.write, self._file, pair.model_dump_json().encode() + b"\n")

    def _build_pair(self, request: Request, asked: Asked, response: httpx.Response, raw: bytes) -> Pair:
        secrets = _secrets(request.headers)
        try:
            body, is_binary = _strike_pieces(_strike(raw.decode(), secrets), secrets), False
        except UnicodeDecodeError:
            for secret in secrets:
                raw = raw.replace(secret.encode(), MASK.encode())
            body, is_binary = base64.b64encode(raw).decode(), True
        said = _encodable(read_body(_strike(request.body.decode(errors="replace"), secrets).encode()))
        return Pair(
            digest=digest_messages(said["messages"], self._ignored),
            is_stream=asked.is_stream,
            request=said,
            status=response.status_code,
            content_type=response.headers.get("content-type", "application/octet-stream"),
            retry_after=response.headers.get("retry-after"),
            body=body,
            is_binary=is_binary,
        )


def _secrets(headers: Mapping[str, str]) -> list[str]:
    """Of a header both the value and, without its scheme, the token; also as JSON would write them. Long ones first:
    one may be in another.
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
    """Of a stream, where a secret may lie over several pieces of one text: then the first piece gets all of the text
    without it. Else it stays.
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
    """One event of a stream, and the pieces of texts in it."""

    def __init__(self, written: str) -> None:
        self._written = written
        try:
            self._chunk: Any = json.loads(written.removeprefix("data:"))
        except (ValueError, RecursionError):
            self._chunk = None

    def texts(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], str]]:
        """Which text it is a piece of, and where it stands."""
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
    """Plays pairs again. Several of the same messages come in the order of their recording, and the last of them from
    then on.
    """

    def __init__(self, pairs: Sequence[Pair], ignored: Sequence["re.Pattern[str]"] = ()) -> None:
        self._ignored = ignored
        self._pairs: dict[tuple[str, bool], list[Pair]] = {}
        for pair in pairs:
            # Not the digest in the file: what is ignored may have changed since.
            self._pairs.setdefault((_pair_digest(pair, ignored), pair.is_stream), []).append(pair)
        self._played: Counter[tuple[str, bool]] = Counter()

    def reset(self) -> None:
        self._played.clear()

    def answer(self, request: Request, asked: Asked) -> Plan:
        digest = digest_messages(read_body(request.body)["messages"], self._ignored)
        key = (digest, asked.is_stream)
        pairs = self._pairs.get(key)
        if pairs is None:
            other = "streamed" if asked.is_stream else "whole"
            what = f"only not {other}" if (digest, not asked.is_stream) in self._pairs else "not at all"
            sentence = (
                f"these messages (hash {digest[:12]}) were recorded {what}: record them, or give --ignore a pattern of "
                "what differs each time"
            )
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
    """Raises BadScript. A last line without its end is left out: the recorder was killed while it wrote it, and nobody
    had that reply whole.
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
