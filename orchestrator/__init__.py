"""The side that talks to models and users: loop, dialects, dispatch, SDK, CLI."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contract.calls import ExecResult, ToolResult
    from contract.functions import CallContext, tool
    from contract.registry import ToolRegistry
    from orchestrator.dialects.prompts import generate_tool_prompt
    from orchestrator.dispatch.sessions import Checkpoint, Session
    from orchestrator.functions.function_tools import as_tool
    from orchestrator.functions.openai_tools import convert_to_openai_tool
    from orchestrator.loop.agent import Agent, ReActStrategy, RunResult
    from orchestrator.loop.chat_messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from orchestrator.loop.limits import ReActOptions
    from orchestrator.sdk.client import ToolClient
    from orchestrator.sdk.local_tools import LocalTools
    from orchestrator.sdk.tool_agent import CustomAgent, LLMClient, ToolAgent
    from orchestrator.sdk.tool_loop import (
        ContextEngine,
        ToolLoopDeps,
        create_output_controller,
        create_tool_registry,
        run_tool_loop,
    )

_HOMES = {
    "AIMessage": "orchestrator.loop.chat_messages",
    "Agent": "orchestrator.loop.agent",
    "CallContext": "contract.functions.call_context",
    "Checkpoint": "orchestrator.dispatch.sessions",
    "ContextEngine": "orchestrator.sdk.tool_loop",
    "CustomAgent": "orchestrator.sdk.tool_agent",
    "ExecResult": "contract.calls",
    "HumanMessage": "orchestrator.loop.chat_messages",
    "LLMClient": "orchestrator.sdk.tool_agent",
    "LocalTools": "orchestrator.sdk.local_tools",
    "ReActOptions": "orchestrator.loop.limits",
    "ReActStrategy": "orchestrator.loop.agent",
    "RunResult": "orchestrator.loop.agent",
    "Session": "orchestrator.dispatch.sessions",
    "SystemMessage": "orchestrator.loop.chat_messages",
    "ToolAgent": "orchestrator.sdk.tool_agent",
    "ToolClient": "orchestrator.sdk.client",
    "ToolLoopDeps": "orchestrator.sdk.tool_loop",
    "ToolMessage": "orchestrator.loop.chat_messages",
    "ToolRegistry": "contract.registry",
    "ToolResult": "contract.calls",
    "as_tool": "orchestrator.functions.function_tools",
    "convert_to_openai_tool": "orchestrator.functions.openai_tools",
    "create_output_controller": "orchestrator.sdk.tool_loop",
    "create_tool_registry": "orchestrator.sdk.tool_loop",
    "generate_tool_prompt": "orchestrator.dialects.prompts",
    "run_tool_loop": "orchestrator.sdk.tool_loop",
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
    # Names are imported at their first use, so that small processes of this package start without the imports of the
    # SDK.
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
