"""Chooses the model of a run and its dialect.

The model is the named one, else the one at the configured endpoint, else the embedded small one.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from contract.errors import ConfigError
from orchestrator.dialects.base import Dialect
from orchestrator.dialects.json_decision import JsonDecisionDialect
from orchestrator.dialects.model import Model
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.prompts import DEFAULT_INSTRUCTION, SMALL_MODEL_HINT, SMALL_MODEL_JSON_HINT
from orchestrator.dialects.tags import TagsDialect
from orchestrator.models.capabilities import (
    Capabilities,
    CapabilityCache,
    HasEndpoint,
    KnowsCapabilities,
    find_capabilities,
)
from orchestrator.models.local_server import CONTEXT_TOKENS
from orchestrator.models.scripted import EVERYTHING, ScriptedModel, demo_script
from orchestrator.models.weights import Progress, load_weights
from orchestrator.settings import OrchestratorSettings

if TYPE_CHECKING:
    from orchestrator.models.openai import OpenAIModel

LOCAL = "local"
SCRIPTED = "scripted"
SMALL_INSTRUCTION = (
    "You are a helpful assistant. Use bash_tool to answer. After the tool result, answer in one short sentence."
)
DIALECT_NAMES = ("native", "tags", "json", "auto")
SMALL_TOOLS = ("bash_tool",)
"""A model with 0.5 billion parameters cannot choose between tools. With a second tool it calculates without tools, and
wrongly.
"""

FALLBACK_WARNING = (
    "no model is named, so runs use the small model that is shipped with toolcrew: it has 0.5 billion parameters, and "
    "its answers are often wrong. Set OPENAI_BASE_URL or OPENAI_API_KEY, and TOOLCREW_MODEL, to use another one, or "
    "TOOLCREW_MODEL=local to use this one without a warning"
)

SMALL_CAPABILITIES = Capabilities(
    native_tools=True, parallel=True, strict=True, tool_choice=True, json_schema=True, context_window=CONTEXT_TOKENS
)
"""The result of probing the embedded server, as a constant because the probe takes ten seconds there."""


@dataclass(frozen=True)
class ChosenModel:
    """A model and its settings.

    `is_small`: it needs the recipe of docs/agents.md. `tools`: the tools that it can choose between.
    `capabilities` None: not probed yet; find_capabilities probes. `is_fallback`: no model was named.
    """

    model: Model
    instruction: str = DEFAULT_INSTRUCTION
    is_small: bool = False
    tools: tuple[str, ...] = ("all",)
    capabilities: Capabilities | None = None
    is_fallback: bool = False


def find_shipped(settings: OrchestratorSettings, requested: str | None) -> Literal["local", "scripted"] | None:
    """Return the shipped model that a run with the model `requested` uses; None for a model at an endpoint.

    Raises ConfigError for the name of a shipped model while OPENAI_BASE_URL is set: the server may have a model of that
    name.
    """
    name = requested or settings.model
    if name is None:
        return None if _has_endpoint(settings) else "local"
    if name not in (LOCAL, SCRIPTED):
        return None
    if settings.openai_base_url is not None:
        raise ConfigError(
            f"the model '{name}' is shipped with toolcrew, and OPENAI_BASE_URL names a server, so it is not clear "
            "which one is meant: unset OPENAI_BASE_URL to use the shipped model, or give the server's model another "
            "name"
        )
    return "local" if name == LOCAL else "scripted"


@asynccontextmanager
async def choose_model(
    settings: OrchestratorSettings,
    requested: "Model | ChosenModel | str | None" = None,
    *,
    progress: Progress | None = None,
) -> AsyncIterator[ChosenModel]:
    """Yield the model to use and close it at the end.

    `requested` "local" and "scripted" name the shipped models; any other string is a model's name at the endpoint.
    Raises ConfigError when no model can be chosen, and ModelUnavailable when the local server does not start.
    """
    if requested is not None and not isinstance(requested, str):
        yield requested if isinstance(requested, ChosenModel) else ChosenModel(requested)
        return
    name, shipped = requested or settings.model, find_shipped(settings, requested)
    if shipped == SCRIPTED:
        yield ChosenModel(ScriptedModel(demo_script()), is_small=True, capabilities=EVERYTHING)
        return
    if shipped == LOCAL:
        weights = await asyncio.to_thread(
            load_weights, user_file=settings.model_file, cache_dir=settings.model_folder, progress=progress
        )
        from orchestrator.models.local import LocalModelServer

        async with LocalModelServer(weights) as server:
            yield ChosenModel(
                server.open_model(),
                SMALL_INSTRUCTION,
                is_small=True,
                tools=SMALL_TOOLS,
                capabilities=SMALL_CAPABILITIES,
                is_fallback=name is None,
            )
        return
    model = _open_endpoint(settings, name)
    try:
        yield ChosenModel(model)
    finally:
        await model.aclose()


async def find_needed_capabilities(chosen: ChosenModel, name: str, cache: CapabilityCache) -> Capabilities | None:
    """Return the known capabilities of the model. Probe it only when the dialect `name` needs them.

    Raises ModelUnavailable.
    """
    if chosen.capabilities is not None:
        return chosen.capabilities
    if isinstance(chosen.model, KnowsCapabilities):
        return chosen.model.capabilities
    if name in ("json", "auto") and isinstance(chosen.model, HasEndpoint):
        return await find_capabilities(chosen.model, cache)
    return None


def choose_dialect(name: str, capabilities: Capabilities | None = None, *, is_small: bool = False) -> Dialect:
    """Return the dialect of that name.

    "auto" is native for a model that calls tools natively or whose capabilities are unknown, else tags. Raises
    ConfigError for an unknown name.
    """
    if name == "auto":
        name = "native" if capabilities is None or capabilities.native_tools else "tags"
    if name == "native":
        # A small model gets no fields that it does not need.
        parallel = capabilities is not None and capabilities.parallel and not is_small
        return NativeDialect(parallel=parallel)
    if name == "tags":
        return TagsDialect(closing_hint=SMALL_MODEL_HINT if is_small else "", worked_example=is_small)
    if name == "json":
        hint = SMALL_MODEL_JSON_HINT if is_small else ""
        return JsonDecisionDialect(
            has_schema=capabilities is not None and capabilities.json_schema, closing_hint=hint, worked_example=is_small
        )
    raise ConfigError(f"no dialect '{name}'. Choose one of {', '.join(DIALECT_NAMES)}.")


def _has_endpoint(settings: OrchestratorSettings) -> bool:
    return settings.openai_base_url is not None or settings.openai_api_key is not None


def _open_endpoint(settings: OrchestratorSettings, name: str | None) -> "OpenAIModel":
    # Imported here, because the SDK takes a second to import and most commands need no model.
    from orchestrator.models.openai import DEFAULT_BASE_URL, OpenAIModel

    if name is None:
        raise ConfigError(
            "OPENAI_BASE_URL or OPENAI_API_KEY is set but no model is named: set TOOLCREW_MODEL or give --model"
        )
    if not _has_endpoint(settings):
        raise ConfigError(
            f"no endpoint for the model '{name}': set OPENAI_API_KEY, or OPENAI_BASE_URL for a server of your own; "
            "--model local needs neither"
        )
    key = settings.openai_api_key.get_secret_value() if settings.openai_api_key else None
    return OpenAIModel(
        name,
        settings.openai_base_url or DEFAULT_BASE_URL,
        key,
        settings.model_timeout_s,
        retries=settings.model_retries,
        streaming=settings.model_streaming,
    )
