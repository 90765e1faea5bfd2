"""Models behind OpenAI-compatible chat endpoints, streamed."""

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
from openai import AsyncOpenAI, AsyncStream

from contract.errors import ModelUnavailable
from orchestrator.models.base import Chunk, ModelRequest

DEFAULT_BASE_URL = "https://api.openai.com/v1"
MAX_DETAIL_CHARS = 300
NO_KEY = "no-key"
"""Sent to servers that want none: the SDK refuses to be without."""


class OpenAIModel:
    """A chat model at `base_url`. `extra` goes into every request body. Connecting is tried `1 + retries` times, a begun stream never again.

    `timeout_s` bounds the wait for the next bytes, not the reply as a whole.
    """

    def __init__(
        self,
        name: str,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        extra: dict[str, Any] | None = None,
        *,
        retries: int = 2,
    ) -> None:
        self._name = name
        self._api_key = api_key or NO_KEY
        self._address = _without_credentials(base_url)
        self._extra = dict(extra or {})
        self._asks_usage = True
        self._client = AsyncOpenAI(base_url=base_url, api_key=self._api_key, timeout=timeout_s, max_retries=retries)

    @property
    def name(self) -> str:
        return self._name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """The reply's chunks as the server wrote them. Raises ModelUnavailable, also for a stream that breaks off before its end."""
        ended = False
        try:
            async with await self._open(request) as stream:
                async for chunk in stream:
                    if isinstance(chunk, dict):
                        ended = ended or _is_end(chunk)
                        yield chunk
        # Without a cause on display: the SDK's errors carry the request, and servers echo keys in their texts.
        except openai.OpenAIError as error:
            raise self._unavailable(error) from None
        except (httpx.HTTPError, json.JSONDecodeError, UnicodeDecodeError):
            raise ModelUnavailable(f"the model at {self._address} broke off its reply: try again; if it stays, look at its log") from None
        if not ended:
            raise ModelUnavailable(
                f"{self._address} ended its reply without a finish_reason: it broke off, or it is no chat endpoint; check OPENAI_BASE_URL (it ends in /v1)"
            )

    async def aclose(self) -> None:
        await self._client.close()

    async def _open(self, request: ModelRequest) -> AsyncStream[object]:
        try:
            return await self._post(request)
        except openai.APIStatusError as error:
            if not (self._asks_usage and error.status_code in (400, 422) and "stream_options" in _detail(error)):
                raise
        self._asks_usage = False
        return await self._post(request)

    async def _post(self, request: ModelRequest) -> AsyncStream[object]:
        # The generic door of the SDK: chunks come as parsed JSON. Its typed one builds a model of each, which costs ten times as much
        # and is dumped again at once.
        return await self._client.post(
            "/chat/completions", cast_to=object, body=self._body(request), stream=True, stream_cls=AsyncStream[object]
        )

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._name, "messages": request.messages, "stream": True}
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            body["tools"] = request.tools
        return {**body, **self._extra, **request.extra}

    def _unavailable(self, error: openai.OpenAIError) -> ModelUnavailable:
        return ModelUnavailable(self._sentence(error).replace(self._api_key, "***"))

    def _sentence(self, error: openai.OpenAIError) -> str:
        where = f"the model at {self._address}"
        if isinstance(error, openai.APITimeoutError):
            return f"{where} did not answer in time: check that it is up, or give it more time"
        if isinstance(error, openai.APIConnectionError):
            return f"{where} cannot be reached or broke off its reply: check OPENAI_BASE_URL and that the server is up"
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return f"{where} refuses the API key: check OPENAI_API_KEY"
        if isinstance(error, openai.NotFoundError):
            return f"{where} does not know the model '{self._name}' or the path: check TOOLCREW_MODEL and OPENAI_BASE_URL (it ends in /v1)"
        if isinstance(error, openai.RateLimitError):
            return f"{where} refuses for rate or quota: wait, run fewer at once, or raise the limit ({_detail(error)})"
        if isinstance(error, openai.InternalServerError):
            return f"{where} failed with status {error.status_code}: try again later, or look at its log ({_detail(error)})"
        if isinstance(error, openai.APIError):
            return f"{where} refused the request: {_detail(error)}"
        return f"{where} could not be asked: {type(error).__name__}"


def _is_end(chunk: Chunk) -> bool:
    """A finish_reason, or the usage that follows the last choice: servers that omit one send the other."""
    choices = chunk.get("choices")
    if not choices:
        return bool(chunk.get("usage"))
    return any(isinstance(choice, dict) and choice.get("finish_reason") for choice in choices)


def _detail(error: openai.APIError) -> str:
    """What the server said, on one line; pages that are not JSON are named, not quoted."""
    body = error.body
    if isinstance(body, dict):
        message = body.get("message") or body.get("detail") or body
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False, default=str)
    elif body is None:
        text = error.message
    else:
        text = "its answer is not JSON"
    return " ".join(text.split())[:MAX_DETAIL_CHARS]


def _without_credentials(base_url: str) -> str:
    """The URL without user, password and query, for messages."""
    parts = urlsplit(base_url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}".rstrip("/")
