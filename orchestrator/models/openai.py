"""Models behind OpenAI-compatible chat endpoints, streamed or whole. The only file that knows the SDK."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
from openai import AsyncOpenAI, AsyncStream

from contract.errors import ModelUnavailable
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.models.chunks import has_content, is_end, mend, split_reply
from orchestrator.models.failures import Endpoint, Failure, build_error, build_interruption, is_transient
from orchestrator.models.retries import DEFAULT_RETRIES, RetryPolicy, compute_backoff_s, parse_retry_after
from telemetry.logs import get_logger

log = get_logger(__name__)

DEFAULT_BASE_URL = "https://api.openai.com/v1"
NO_KEY = "no-key"
"""Sent to servers that want none: the SDK refuses to be without."""
CONNECT_TIMEOUT_S = 10.0
# Beside the SDK's own: version 2 lets what breaks a begun stream through.
_BROKEN = (httpx.HTTPError, json.JSONDecodeError, UnicodeDecodeError, RecursionError)


class OpenAIModel:
    """A chat model at `base_url`. `extra` goes into every request body.

    A request is sent again, as `retries` says (a number: that many times after the first), until a part of its reply
    was given out: then a break is ModelInterrupted, and the caller's to mend. `timeout_s` bounds the wait for the next
    bytes, not the reply as a whole; with `streaming` False all of it comes at once, so the wait for it as a whole.
    """

    def __init__(
        self,
        name: str,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        extra: dict[str, Any] | None = None,
        *,
        retries: RetryPolicy | int = DEFAULT_RETRIES,
        streaming: bool = True,
    ) -> None:
        self._endpoint = Endpoint(_without_credentials(base_url), name, api_key or "")
        self._extra = dict(extra or {})
        self._policy = retries if isinstance(retries, RetryPolicy) else RetryPolicy(attempts=1 + retries)
        self._streaming = streaming
        self._asks_usage = True
        self._limit_name = "max_tokens"
        timeout = openai.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        self._client = AsyncOpenAI(base_url=base_url, api_key=api_key or NO_KEY, timeout=timeout, max_retries=0)

    @property
    def name(self) -> str:
        return self._endpoint.model

    @property
    def address(self) -> str:
        """The base URL without user, password and query."""
        return self._endpoint.address

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """The reply's chunks as the server wrote them, a refusal's text as content.

        Raises ModelUnavailable: ModelInterrupted for a reply that breaks off after a part of it, ContextWindowExceeded
        for a request that is too long, ModelRefused for one that will not pass as it is.
        """
        read = self._read_stream if self._streaming else self._read_whole
        attempt = 0
        while True:
            attempt += 1
            is_begun = False
            try:
                async with aclosing(read(request)) as chunks:
                    async for chunk in chunks:
                        is_begun = True
                        yield chunk
                return
            except (_AttemptFailed, openai.OpenAIError, ValueError, *_BROKEN) as error:
                # ValueError: numbers of more digits than Python reads, and a request that JSON cannot carry.
                failure = _failure(error)
            # Out here, so that no cause is on display: the SDK's errors carry the request, and servers echo keys in
            # their texts.
            if is_begun:
                raise build_interruption(failure, self._endpoint)
            await self._wait(failure, attempt)

    async def find_context_window(self) -> int | None:
        """Tokens that fit, when the endpoint's list of models says so (vLLM, llama.cpp, Groq, OpenRouter). None when it
        does not, or fails as often as it may: what is found is remembered for long, and must not hang on one broken
        connection."""
        try:
            listing = await self._list_models()
        except ModelUnavailable:
            return None
        models = listing.get("data") if isinstance(listing, dict) else None
        entries = [entry for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
        own = [entry for entry in entries if entry.get("id") == self.name] or (entries if len(entries) == 1 else [])
        return _context_window(own[0]) if own else None

    async def _list_models(self) -> object:
        """Raises ModelUnavailable."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._client.get("/models", cast_to=object)
            except (openai.OpenAIError, ValueError, *_BROKEN) as error:
                failure = _failure(error)
            await self._wait(failure, attempt)

    async def aclose(self) -> None:
        await self._client.close()

    async def _wait(self, failure: Failure, attempt: int) -> None:
        """Wait until the request may be sent again. Raises ModelUnavailable when it may not."""
        if not is_transient(failure):
            raise build_error(failure, self._endpoint, attempts=attempt)
        if failure.wait_s is not None and failure.wait_s > self._policy.max_wait_s:
            raise build_error(failure, self._endpoint, attempts=attempt, max_wait_s=self._policy.max_wait_s)
        if attempt >= self._policy.attempts:
            raise build_error(failure, self._endpoint, attempts=attempt)
        wait_s = compute_backoff_s(self._policy, attempt) if failure.wait_s is None else failure.wait_s
        log.warning("model_retry", model=self.name, attempt=attempt, wait_s=round(wait_s, 3), reason=failure.reason)
        await self._policy.sleep(wait_s)

    async def _read_stream(self, request: ModelRequest) -> AsyncGenerator[Chunk, None]:
        """One attempt. Whatever it gives out is a part of the reply: before that, it fails unseen."""
        # What says nothing yet is held until something does: a break before that may be mended unseen.
        held: list[Chunk] | None = []
        has_ended = False
        async with await self._open(request) as stream:
            try:
                async for chunk in stream:
                    if not isinstance(chunk, dict):
                        continue
                    has_ended = has_ended or is_end(chunk)
                    mend(chunk)
                    if held is None:
                        yield chunk
                        continue
                    _raise_told_error(chunk)
                    held.append(chunk)
                    if has_content(chunk):
                        for kept in held:
                            yield kept
                        held = None
            except (openai.APIConnectionError, *_BROKEN):
                # The reply is whole: only its tail, the usage, is lost.
                if not has_ended:
                    raise
        if not has_ended:
            raise _AttemptFailed(_unfinished(stream, is_begun=held is None))
        for kept in held or ():
            yield kept

    async def _read_whole(self, request: ModelRequest) -> AsyncGenerator[Chunk, None]:
        reply = await self._open(request)
        if isinstance(reply, dict):
            _raise_told_error(reply)
        chunks = split_reply(reply)
        if chunks is None:
            raise _AttemptFailed(Failure("no_chat"))
        for chunk in chunks:
            yield chunk

    async def _open(self, request: ModelRequest) -> Any:
        """The open stream, or the whole reply. What a server does not know of our own additions is left out from then
        on.
        """
        while True:
            try:
                return await self._post(self._body(request))
            except openai.APIStatusError as error:
                if not self._adapt(error):
                    raise

    async def _post(self, body: dict[str, Any]) -> Any:
        # The generic door of the SDK: chunks come as parsed JSON. Its typed one builds a model of each, which costs ten
        # times as much and is dumped again at once.
        if not self._streaming:
            return await self._client.post("/chat/completions", cast_to=object, body=body)
        return await self._client.post(
            "/chat/completions", cast_to=object, body=body, stream=True, stream_cls=AsyncStream[object]
        )

    def _adapt(self, error: openai.APIStatusError) -> bool:
        """Whether the request was changed to the server's liking. Each change happens once a model, so this comes to an
        end.
        """
        if error.status_code not in (400, 422):
            return False
        said = str(error.body)
        if self._streaming and self._asks_usage and "stream_options" in said:
            self._asks_usage = False
            return True
        if self._limit_name == "max_tokens" and "max_completion_tokens" in said:
            self._limit_name = "max_completion_tokens"
            return True
        return False

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.name, "messages": request.messages, "stream": self._streaming}
        if self._streaming and self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            body["tools"] = request.tools
        body |= {**self._extra, **request.extra}
        if self._limit_name != "max_tokens" and "max_tokens" in body:
            body[self._limit_name] = body.pop("max_tokens")
        return body


class _AttemptFailed(Exception):
    """One attempt at a reply failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def _failure(error: Exception) -> Failure:
    """What ended an attempt, in terms of ours."""
    if isinstance(error, _AttemptFailed):
        return error.failure
    if isinstance(error, _BROKEN):
        return Failure("broken")
    if isinstance(error, openai.APITimeoutError):
        return Failure("timeout")
    if isinstance(error, openai.APIConnectionError):
        return Failure("connection")
    if isinstance(error, openai.APIStatusError):
        headers = error.response.headers
        return Failure(
            "status",
            error.status_code,
            _told(error.body) if _is_json(error.response.text) else error.response.text,
            parse_retry_after(headers),
            is_final=headers.get("x-should-retry") == "false",
        )
    if isinstance(error, openai.APIError):
        return Failure("told", body=_told(error.body))
    return Failure("unknown", name=type(error).__name__)


def _raise_told_error(reply: dict[str, Any]) -> None:
    """Some servers report an error where a reply or a chunk should be, with status 200."""
    if "choices" in reply or not (reply.get("error") or reply.get("object") == "error"):
        return
    raise _AttemptFailed(Failure("told", body=_told(reply.get("error") or reply)))


def _told(body: object) -> object:
    """An error that is a bare text, as the record that the others send."""
    return {"message": body} if isinstance(body, str) else body


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _unfinished(stream: AsyncStream[object], *, is_begun: bool) -> Failure:
    """The failure of a reply without an end: of a stream that broke off, or of an answer that was no stream in the
    first place.
    """
    content_type = stream.response.headers.get("content-type", "")
    if is_begun or "event-stream" in content_type:
        return Failure("unfinished")
    return Failure("no_chat", name="json" if "json" in content_type else "")


def _context_window(entry: dict[str, Any]) -> int | None:
    """Of one entry of the list of models; each kind of server has its own name for it."""
    meta = entry.get("meta")
    names = ("max_model_len", "context_window", "context_length", "n_ctx")
    found = [entry.get(name) for name in names] + ([meta.get("n_ctx")] if isinstance(meta, dict) else [])
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _without_credentials(base_url: str) -> str:
    """The URL without user, password and query, for messages."""
    parts = urlsplit(base_url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}".rstrip("/")
