"""A dialect by its name."""

from contract.errors import ConfigError
from orchestrator.dialects.base import Dialect
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.tags import TagsDialect
from orchestrator.limits import ReActOptions
from orchestrator.prompts import SMALL_MODEL_HINT

NAMES = ("native", "tags")


def choose_dialect(name: str, options: ReActOptions, *, is_small: bool = False) -> Dialect:
    """The dialect of that name for these options. Raises ConfigError for another name."""
    if name == "native":
        return NativeDialect(enable_tool_action_parsing=options.enable_tool_action_parsing)
    if name == "tags":
        hint = SMALL_MODEL_HINT if is_small else ""
        return TagsDialect(enable_tool_action_parsing=options.enable_tool_action_parsing, closing_hint=hint)
    raise ConfigError(f"no dialect '{name}': choose one of {', '.join(NAMES)}")
