"""What a model's server can do, found out by a few tiny requests and remembered for each endpoint and model."""

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

from contract.errors import ContextWindowExceeded, ModelRefused
from orchestrator.dialects.model import Model, ModelRequest
from orchestrator.dialects.native_assembler import NativeCallAssembler, Reply
from telemetry.logs import get_logger

log = get_logger(__name__)

VERSION = 1
"""Of the cache's files and of the questions: answers to other ones are asked for again."""
MAX_REQUESTS = 5
LIFETIME_S = 30 * 24 * 3600.0
REPLY_TOKENS = 256
# The second bound is for models that think before they speak.
THINKING_TOKENS = 4096


@dataclass(frozen=True)
class Capabilities:
    """What may be asked of a server for one model.

    `native_tools`: calls really come back. `parallel`, `strict`, `tool_choice`: the fields `parallel_tool_calls`,
    `strict` of a function and `tool_choice: "required"` may be sent. `json_schema`: replies follow a `response_format`.
    `context_window`: tokens.
    """

    native_tools: bool = False
    parallel: bool = False
    strict: bool = False
    tool_choice: bool = False
    json_schema: bool = False
    context_window: int | None = None


@runtime_checkable
class KnowsCapabilities(Protocol):
    """A model that need not be asked."""

    @property
    def capabilities(self) -> Capabilities: ...


@runtime_checkable
class HasEndpoint(Protocol):
    """A model whose capabilities may be remembered: `address` names its server, without credentials."""

    @property
    def address(self) -> str: ...

    async def find_context_window(self) -> int | None: ...


async def find_capabilities(model: Model, cache: "CapabilityCache") -> Capabilities:
    """Of the model's own knowledge, of the cache, or of a probe. Raises ModelUnavailable when the model cannot be
    asked.
    """
    if isinstance(model, KnowsCapabilities):
        return model.capabilities
    if isinstance(model, HasEndpoint):
        return await cache.find(model.address, model.name, lambda: probe(model))
    return await probe(model)


# --- The questions ----------------------------------------------------------------------------------------------------

ECHO_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
ECHO_PROMPT = "Call the tool echo with the text: hello"
# Without a word of JSON: a server that ignores the schema shall be found out.
SCHEMA_PROMPT = "Say hello."
# What a refusal may blame -> how servers name it. The first that is found counts; `tools` last, whose name the others
# contain.
_BLAMED = {
    "parallel": re.compile(r"parallel", re.IGNORECASE),
    "strict": re.compile(r"\bstrict\b|additionalProperties", re.IGNORECASE),
    "tool_choice": re.compile(r"tool[_ ]choice|\brequired\b", re.IGNORECASE),
}
_NO_TOOLS = re.compile(r"support\w* (?:tool|function)|tools? (?:is|are|param)|--jinja|tool use", re.IGNORECASE)


async def probe(model: Model) -> Capabilities:
    """Ask the model, by MAX_REQUESTS requests at most. Raises ModelUnavailable when it cannot be asked; a refusal is an
    answer.
    """
    questions = _Questions(model)
    found, fields = await _probe_tools(questions)
    return Capabilities(
        native_tools=found,
        parallel=found and "parallel" in fields,
        strict=found and "strict" in fields,
        tool_choice=found and "tool_choice" in fields,
        json_schema=await _probe_schema(questions),
        context_window=await model.find_context_window() if isinstance(model, HasEndpoint) else None,
    )


class _Questions:
    """Asks the model, and counts."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._max_tokens = REPLY_TOKENS
        self.left = MAX_REQUESTS

    async def ask(self, prompt: str, tools: list[dict[str, Any]], extra: Mapping[str, Any]) -> Reply:
        """The reply; one that is cut is asked for again, longer, as often as requests are left."""
        reply = await self._ask_once(prompt, tools, extra)
        if reply.finish_reason == "length" and self._max_tokens == REPLY_TOKENS and self.left > 0:
            self._max_tokens = THINKING_TOKENS
            reply = await self._ask_once(prompt, tools, extra)
        return reply

    async def _ask_once(self, prompt: str, tools: list[dict[str, Any]], extra: Mapping[str, Any]) -> Reply:
        self.left -= 1
        assembler = NativeCallAssembler()
        request = ModelRequest([{"role": "user", "content": prompt}], tools, {"max_tokens": self._max_tokens, **extra})
        async for chunk in self._model.stream(request):
            assembler.feed(chunk)
        return assembler.finish(strict=False)


async def _probe_tools(questions: _Questions) -> tuple[bool, frozenset[str]]:
    """(do calls come back, the fields that the server takes). Begins with all fields and drops those that a refusal
    names.
    """
    fields = frozenset(_BLAMED)
    # One request is the schema's.
    while questions.left > 1:
        try:
            reply = await questions.ask(ECHO_PROMPT, [_echo_tool("strict" in fields)], _build_extra(fields))
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
        return await _takes_plain_tools(questions, fields), fields
    return False, fields


async def _takes_plain_tools(questions: _Questions, fields: frozenset[str]) -> bool:
    """Whether tools may be sent without a choice, as every step of a run does: a server may force a call and yet refuse
    to leave it open.
    """
    if "tool_choice" not in fields or questions.left < 1:
        return True
    try:
        await questions.ask(ECHO_PROMPT, [_echo_tool("strict" in fields)], _build_extra(fields - {"tool_choice"}))
    except ModelRefused:
        return False
    return True


async def _probe_schema(questions: _Questions) -> bool:
    if questions.left < 1:
        return False
    schema = {"name": "echo", "schema": ECHO_PARAMETERS, "strict": True}
    try:
        reply = await questions.ask(
            SCHEMA_PROMPT, [], {"response_format": {"type": "json_schema", "json_schema": schema}}
        )
    except (ModelRefused, ContextWindowExceeded):
        return False
    try:
        answer = json.loads(reply.text)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and set(answer) == {"text"} and isinstance(answer["text"], str)


def _narrow(fields: frozenset[str], said: str) -> frozenset[str] | None:
    """The fields without those that the refusal names; without all when it names none; None when tools themselves are
    refused.
    """
    blamed = {name for name, pattern in _BLAMED.items() if name in fields and pattern.search(said)}
    if blamed:
        return fields - blamed
    return None if not fields or _NO_TOOLS.search(said) else frozenset()


def _echo_tool(is_strict: bool) -> dict[str, Any]:
    # Some servers refuse the schema's closing word as an unknown one; strict ones demand it.
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


# --- The memory -------------------------------------------------------------------------------------------------------


class _Entry(BaseModel):
    """One file of the cache. `saved_at`: seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: int
    address: str
    model: str
    saved_at: float
    capabilities: Capabilities


class CapabilityCache:
    """Capabilities by endpoint and model, in memory and as one file each in `folder` (None: in memory only). For one
    event loop.

    A file that cannot be read, of another version or older than LIFETIME_S counts as none. What cannot be written is
    not remembered.
    """

    def __init__(self, folder: Path | None, *, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = now
        self._known: dict[str, _Entry] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def find(self, address: str, model: str, ask: Callable[[], Awaitable[Capabilities]]) -> Capabilities:
        """What is known of that model, else what `ask` (a probe) finds. Callers at the same time ask once; what `ask`
        raises is not kept.
        """
        key = hashlib.sha256(f"{address}\n{model}".encode()).hexdigest()
        async with self._locks.setdefault(key, asyncio.Lock()):
            entry = self._known.get(key) or await asyncio.to_thread(self._load, key)
            if entry is None or not self._is_fresh(entry):
                found = await ask()
                entry = _Entry(version=VERSION, address=address, model=model, saved_at=self._now(), capabilities=found)
                await asyncio.to_thread(self._save, key, entry)
            self._known[key] = entry
            return entry.capabilities

    def _is_fresh(self, entry: _Entry) -> bool:
        # A date in the future is a clock that was wrong: it would never expire.
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
