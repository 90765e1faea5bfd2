"""A dialect by its name, and what must be known of the model for it."""

from dataclasses import replace

from contract.errors import ConfigError
from orchestrator.dialects.base import Dialect
from orchestrator.dialects.json_decision import JsonDecisionDialect
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.tags import TagsDialect
from orchestrator.loop.limits import ReActOptions
from orchestrator.loop.prompts import SMALL_MODEL_HINT, SMALL_MODEL_JSON_HINT
from orchestrator.models.capabilities import (
    Capabilities,
    CapabilityCache,
    HasEndpoint,
    KnowsCapabilities,
    find_capabilities,
)
from orchestrator.models.choice import ChosenModel
from orchestrator.settings import OrchestratorSettings

NAMES = ("native", "tags", "json", "auto")


async def know_model(chosen: ChosenModel, name: str, cache: CapabilityCache) -> Capabilities | None:
    """What is known of the model; it is asked only when the dialect `name` needs to know and nobody does. Raises
    ModelUnavailable.
    """
    if chosen.capabilities is not None:
        return chosen.capabilities
    if isinstance(chosen.model, KnowsCapabilities):
        return chosen.model.capabilities
    if name in ("json", "auto") and isinstance(chosen.model, HasEndpoint):
        return await find_capabilities(chosen.model, cache)
    return None


def with_window(options: ReActOptions, settings: OrchestratorSettings, known: Capabilities | None) -> ReActOptions:
    """The options with the model's context window, where they do not name one: what the settings say, else what the
    server told.
    """
    told = known.context_window if known is not None else None
    return replace(options, context_tokens=options.context_tokens or settings.model_context_tokens or told)


def choose_dialect(name: str, known: Capabilities | None = None, *, is_small: bool = False) -> Dialect:
    """The dialect of that name. "auto" is native for a model that calls tools natively, or of which nothing is known,
    else tags. Raises ConfigError for another name."""
    if name == "auto":
        name = "native" if known is None or known.native_tools else "tags"
    if name == "native":
        # A small model is told nothing that it does not need.
        parallel = known is not None and known.parallel and not is_small
        return NativeDialect(parallel=parallel)
    if name == "tags":
        return TagsDialect(closing_hint=SMALL_MODEL_HINT if is_small else "", worked_example=is_small)
    if name == "json":
        hint = SMALL_MODEL_JSON_HINT if is_small else ""
        return JsonDecisionDialect(
            has_schema=known is not None and known.json_schema, closing_hint=hint, worked_example=is_small
        )
    raise ConfigError(f"no dialect '{name}': choose one of {', '.join(NAMES)}")
