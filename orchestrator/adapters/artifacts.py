"""The part of a tool's result that other frameworks call its artifact: everything except the text for the model."""

from typing import Any

from toolcrew.contract.calls import ToolResult


def build_artifact(result: ToolResult) -> dict[str, Any]:
    """Return everything of a result except its text, as plain JSON: metadata, error code, clocks, truncation, kills."""
    return result.model_dump(mode="json", exclude={"output", "error", "name", "blob"})
