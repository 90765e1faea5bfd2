"""The side that talks to models and users: loop, dialects, dispatch, SDK, CLI."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contract.calls import ExecResult, ToolResult
    from contract.functions import CallContext, tool
    from contract.registry import ToolRegistry
    from orchestrator.agent import Agent, ReActStrategy, RunResult
    from orchestrator.chat_messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from orchestrator.client import ToolClient
    from orchestrator.functions.function_tools import as_tool
    from orchestrator.functions.local_tools import LocalTools
    from orchestrator.functions.openai_tools import convert_to_openai_tool
    from orchestrator.limits import ReActOptions
    from orchestrator.prompts import generate_tool_prompt
    from orchestrator.sessions import Checkpoint, Session
    from orchestrator.tool_agent import CustomAgent, LLMClient, ToolAgent
    from orchestrator.tool_loop import ContextEngine, ToolLoopDeps, create_output_controller, create_tool_registry, run_tool_loop

_HOMES = {
    "AIMessage": "orchestrator.chat_messages",
    "Agent": "orchestrator.agent",
    "CallContext": "contract.functions.call_context",
    "Checkpoint": "orchestrator.sessions",
    "ContextEngine": "orchestrator.tool_loop",
    "CustomAgent": "orchestrator.tool_agent",
    "ExecResult": "contract.calls",
    "HumanMessage": "orchestrator.chat_messages",
    "LLMClient": "orchestrator.tool_agent",
    "LocalTools": "orchestrator.functions.local_tools",
    "ReActOptions": "orchestrator.limits",
    "ReActStrategy": "orchestrator.agent",
    "RunResult": "orchestrator.agent",
    "Session": "orchestrator.sessions",
    "SystemMessage": "orchestrator.chat_messages",
    "ToolAgent": "orchestrator.tool_agent",
    "ToolClient": "orchestrator.client",
    "ToolLoopDeps": "orchestrator.tool_loop",
    "ToolMessage": "orchestrator.chat_messages",
    "ToolRegistry": "contract.registry",
    "ToolResult": "contract.calls",
    "as_tool": "orchestrator.functions.function_tools",
    "convert_to_openai_tool": "orchestrator.functions.openai_tools",
    "create_output_controller": "orchestrator.tool_loop",
    "create_tool_registry": "orchestrator.tool_loop",
    "generate_tool_prompt": "orchestrator.prompts",
    "run_tool_loop": "orchestrator.tool_loop",
    "tool": "contract.functions.function_tools",
}

__all__ = [
    "AIMessage",
    "Agent",
    "CallContext",
    "Checkpoint",
    "ContextEngine",
    "CustomAgent",
    "ExecResult",
    "HumanMessage",
    "LLMClient",
    "LocalTools",
    "ReActOptions",
    "ReActStrategy",
    "RunResult",
    "Session",
    "SystemMessage",
    "ToolAgent",
    "ToolClient",
    "ToolLoopDeps",
    "ToolMessage",
    "ToolRegistry",
    "ToolResult",
    "as_tool",
    "convert_to_openai_tool",
    "create_output_controller",
    "create_tool_registry",
    "generate_tool_prompt",
    "run_tool_loop",
    "tool",
]


def __getattr__(name: str) -> Any:
    # Looked up when asked for: the small processes of this package start without the SDK's imports.
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
