"""The side that talks to models and users: loop, dialects, dispatch, SDK, CLI."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contract.calls import ExecResult, ToolResult
    from contract.registry import ToolRegistry
    from orchestrator.agent import Agent, RunResult
    from orchestrator.client import ToolClient
    from orchestrator.limits import ReActOptions
    from orchestrator.prompts import convert_to_openai_tool, generate_tool_prompt
    from orchestrator.sessions import Session

_HOMES = {
    "Agent": "orchestrator.agent",
    "ExecResult": "contract.calls",
    "ReActOptions": "orchestrator.limits",
    "RunResult": "orchestrator.agent",
    "Session": "orchestrator.sessions",
    "ToolClient": "orchestrator.client",
    "ToolRegistry": "contract.registry",
    "ToolResult": "contract.calls",
    "convert_to_openai_tool": "orchestrator.prompts",
    "generate_tool_prompt": "orchestrator.prompts",
}

__all__ = [
    "Agent",
    "ExecResult",
    "ReActOptions",
    "RunResult",
    "Session",
    "ToolClient",
    "ToolRegistry",
    "ToolResult",
    "convert_to_openai_tool",
    "generate_tool_prompt",
]


def __getattr__(name: str) -> Any:
    # Looked up when asked for: the small processes of this package start without the SDK's imports.
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
