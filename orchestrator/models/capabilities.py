"""Finds the capabilities of a model's server with a few small requests, and caches them per endpoint and model."""

import asyncio
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, ValidationError

from toolcrew.contract.errors import ContextWindowExceeded, ModelRefused
from toolcrew.orchestrator.dialects.finish_reasons import ReplyEnding, classify_ending
from toolcrew.orchestrator.dialects.model import Model, ModelRequest
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler, NativeReply
from toolcrew.orchestrator.dialects.thinking import THINK
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

VERSION = 2
"""Version of the cache files. It changes with their format and with the probes (the test requests). A file with another
version is ignored.
"""
MAX_REQUESTS = 5
LIFETIME_S = 30 * 24 * 3600.0
MAX_ENTRIES = 2000
"""Limit of the models that a cache holds in memory."""
LIST_TIMEOUT_S = 10.0
"""Seconds that a run waits for its server's list of models."""
REPLY_TOKENS = 256
# The higher limit is for models that write reasoning before the reply.
THINKING_TOKENS = 4096


@dataclass(frozen=True)
class Capabilities:
    """The features that a server supports for one model.

    `native_tools`: the model really returns calls. `parallel`, `strict`, `tool_choice`: the server accepts the fields
    `parallel_tool_calls`, `strict` of a function and `tool_choice: "required"`. `json_schema`: replies follow a
    `response_format`. `context_window`: tokens. `parameters`: size of the model.
    """

    native_tools: bool = False
    parallel: bool = False
    strict: bool = False
    tool_choice: bool = False
    json_schema: bool = False
    context_window: int | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model from the list of models of its server. None: the list does not contain the fact.
    `context_window`: in tokens.
    """

    context_window: int | None = None
    parameters: int | None = None


@runtime_checkable
class HasCapabilities(Protocol):
    """A model whose capabilities are known without a probe."""

    @property
    def capabilities(self) -> Capabilities: ...


@runtime_checkable
class HasEndpoint(Protocol):
    """A model whose capabilities may be cached. `address` names its server, without credentials."""

    @property
    def address(self) -> str: ...

    async def describe(self) -> "ModelFacts | None": ...

    def without_fallback(self) -> Model:
        """Return a model that alone answers its requests: a fallback may have other capabilities."""
        ...


async def find_capabilities(model: Model, cache: "CapabilityCache") -> Capabilities:
    """Return the capabilities from the model itself, from the cache or from a probe.

    Raises ModelUnavailable when the model cannot be reached.
    """
    if isinstance(model, HasCapabilities):
        return model.capabilities
    if isinstance(model, HasEndpoint):
        return await cache.find(model.address, model.name, lambda: probe(model.without_fallback()))
    return await probe(model)


# --- Probes -----------------------------------------------------------------------------------------------------------

ECHO_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
ECHO_PROMPT = "Call the tool echo with the text: hello"
# The prompt does not mention JSON, so that a server that ignores the schema is detected.
SCHEMA_PROMPT = "Say hello."
# Field -> pattern of its names in the error messages of servers.
_FIELD_PATTERNS = {
    "parallel": re.compile(r"parallel", re.IGNORECASE),
    "strict": re.compile(r"\bstrict\b|additionalProperties", re.IGNORECASE),
    "tool_choice": re.compile(r"tool[_ ]choice|\brequired\b", re.IGNORECASE),
}
_NO_TOOLS = re.compile(r"support\w* (?:tool|function)|tools? (?:is|are|param)|--jinja|tool use", re.IGNORECASE)


async def probe(model: Model) -> Capabilities:
    """Probe the model with at most MAX_REQUESTS requests.

    Raises ModelUnavailable when it cannot be reached. A refused request is a result, not an error.
    """
    prober = _Prober(model)
    calls_tools, fields = await _probe_tools(prober)
    facts = await model.describe() if isinstance(model, HasEndpoint) else None
    facts = facts or ModelFacts()
    return Capabilities(
        native_tools=calls_tools,
        parallel=calls_tools and "parallel" in fields,
        strict=calls_tools and "strict" in fields,
        tool_choice=calls_tools and "tool_choice" in fields,
        json_schema=await _probe_schema(prober),
        context_window=facts.context_window,
        parameters=facts.parameters,
    )


class _Prober:
    """Sends probes and counts the remaining requests."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._max_tokens = REPLY_TOKENS
        self.remaining = MAX_REQUESTS

    async def send(self, prompt: str, tools: list[dict[str, Any]], extra: Mapping[str, Any]) -> NativeReply:
        """Return the reply. Repeat the request once with a higher token limit if the reply was cut while the model was
        still reasoning, and requests remain.
        """
        reply = await self._send_once(prompt, tools, extra)
        # A small model that repeats itself writes text to any limit, which takes minutes.
        is_reasoning = not reply.text.strip() or reply.text.startswith(THINK)
        is_cut = classify_ending(reply.finish_reason) is ReplyEnding.CUT and is_reasoning and not reply.calls
        if is_cut and self._max_tokens == REPLY_TOKENS and self.remaining > 0:
            self._max_tokens = THINKING_TOKENS
            reply = await self._send_once(prompt, tools, extra)
        return reply

    async def _send_once(self, prompt: str, tools: list[dict[str, Any]], extra: Mapping[str, Any]) -> NativeReply:
        self.remaining -= 1
        assembler = NativeCallAssembler()
        request = ModelRequest([{"role": "user", "content": prompt}], tools, {"max_tokens": self._max_tokens, **extra})
        async for chunk in self._model.stream(request):
            assembler.feed(chunk)
        return assembler.finish(strict=False)


async def _probe_tools(prober: _Prober) -> tuple[bool, frozenset[str]]:
    """Return whether the model returns tool calls, and which optional fields the server accepts.

    Starts with all fields and removes those that a refusal names.
    """
    fields = frozenset(_FIELD_PATTERNS)
    # The last request is reserved for the schema probe.
    while prober.remaining > 1:
        try:
            reply = await prober.send(ECHO_PROMPT, [_echo_tool("strict" in fields)], _build_extra(fields))
        except ContextWindowExceeded:
            return False, fields
        except ModelRefused as error:
            narrower = _narrow(fields, error.detail)
            if narrower is None:
                return False, fields
            fields = narrower
            continue
        if not any(call.name == "echo" for call in reply.calls):
            return False, fields
        return await _accepts_plain_tools(prober, fields), fields
    return False, fields


async def _accepts_plain_tools(prober: _Prober, fields: frozenset[str]) -> bool:
    """Return whether tools may be sent without `tool_choice`, as every step of a run does.

    Some servers accept a forced call but reject an optional one.
    """
    if "tool_choice" not in fields or prober.remaining < 1:
        return True
    try:
        await prober.send(ECHO_PROMPT, [_echo_tool("strict" in fields)], _build_extra(fields - {"tool_choice"}))
    except ModelRefused:
        return False
    return True


async def _probe_schema(prober: _Prober) -> bool:
    if prober.remaining < 1:
        return False
    schema = {"name": "echo", "schema": ECHO_PARAMETERS, "strict": True}
    try:
        reply = await prober.send(
            SCHEMA_PROMPT, [], {"response_format": {"type": "json_schema", "json_schema": schema}}
        )
    except (ModelRefused, ContextWindowExceeded):
        return False
    try:
        answer = json.loads(reply.text)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and set(answer) == {"text"} and isinstance(answer["text"], str)


def _narrow(fields: frozenset[str], detail: str) -> frozenset[str] | None:
    """Return the fields without those that the refusal names, or no fields when it names none.

    Returns None when the server refuses tools themselves.
    """
    refused = {name for name, pattern in _FIELD_PATTERNS.items() if name in fields and pattern.search(detail)}
    if refused:
        return fields - refused
    return None if not fields or _NO_TOOLS.search(detail) else frozenset()


def _echo_tool(is_strict: bool) -> dict[str, Any]:
    # Some servers reject `additionalProperties` as unknown; in strict mode it is required.
    parameters = {name: value for name, value in ECHO_PARAMETERS.items() if is_strict or name != "additionalProperties"}
    function: dict[str, Any] = {"name": "echo", "description": "Returns the text.", "parameters": parameters}
    return {"type": "function", "function": {**function, "strict": True} if is_strict else function}


def _build_extra(fields: frozenset[str]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if "tool_choice" in fields:
        extra["tool_choice"] = "required"
    if "parallel" in fields:
        extra["parallel_tool_calls"] = True
    return extra


# --- Cache ------------------------------------------------------------------------------------------------------------


class _Entry(BaseModel):
    """One file of the cache. `saved_at` is in seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: int
    address: str
    model: str
    saved_at: float
    capabilities: Capabilities


class CapabilityCache:
    """Capabilities by endpoint and model, in memory and in one file each in `folder` (None: in memory only).

    Use it in one event loop. A file that is unreadable, has another version or is older than LIFETIME_S is ignored. If
    a file cannot be written, the entry stays in memory only.
    """

    def __init__(self, folder: Path | None, *, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = now
        self._entries: dict[str, _Entry] = {}
        self._facts: dict[tuple[str, str], ModelFacts] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def _lock(self, key: str) -> asyncio.Lock:
        """Return the lock of an entry. At MAX_ENTRIES, forget everything: tenants may name any number of models."""
        if key not in self._locks and len(self._locks) >= MAX_ENTRIES:
            self._locks = {name: lock for name, lock in self._locks.items() if lock.locked()}
            self._entries.clear()
            self._facts.clear()
        return self._locks.setdefault(key, asyncio.Lock())

    async def describe(self, model: HasEndpoint, name: str) -> ModelFacts:
        """Return the facts about a model from its server's list of models, which is read once. Returns no facts while
        the server does not answer.
        """
        key = (model.address, name)
        async with self._lock(f"facts of {key}"):
            if key not in self._facts:
                try:
                    async with asyncio.timeout(LIST_TIMEOUT_S):
                        facts = await model.describe()
                except TimeoutError:
                    facts = None
                if facts is None:
                    return ModelFacts()
                self._facts[key] = facts
            return self._facts[key]

    async def find(self, address: str, model: str, probe_model: Callable[[], Awaitable[Capabilities]]) -> Capabilities:
        """Return the capabilities of the model from the cache, or from `probe_model`.

        Concurrent callers share one probe. An exception of the probe is raised and not cached.
        """
        key = hashlib.sha256(f"{address}\n{model}".encode()).hexdigest()
        async with self._lock(key):
            entry = self._entries.get(key) or await asyncio.to_thread(self._load, key)
            if entry is None or not self._is_fresh(entry):
                calls_tools = await probe_model()
                entry = _Entry(
                    version=VERSION, address=address, model=model, saved_at=self._now(), capabilities=calls_tools
                )
                await asyncio.to_thread(self._save, key, entry)
            self._entries[key] = entry
            return entry.capabilities

    def _is_fresh(self, entry: _Entry) -> bool:
        # A date in the future comes from a wrong clock. Such an entry would never expire.
        return 0 <= self._now() - entry.saved_at <= LIFETIME_S

    def _path(self, key: str) -> Path | None:
        return self._folder / f"{key[:32]}.json" if self._folder is not None else None

    def _load(self, key: str) -> _Entry | None:
        path = self._path(key)
        try:
            entry = _Entry.model_validate_json(path.read_bytes()) if path is not None else None
        except (OSError, ValidationError):
            return None
        return entry if entry is not None and entry.version == VERSION else None

    def _save(self, key: str, entry: _Entry) -> None:
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(entry.model_dump_json(indent=2))
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("capabilities_not_saved", path=str(path), reason=type(error).__name__)
