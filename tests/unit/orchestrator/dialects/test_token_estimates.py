"""Estimates of the tokens of a model request."""

from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.dialects.token_estimates import estimate_prompt


def test_a_tool_with_a_parameter_named_type_is_counted() -> None:
    parameters = {"type": "object", "properties": {"type": {"type": "string", "description": "x" * 400}}}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    assert estimate_prompt(ModelRequest([], [tool])) > 50
