"""Models behind OpenAI-compatible chat endpoints, streamed or whole. The only module that uses the SDK."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import openai
from openai import AsyncOpenAI, AsyncStream

from toolcrew.contract.errors import ContextWindowExceeded, ModelDenied, ModelRefused, ModelUnavailable
from toolcrew.contract.model_endpoints import EndpointBlocked, ModelEndpoint, RequestLease
from toolcrew.orchestrator.dialects.finish_reasons import ReplyEnding, as_reason, classify_ending
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.dialects.reader import read_usage
from toolcrew.orchestrator.dialects.reply_fields import build_origin, has_fields, mark_origin, select_fields
from toolcrew.orchestrator.dialects.thinking import REASONING, LoneEndFinder, mark_reasoning
from toolcrew.orchestrator.dialects.token_estimates import estimate_prompt
from toolcrew.orchestrator.models.capabilities import ModelFacts
from toolcrew.orchestrator.models.chunks import EndFinder, has_content, join_content, normalize, split_reply
from toolcrew.orchestrator.models.failures import (
    AttemptFailure,
    FailedEndpoint,
    build_error,
    build_interruption,
    build_no_chat,
    build_refusal,
    find_retry_delay,
    has_message,
    is_rate_limit,
    is_too_long,
    is_transient,
)
from toolcrew.orchestrator.models.notices import notify_of_wait
from toolcrew.orchestrator.models.request_limits import LocalLimits, RequestLimits
from toolcrew.orchestrator.models.retries import DEFAULT_RETRIES, RetryPolicy, compute_backoff_s, parse_retry_after
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

DEFAULT_BASE_URL = "https://api.openai.com/v1"
NO_KEY = "no-key"
"""API key for servers that need none, because OpenAI's SDK requires a key."""
CONNECT_TIMEOUT_S = 10.0
PROBE = ModelRequest([{"role": "user", "content": "Say ok."}], extra={"max_tokens": 16})
"""The request that shows whether a server denies every request."""
LEARN_PAUSE_S, MAX_LEARN_PAUSE_S = 30.0, 3600.0
"""Seconds until that request is repeated, if it failed. Doubled after each failure, up to the maximum."""
REASONING_TOKENS = 2048
"""Limit of the reply that shows whether the prompt of a model opens its reasoning."""
_USAGE_FIELD, _NEW_LIMIT = "stream_options", "max_completion_tokens"
# In addition to the SDK's errors: version 2 does not wrap errors that break a stream.
_BROKEN = (httpx.HTTPError, json.JSONDecodeError, UnicodeDecodeError, RecursionError)


class OpenAIModel:
    """A chat model at `base_url`. `extra` is added to every request body.

    A request is retried by the policy `retries` (a number: that many retries) until a part of its reply was returned.
    After that, a break raises ModelInterrupted, and the caller decides. `timeout_s` limits the wait for the next bytes,
    not for the whole reply. Without `streaming`, `timeout_s` limits the wait for the whole reply.

    `limits`: decides when a request may be sent. By default, a rate limit of the server delays only requests of this
    object.
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
        self._endpoint = FailedEndpoint(_without_credentials(base_url), name, api_key or "")
        self._extra = dict(extra or {})
        self._policy = retries if isinstance(retries, RetryPolicy) else RetryPolicy(attempts=1 + retries)
        self._streaming = streaming
        self._form = _Form()
        self._is_uncounted = False
        self._opens_reasoning: bool | None = None
        self._learn_after = 0.0
        self._learn_pause_s = LEARN_PAUSE_S
        self._probing = asyncio.Lock()
        self._probed_at = 0.0
        self._probe_error: ModelUnavailable | None = None
        timeout = openai.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        self._client = AsyncOpenAI(base_url=base_url, api_key=api_key or NO_KEY, timeout=timeout, max_retries=0)
        self.limits: RequestLimits = LocalLimits(self._policy.sleep)

    @classmethod
    def at(
        cls, name: str, endpoint: ModelEndpoint, api_key: str | None, timeout_s: float, retries: RetryPolicy
    ) -> Self:
        """Return the model of the configured endpoint `name`."""
        model = cls(endpoint.model, endpoint.base_url, api_key, timeout_s, retries=retries)
        model._endpoint = replace(model._endpoint, name=name)
        return model

    @property
    def name(self) -> str:
        return self._endpoint.model

    @property
    def _origin(self) -> str:
        return build_origin(self.address, self.name)

    @property
    def address(self) -> str:
        """Return the base URL without user, password and query."""
        return self._endpoint.address

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """Yield the reply's chunks as the server sent them, with the text of a refusal as content.

        Raises ModelUnavailable: ModelInterrupted for a reply that breaks off after its first part,
        ContextWindowExceeded for a request that is too long, ModelRefused for a request that the server rejects.
        """
        read = self._read_stream if self._streaming else self._read_complete
        attempts = _Attempts()
        while True:
            lease = await self._acquire(request, attempts)
            has_started, tokens, text = False, 0, LoneEndFinder()
            try:
                if request.before_send is not None:
                    await request.before_send()
                async with aclosing(read(request)) as chunks:
                    async for chunk in chunks:
                        has_started = True
                        text.feed(join_content([chunk]))
                        usage = read_usage(chunk)
                        tokens = usage.prompt_tokens + usage.completion_tokens if usage is not None else tokens
                        yield chunk
                self._note_uncounted(tokens)
                if text.is_found and self._streaming:
                    await self._learn_reasoning()
                return
            except (_AttemptFailed, openai.OpenAIError, ValueError, *_BROKEN) as error:
                # ValueError stands for a number with more digits than Python parses, or for a request that cannot be
                # encoded as JSON.
                failure = _classify_error(error)
            finally:
                await self.limits.release(lease, tokens)
            # Raised outside of `except`, so that the error has no cause: the SDK's errors contain the request, and
            # servers repeat keys in their messages.
            if has_started:
                raise build_interruption(failure, self._endpoint)
            await self._wait_for_retry(failure, attempts)

    def _note_uncounted(self, tokens: int) -> None:
        """Log once that the server of this endpoint does not count tokens, or has stopped to."""
        if not tokens and not self._is_uncounted:
            message = "The server sent no token counts. Usage and budgets use estimates."
            log.warning("model_tokens_estimated", model=self.name, endpoint=self._endpoint.name, message=message)
        self._is_uncounted = not tokens

    def without_fallback(self) -> Self:
        """Return this model, because an endpoint of its own has no fallback."""
        return self

    async def describe(self) -> ModelFacts | None:
        """Return the facts that the endpoint's list of models contains (vLLM, llama.cpp, Groq, OpenRouter).

        Returns None if all attempts fail. Retries, because the result is cached for long and must not depend on one
        broken connection.
        """
        try:
            listing = await self._list_models()
        except (ModelRefused, ModelDenied):
            return ModelFacts()
        except ModelUnavailable:
            return None
        models = listing.get("data") if isinstance(listing, dict) else None
        entries = [entry for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
        own = [entry for entry in entries if entry.get("id") == self.name] or (entries if len(entries) == 1 else [])
        return ModelFacts(_find_window(own[0]), _find_parameters(own[0])) if own else ModelFacts()

    async def _list_models(self) -> object:
        attempts = _Attempts()
        while True:
            attempts.count += 1
            try:
                return await self._client.get("/models", cast_to=object)
            except (openai.OpenAIError, ValueError, *_BROKEN) as error:
                failure = _classify_error(error)
            # Reading the list of models does not count for the limits of requests, so it neither waits for them nor
            # blocks others.
            await self._wait_for_retry(failure, attempts, is_shared=False)

    async def aclose(self) -> None:
        await self._client.close()

    async def _acquire(self, request: ModelRequest, attempts: "_Attempts") -> RequestLease:
        """Wait until the request may be sent. Raises ModelUnavailable when its endpoint is blocked for too long."""
        try:
            lease = await self.limits.acquire(
                lambda: estimate_prompt(request), self._policy.max_wait_s, partial(notify_of_wait, self._endpoint.name)
            )
        except EndpointBlocked as blocked:
            failure = (
                AttemptFailure("connection")
                if blocked.reason == "down"
                else AttemptFailure("status", 429, wait_s=blocked.remaining_s)
            )
            raise build_error(
                failure, self._endpoint, attempts=attempts.count, max_wait_s=self._policy.max_wait_s
            ) from None
        attempts.count += 1
        return lease

    async def _wait_for_retry(self, failure: AttemptFailure, attempts: "_Attempts", *, is_shared: bool = True) -> None:
        """Wait until the request may be sent again. Raises ModelUnavailable when it may not. `is_shared`: a rate limit
        blocks all requests, so the next attempt waits for the end of the block. False: a request without content.
        """
        count, policy = attempts.count, self._policy
        if not is_transient(failure):
            error = build_error(failure, self._endpoint, attempts=count)
            raise await self._check_denial(error, failure) if is_shared and isinstance(error, ModelDenied) else error
        wait_s = compute_backoff_s(policy, count) if failure.wait_s is None else failure.wait_s
        is_block = is_shared and is_rate_limit(failure)
        if is_block:
            await self.limits.block(wait_s, "rate_limit")
        attempts.failed_at = attempts.failed_at or time.monotonic()
        is_late = time.monotonic() + wait_s - attempts.failed_at > policy.max_total_s
        if wait_s > policy.max_wait_s or is_late or count >= policy.attempts:
            max_wait_s = policy.max_wait_s if wait_s > policy.max_wait_s else None
            raise build_error(failure, self._endpoint, attempts=count, max_wait_s=max_wait_s)
        log.warning("model_retry", model=self.name, attempt=count, wait_s=round(wait_s, 3), reason=failure.reason)
        if not is_block:
            await policy.sleep(wait_s)

    async def _learn_reasoning(self) -> None:
        """Find out once whether the prompt of this model opens its reasoning. The reply that raised the question may
        only quote an end mark, so the reply to a request without content of a tenant decides. After a request that
        failed, a later reply raises the question again.
        """
        if self._opens_reasoning is not None or time.monotonic() < self._learn_after:
            return
        # Set before the request, so that replies that end meanwhile do not ask too.
        self._learn_after = time.monotonic() + self._learn_pause_s
        self._learn_pause_s = min(2 * self._learn_pause_s, MAX_LEARN_PAUSE_S)
        probe = replace(PROBE, extra={"max_tokens": REASONING_TOKENS})
        with suppress(_AttemptFailed, openai.OpenAIError, ValueError, *_BROKEN):
            async with aclosing(self._read_stream(probe)) as replies:
                chunks = [chunk async for chunk in replies]
            text = LoneEndFinder()
            text.feed(join_content(chunks))
            # Reasoning may be longer than the limit, and has no end mark then.
            if text.is_found or not any(map(_is_cut, chunks)):
                self._opens_reasoning = text.is_found
                log.info("model_reasoning_learned", model=self.name, opens_in_prompt=text.is_found)

    async def _check_denial(self, denial: ModelDenied, failure: AttemptFailure) -> ModelUnavailable:
        """Return the error of a request that the server denied. It is a denial only if the server denies a request
        without content of a tenant too: moderation, credit and routes may depend on the content.
        """
        denied_at = time.monotonic()
        async with self._probing:
            # Requests that are denied at the same time share one probe.
            if self._probed_at < denied_at:
                self._probed_at, self._probe_error = time.monotonic(), await self._probe()
            error = self._probe_error
        if error is None or isinstance(error, ModelRefused | ContextWindowExceeded):
            return build_refusal(failure, self._endpoint)
        return denial if isinstance(error, ModelDenied) else error

    async def _probe(self) -> ModelUnavailable | None:
        """Return the error of one short request; None if a reply begins."""
        read = self._read_stream if self._streaming else self._read_complete
        try:
            async with aclosing(read(PROBE)) as chunks:
                async for _ in chunks:
                    break
        except (_AttemptFailed, openai.OpenAIError, ValueError, *_BROKEN) as error:
            return build_error(_classify_error(error), self._endpoint)
        return None

    async def _read_stream(self, request: ModelRequest) -> AsyncGenerator[Chunk, None]:
        """Make one attempt. It yields nothing until the reply has content, so an earlier failure can be retried."""
        async with await self._open(request) as stream:
            if (reply := await _read_whole(stream)) is not None:
                for chunk in self._split(reply):
                    yield chunk
                return
            async with aclosing(self._read_chunks(stream)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _read_chunks(self, stream: AsyncStream[object]) -> AsyncGenerator[Chunk, None]:
        # Chunks without content are held until content arrives. A break before that can be retried unnoticed.
        pending: list[Chunk] | None = []
        end, message = EndFinder(), None
        try:
            async for chunk in stream:
                if not isinstance(chunk, dict):
                    continue
                _raise_embedded_error(chunk)
                message = chunk if has_message(chunk) else message
                mark_origin(normalize(chunk, is_first=pending is not None), self._origin)
                end.feed(chunk)
                if pending is None:
                    yield chunk
                    continue
                pending.append(chunk)
                if self._opens_reasoning:
                    pending[0][REASONING] = True
                if has_content(chunk):
                    for pending_chunk in pending:
                        yield pending_chunk
                    pending = None
        except (openai.APIConnectionError, *_BROKEN):
            # The reply is complete. Only its last part, the usage, is lost.
            if not end.has_ended:
                raise
        if not end.has_ended:
            raise _AttemptFailed(_build_unfinished(stream, message, has_started=pending is None))
        for pending_chunk in pending or ():
            yield pending_chunk

    async def _read_complete(self, request: ModelRequest) -> AsyncGenerator[Chunk, None]:
        for chunk in self._split(await self._open(request)):
            yield chunk

    def _split(self, reply: object) -> list[Chunk]:
        """Return the chunks of a whole reply."""
        if isinstance(reply, dict):
            _raise_embedded_error(reply)
        chunks = split_reply(reply)
        if chunks is None:
            raise _AttemptFailed(build_no_chat(reply))
        parts = list(chunks)
        mark_reasoning(parts, join_content(parts))
        for chunk in parts:
            mark_origin(chunk, self._origin)
        return parts

    async def _open(self, request: ModelRequest) -> Any:
        """Return the open stream, or the whole reply. If the server rejects an optional part of the request, send the
        request again without that part.

        Later requests, also those of other tenants, omit the part too if the cause is certain: the shorter request
        succeeded, and the rejection cannot quote the content of this request.
        """
        form, is_certain, first_error = self._form, True, None
        while True:
            try:
                reply = await self._post(self._build_body(request, form))
            except openai.APIStatusError as error:
                shorter = self._shorten(form, error, request) if error.status_code in (400, 422) else None
                if shorter is None:
                    # Without the fields of earlier replies, the server may only miss them.
                    raise first_error or error from None
                if not shorter.returns_fields:
                    first_error = error
                is_certain = is_certain and shorter.returns_fields and not self._may_quote(request)
                form = shorter
            else:
                if form != self._form and is_certain:
                    log.info("model_form_learned", model=self.name, usage=form.requests_usage, limit=form.limit_name)
                    self._form = form
                return reply

    async def _post(self, body: dict[str, Any]) -> Any:
        # The SDK's generic method returns chunks as parsed JSON. Its typed method builds a model of each chunk, which
        # takes ten times as long and would be converted back at once.
        if not self._streaming:
            return await self._client.post("/chat/completions", cast_to=object, body=body)
        return await self._client.post(
            "/chat/completions", cast_to=object, body=body, stream=True, stream_cls=_EventStream
        )

    def _shorten(self, form: "_Form", error: openai.APIStatusError, request: ModelRequest) -> "_Form | None":
        """Return a form without the part that the server rejects; None if it names none. Each part is omitted once, so
        the attempts end.
        """
        text = str(error.body)
        if self._streaming and form.requests_usage and _USAGE_FIELD in text:
            return replace(form, requests_usage=False)
        if form.limit_name != _NEW_LIMIT and _NEW_LIMIT in text:
            return replace(form, limit_name=_NEW_LIMIT)
        is_shortest = not form.returns_fields or not any(has_fields(message) for message in request.messages)
        return None if is_shortest or is_too_long(_classify_error(error)) else replace(form, returns_fields=False)

    def _may_quote(self, request: ModelRequest) -> bool:
        """Return whether an error message that names an optional part may only quote this request. Its content comes
        from a tenant.
        """
        content = json.dumps(
            [self.name, request.messages, request.tools, request.extra], ensure_ascii=False, default=str
        )
        return any(name in content.lower() for name in (_USAGE_FIELD, _NEW_LIMIT))

    def _build_body(self, request: ModelRequest, form: "_Form") -> dict[str, Any]:
        origin = self._origin if form.returns_fields else None
        messages = [select_fields(message, origin) for message in request.messages]
        body: dict[str, Any] = {"model": self.name, "messages": messages, "stream": self._streaming}
        if self._streaming and form.requests_usage:
            body[_USAGE_FIELD] = {"include_usage": True}
        if request.tools:
            body["tools"] = request.tools
        body |= {**self._extra, **request.extra}
        if form.limit_name != "max_tokens" and "max_tokens" in body:
            body[form.limit_name] = body.pop("max_tokens")
        return body


class _EventStream(AsyncStream[object]):
    """A stream that skips events without data, which gateways send to keep a connection open."""

    async def _iter_events(self) -> AsyncIterator[Any]:
        async for event in super()._iter_events():
            if event.data.strip():
                yield event


@dataclass(frozen=True)
class _Form:
    """The optional parts of a request. `returns_fields`: earlier replies of the endpoint are sent with their other
    fields (reply_fields.py).
    """

    requests_usage: bool = True
    limit_name: str = "max_tokens"
    returns_fields: bool = True


@dataclass
class _Attempts:
    """The attempts of one request. `failed_at`: time of the first failure, monotonic seconds."""

    count: int = 0
    failed_at: float | None = None


class _AttemptFailed(Exception):
    """Raised when one attempt at a reply failed."""

    def __init__(self, failure: AttemptFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def _is_cut(chunk: Chunk) -> bool:
    """Return whether the chunk ends a reply at its limit of tokens."""
    choices = chunk.get("choices")
    return any(
        isinstance(choice, dict) and classify_ending(as_reason(choice.get("finish_reason"))) is ReplyEnding.CUT
        for choice in (choices if isinstance(choices, list) else ())
    )


def _classify_error(error: Exception) -> AttemptFailure:
    """Convert an exception of the SDK to an AttemptFailure."""
    if isinstance(error, _AttemptFailed):
        return error.failure
    if isinstance(error, _BROKEN):
        return AttemptFailure("broken")
    if isinstance(error, openai.APITimeoutError):
        return AttemptFailure("timeout")
    if isinstance(error, openai.APIConnectionError):
        return AttemptFailure("connection")
    if isinstance(error, openai.APIStatusError):
        headers = error.response.headers
        body = _as_error_object(error.body) if _is_json(error.response.text) else error.response.text
        wait_s = parse_retry_after(headers)
        return AttemptFailure(
            "status",
            error.status_code,
            body,
            find_retry_delay(body) if wait_s is None else wait_s,
            is_final=headers.get("x-should-retry") == "false",
        )
    if isinstance(error, openai.APIError):
        return AttemptFailure("in_reply", body=_as_error_object(error.body))
    return AttemptFailure("unknown", name=type(error).__name__)


def _raise_embedded_error(reply: dict[str, Any]) -> None:
    """Raise for an error object that a server sent with status 200: in place of a reply or a chunk, or in one that did
    not end normally. Gateways send one if their server fails during a reply.
    """
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    reason = choice.get("finish_reason")
    if reason and classify_ending(as_reason(reason)) is ReplyEnding.NORMAL:
        return
    error = reply.get("error") or choice.get("error") or (reply if reply.get("object") == "error" else None)
    if error:
        raise _AttemptFailed(AttemptFailure("in_reply", body=_as_error_object(error)))


def _as_error_object(body: object) -> object:
    """Return the error as an object, even if the server sent only a text, or a list with the error."""
    if isinstance(body, list) and body and isinstance(body[0], dict):
        return body[0].get("error") or body[0]
    return {"message": body} if isinstance(body, str) else body


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


async def _read_whole(stream: AsyncStream[object]) -> dict[str, Any] | None:
    """Return the JSON object that a server sent in place of a stream: a whole reply, or an error. None for a stream."""
    if "json" not in stream.response.headers.get("content-type", ""):
        return None
    text = (await stream.response.aread()).strip()
    reply = json.loads(text) if text.startswith(b"{") else None
    return reply if isinstance(reply, dict) else None


def _build_unfinished(
    stream: AsyncStream[object], message: dict[str, Any] | None, *, has_started: bool
) -> AttemptFailure:
    """Return the failure of a reply without an end: a stream that broke off, or a response that was no stream.
    `message`: the last object in the stream that has a message and no choices.
    """
    if message is not None:
        return AttemptFailure("in_reply", body=message)
    is_stream = has_started or "event-stream" in stream.response.headers.get("content-type", "")
    return AttemptFailure("unfinished" if is_stream else "no_chat")


def _find_window(entry: dict[str, Any]) -> int | None:
    """Return the context window in an entry of the list of models. Each kind of server names the field differently."""
    meta = entry.get("meta")
    names = ("max_model_len", "context_window", "context_length", "n_ctx")
    return _first_count(*(entry.get(name) for name in names), meta.get("n_ctx") if isinstance(meta, dict) else None)


def _find_parameters(entry: dict[str, Any]) -> int | None:
    """Return the size of the model, which llama.cpp's server reports."""
    meta = entry.get("meta")
    return _first_count(meta.get("n_params")) if isinstance(meta, dict) else None


def _first_count(*values: object) -> int | None:
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _without_credentials(base_url: str) -> str:
    """Return the URL without user, password and query, for messages."""
    parts = urlsplit(base_url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}".rstrip("/")
