"""What a framework keeps of a result beside the text that its model reads."""

from typing import Any

from contract.calls import ToolResult


def build_artifact(result: ToolResult) -> dict[str, Any]:
    """Everything of a result but its text, as plain JSON: metadata, error code, clocks, what was cut or killed."""
    return result.model_dump(mode="json", exclude={"output", "error", "name", "blob"})
