"""Aliases with the names that the requirement documents use for the loop and its parts. docs/agents.md describes the
objects behind them.
"""

from collections.abc import Mapping
from typing import Any

from toolcrew.contract.functions.call_context import CallContext
from toolcrew.contract.registry import Tool
from toolcrew.orchestrator.dialects.decisions import parse_tool_decision
from toolcrew.orchestrator.dialects.json_decision import build_tool_system_prompt
from toolcrew.orchestrator.dialects.model import Message, Model
from toolcrew.orchestrator.dialects.prompts import generate_tool_prompt
from toolcrew.orchestrator.models.adapter import BudgetedModel
from toolcrew.orchestrator.sdk.tool_loop import (
    ToolLoopResult,
    create_output_controller,
    create_tool_registry,
    execute_tool_call,
    run_tool_loop,
)

ToolContext = CallContext
createToolRegistry = create_tool_registry
createOutputController = create_output_controller
buildToolSystemPrompt = build_tool_system_prompt
parseToolDecision = parse_tool_decision
executeToolCall = execute_tool_call
generateToolPrompt = generate_tool_prompt

_DEPS = {"contextEngine": "context_engine", "outputController": "output_controller", "toolRegistry": "tool_registry"}


def tool_schema(tool: Tool[Any]) -> dict[str, Any]:
    """Return the JSON Schema that validates the arguments of a tool."""
    return tool.parameters


class ModelGateway:
    """Wraps a model. The method `chat` can be used as the parameter `chat` of `run_tool_loop`."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def chat(self, messages: list[Message]) -> str:
        """Return the content of the model's reply. Raises ModelUnavailable."""
        return (await BudgetedModel(self._model).complete(messages)).text


async def runToolLoop(
    deps: Mapping[str, Any], session_id: str, message: str, options: Mapping[str, Any] | None = None
) -> ToolLoopResult:
    """Run `run_tool_loop` with the spelling of the documents: `deps` has `contextEngine` and so on, `options` has
    `maxToolRounds`.
    """
    parts = {_DEPS.get(name, name): part for name, part in deps.items()}
    limits = {"max_tool_rounds" if name == "maxToolRounds" else name: value for name, value in (options or {}).items()}
    return await run_tool_loop(parts, session_id, message, **limits)
