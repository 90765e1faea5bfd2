"""Chooses the model of a run and its dialect.

The model is the one that the caller names, otherwise the one at the configured endpoint, otherwise the embedded small
model.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.model_endpoints import Prices
from toolcrew.contract.run_spec import PROFILE_NAMES
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Model
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.profiles import SMALL, STANDARD, ModelProfile
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.models.capabilities import (
    Capabilities,
    CapabilityCache,
    HasCapabilities,
    HasEndpoint,
    ModelFacts,
    find_capabilities,
)
from toolcrew.orchestrator.models.local_server import CONTEXT_TOKENS
from toolcrew.orchestrator.models.request_limits import RequestLimits
from toolcrew.orchestrator.models.scripted import ALL_CAPABILITIES, ScriptedModel, demo_script
from toolcrew.orchestrator.models.weights import Progress, load_weights

if TYPE_CHECKING:
    from toolcrew.orchestrator.models.openai import OpenAIModel

OpenLimits = Callable[[str, str, str], RequestLimits]
"""Function from address, model and API key to the request limits of the endpoint."""
LOCAL = "local"
SCRIPTED = "scripted"
DIALECT_NAMES = ("native", "tags", "json", "auto")
MAX_SMALL_PARAMETERS = 4_000_000_000
MAX_SMALL_WINDOW = 8192
"""Largest context window, in tokens, that is treated as small: the texts of all tools would leave too little of it for
the conversation.
"""
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
"""The number of parameters in a model's name: `Qwen2.5-Coder-1.5B-Instruct`, `gemma-3-270m`."""

FALLBACK_WARNING = (
    "no model is set, so runs use the small model that toolcrew ships: it has 0.5 billion parameters, and "
    "its answers are often wrong. Set OPENAI_BASE_URL or OPENAI_API_KEY, and TOOLCREW_MODEL, to use another one, or "
    "TOOLCREW_MODEL=local to use this one without a warning"
)

SMALL_CAPABILITIES = Capabilities(
    native_tools=True,
    parallel=True,
    strict=True,
    tool_choice=True,
    json_schema=True,
    context_window=CONTEXT_TOKENS,
    parameters=630_167_424,
)
"""The capabilities of the embedded model. They are a constant because finding them with requests takes ten seconds."""


@dataclass(frozen=True)
class ChosenModel:
    """A model and its settings.

    `profile` None: not known yet; choose_profile chooses. `capabilities` None: not probed yet; find_capabilities
    probes. `is_fallback`: no model was named. `endpoint`: id of the configured endpoint, with its prices and context
    window; None for any other model.
    """

    model: Model
    profile: ModelProfile | None = None
    capabilities: Capabilities | None = None
    is_fallback: bool = False
    endpoint: str | None = None
    prices: Prices | None = None
    context_tokens: int | None = None


def find_shipped(settings: OrchestratorSettings, requested: str | None) -> Literal["local", "scripted"] | None:
    """Return the shipped model (the embedded or the scripted one) that a run with the model `requested` uses; None for
    a model at an endpoint.

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
            f"the model '{name}' is shipped with toolcrew, but OPENAI_BASE_URL is set: unset OPENAI_BASE_URL to use "
            "the shipped model, or rename the server's model"
        )
    return "local" if name == LOCAL else "scripted"


def serves_model(settings: OrchestratorSettings, name: str) -> bool:
    """Return whether a service with these settings can use the model `name` without a configured endpoint of that
    name: the scripted model, or any model at the endpoint of the environment. No service starts the embedded model for
    a name.
    """
    if name in (LOCAL, SCRIPTED):
        return name == SCRIPTED and settings.openai_base_url is None
    return _has_endpoint(settings)


@asynccontextmanager
async def choose_model(
    settings: OrchestratorSettings,
    requested: "Model | ChosenModel | str | None" = None,
    *,
    progress: Progress | None = None,
    open_limits: OpenLimits | None = None,
) -> AsyncIterator[ChosenModel]:
    """Yield the model to use and close it at the end. `open_limits`: the limits of an endpoint that a pool shares.

    `requested` "local" and "scripted" name the shipped models; any other string is a model's name at the endpoint.
    Raises ConfigError when no model can be chosen, and ModelUnavailable when the local server does not start.
    """
    if requested is not None and not isinstance(requested, str):
        yield requested if isinstance(requested, ChosenModel) else ChosenModel(requested)
        return
    name, shipped = requested or settings.model, find_shipped(settings, requested)
    if shipped == SCRIPTED:
        yield ChosenModel(ScriptedModel(demo_script()), STANDARD, ALL_CAPABILITIES)
        return
    if shipped == LOCAL:
        weights = await asyncio.to_thread(
            load_weights, user_file=settings.model_file, cache_dir=settings.model_folder, progress=progress
        )
        from toolcrew.orchestrator.models.local import LocalModelServer

        async with LocalModelServer(weights) as server:
            yield ChosenModel(server.open_model(), SMALL, SMALL_CAPABILITIES, is_fallback=name is None)
        return
    model = _open_endpoint(settings, name)
    if open_limits is not None:
        key = settings.openai_api_key.get_secret_value() if settings.openai_api_key else ""
        model.limits = open_limits(model.address, model.name, key)
    try:
        yield ChosenModel(model)
    finally:
        await model.aclose()


async def find_needed_capabilities(chosen_model: ChosenModel, name: str, cache: CapabilityCache) -> Capabilities | None:
    """Return the known capabilities of the model. Probe it only when the dialect `name` needs them.

    Raises ModelUnavailable.
    """
    if chosen_model.capabilities is not None:
        return chosen_model.capabilities
    if isinstance(chosen_model.model, HasCapabilities):
        return chosen_model.model.capabilities
    if name in ("json", "auto") and isinstance(chosen_model.model, HasEndpoint):
        return await find_capabilities(chosen_model.model, cache)
    return None


async def choose_profile(
    name: str | None, chosen_model: ChosenModel, cache: CapabilityCache
) -> tuple[ModelProfile, str]:
    """Return the profile of that name, and why it was chosen.

    For "auto" and None, a shipped model has its own profile. Another model gets `small` if it has at most
    MAX_SMALL_PARAMETERS parameters (according to its server's list of models, or its name), or a context window of at
    most MAX_SMALL_WINDOW tokens. All others get `standard`. Raises ConfigError for an unknown name.
    """
    if name not in (None, *PROFILE_NAMES):
        raise ConfigError(f"no profile '{name}'. Choose one of {', '.join(PROFILE_NAMES)}.")
    if name in ("small", "standard"):
        return (SMALL if name == "small" else STANDARD), "it was requested"
    if chosen_model.profile is not None:
        return chosen_model.profile, "the model is shipped with toolcrew"
    facts = chosen_model.capabilities or ModelFacts()
    if chosen_model.capabilities is None and isinstance(chosen_model.model, HasEndpoint):
        facts = await cache.describe(chosen_model.model, chosen_model.model.name)
    if facts.context_window is not None and facts.context_window <= MAX_SMALL_WINDOW:
        return SMALL, f"the context window has {facts.context_window} tokens"
    if facts.parameters is not None:
        profile = SMALL if facts.parameters <= MAX_SMALL_PARAMETERS else STANDARD
        return profile, f"the server reports {facts.parameters / 1e9:.2g} billion parameters"
    sizes = [float(size) * (1e9 if unit in "bB" else 1e6) for size, unit in _SIZE.findall(chosen_model.model.name)]
    if sizes:
        profile = SMALL if max(sizes) <= MAX_SMALL_PARAMETERS else STANDARD
        return profile, f"its name says {max(sizes) / 1e9:.2g} billion parameters"
    return STANDARD, "nothing says that the model is small"


def choose_dialect(
    name: str, capabilities: Capabilities | None = None, profile: ModelProfile = STANDARD, *, has_shell: bool = False
) -> Dialect:
    """Return the dialect of that name. `has_shell`: the run offers bash_tool, for which there are worked examples.

    "auto" is tags for a small model with examples: it completes the most jobs with tags, and in the fewest tokens
    (`scripts/bench jobs`). Otherwise it is native if the model calls tools natively or its capabilities are unknown,
    else tags. Raises ConfigError for an unknown name.
    """
    if name == "auto":
        is_best_by_tags = profile.shows_examples and has_shell
        is_native = not is_best_by_tags and (capabilities is None or capabilities.native_tools)
        name = "native" if is_native else "tags"
    if name == "native":
        # A small model gets no fields that it does not need.
        parallel = capabilities is not None and capabilities.parallel and profile is STANDARD
        return NativeDialect(parallel=parallel, profile=profile)
    if name == "tags":
        return TagsDialect(profile=profile)
    if name == "json":
        return JsonDecisionDialect(has_schema=capabilities is not None and capabilities.json_schema, profile=profile)
    raise ConfigError(f"no dialect '{name}'. Choose one of {', '.join(DIALECT_NAMES)}.")


def _has_endpoint(settings: OrchestratorSettings) -> bool:
    return settings.openai_base_url is not None or settings.openai_api_key is not None


def _open_endpoint(settings: OrchestratorSettings, name: str | None) -> "OpenAIModel":
    # Imported here, because the SDK takes a second to import and most commands need no model.
    from toolcrew.orchestrator.models.openai import DEFAULT_BASE_URL, OpenAIModel

    if name is None:
        raise ConfigError(
            "OPENAI_BASE_URL or OPENAI_API_KEY is set, but no model is set: set TOOLCREW_MODEL or use --model"
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
