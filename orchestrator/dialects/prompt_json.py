"""The deprecated fallback for models without function calling: schemas in the system prompt, a decision in the text."""

import json
from collections.abc import Sequence

from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import ReplyReader
from toolcrew.orchestrator.dialects.decisions import CALL_FORM, find_tool_decision
from toolcrew.orchestrator.dialects.json_decision import DecisionReader, JsonDecisionDialect
from toolcrew.orchestrator.dialects.prompts import NO_TOOLS, build_system_prompt
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

_HOW_TO_CALL = f"To call a tool, answer with this JSON and nothing else: {CALL_FORM}\nOtherwise answer in plain words."


class PromptJsonDialect(JsonDecisionDialect):
    """A tolerant form of the json dialect: a reply without a valid decision is an ordinary answer.

    Each instance logs a deprecation warning.
    """

    name = "prompt_json"
    max_repairs = 0

    def __init__(self) -> None:
        super().__init__()
        log.warning(
            "function_calling_fallback",
            message=(
                "function_calling=False is deprecated: use a model with native tool calls, or the tags or json dialect"
            ),
        )

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        if not specs:
            return build_system_prompt(instruction, NO_TOOLS)
        schemas = json.dumps([convert_to_openai_tool(spec)["function"] for spec in specs], ensure_ascii=False)
        return build_system_prompt(instruction, f"You have these tools:\n{schemas}\n\n{_HOW_TO_CALL}")

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        return DecisionReader(run, step, find_tool_decision)
