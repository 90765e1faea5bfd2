"""Profiles: the tools, texts and repairs that suit a small model or a standard one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolcrew.contract.specs import ToolSpec

SHELL_TOOL = "bash_tool"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


@dataclass(frozen=True)
class ModelProfile:
    """Settings for the use of a model.

    `dialect`: used if no dialect is configured. `tools`: offered to the model if the caller names no tools. `is_brief`:
    the model sees the first sentence of each text, and no parameters with `"x-hidden": "small"`; its calls may still
    use them. `shows_examples`: the prompt has worked examples. `shows_files`: a request without an absolute path ends
    with a list of the files in the working directory. `result_hint` ends a message with results, unless the call
    failed. `repairs_replies`: a command in a code block counts as a call, and an answer without any call is answered
    with a reminder, each only until the model has called a tool itself. `max_equal_failures`: the run stops when
    exactly the same call has failed this number of times; None: never. `sampling`: fields of each request that does not
    set them. `restarts`: after the same call has failed twice, requests omit the steps so far and name the call
    instead, with the fields of `restart_sampling`.
    """

    name: Literal["small", "standard"]
    dialect: Literal["native", "auto"] = "native"
    tools: tuple[str, ...] = ("all",)
    instruction: str = ""
    is_brief: bool = False
    shows_examples: bool = False
    shows_files: bool = False
    result_hint: str = ""
    repairs_replies: bool = False
    max_equal_failures: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    restarts: bool = False
    restart_sampling: Mapping[str, Any] = field(default_factory=dict)

    def present(self, specs: Sequence[ToolSpec]) -> Sequence[ToolSpec]:
        """Return the tools as the model sees them."""
        return [_shorten(spec) for spec in specs] if self.is_brief else specs


STANDARD = ModelProfile("standard")
SMALL = ModelProfile(
    "small",
    dialect="auto",
    # A model with 0.5 billion parameters cannot choose between tools. With a second tool it calculates without tools,
    # and wrongly.
    tools=(SHELL_TOOL,),
    instruction="You are an assistant with a Linux shell. Use bash_tool to answer.",
    is_brief=True,
    shows_examples=True,
    # Without the list, a small model guesses the names of files and the columns of tables.
    shows_files=True,
    # A hint that leaves the choice ("answer, or call the tool again") makes a small model repeat its call, or the hint.
    result_hint="Now answer the user in one plain sentence.",
    repairs_replies=True,
    max_equal_failures=4,
    # A small model that sees its failed call in the conversation repeats the call, with any text about the failure.
    restarts=True,
    restart_sampling={"temperature": 0.7},
    # Sampling makes a small model write wrong commands. The limit ends a reply that repeats itself.
    sampling={"temperature": 0, "max_tokens": 512},
)


def _shorten(spec: ToolSpec) -> ToolSpec:
    properties: dict[str, Any] = spec.parameters.get("properties") or {}  # type: ignore[assignment]
    visible = {name: _shorten_schema(schema) for name, schema in properties.items() if not _is_hidden(schema)}
    parameters = {**spec.parameters, "properties": visible} if properties else spec.parameters
    return spec.model_copy(update={"description": _first_sentence(spec.description), "parameters": parameters})


def _is_hidden(schema: Any) -> bool:
    return isinstance(schema, dict) and bool(schema.get("x-hidden"))


def _shorten_schema(schema: Any) -> Any:
    if not isinstance(schema, dict) or not isinstance(schema.get("description"), str):
        return schema
    return {**schema, "description": _first_sentence(schema["description"])}


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(" ".join(text.split()), maxsplit=1)[0]
