"""Runs the tools of LLM agents at scale. This module has the public names; each is imported at first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolcrew.contract.calls import ExecResult, ToolResult
    from toolcrew.contract.functions import CallContext, tool
    from toolcrew.contract.registry import ToolRegistry
    from toolcrew.orchestrator.dialects.prompts import generate_tool_prompt
    from toolcrew.orchestrator.dispatch.sessions import Checkpoint, Session
    from toolcrew.orchestrator.functions.function_tools import as_tool
    from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool
    from toolcrew.orchestrator.loop.agent import Agent, ReActStrategy, RunResult
    from toolcrew.orchestrator.loop.chat_messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from toolcrew.orchestrator.loop.limits import ReActOptions
    from toolcrew.orchestrator.sdk.client import ToolClient
    from toolcrew.orchestrator.sdk.local_tools import LocalTools
    from toolcrew.orchestrator.sdk.tool_agent import CustomAgent, LLMClient, ToolAgent
    from toolcrew.orchestrator.sdk.tool_loop import (
        ContextEngine,
        ToolLoopDeps,
        create_output_controller,
        create_tool_registry,
        run_tool_loop,
    )

_HOMES = {
    "AIMessage": "toolcrew.orchestrator.loop.chat_messages",
    "Agent": "toolcrew.orchestrator.loop.agent",
    "CallContext": "toolcrew.contract.functions.call_context",
    "Checkpoint": "toolcrew.orchestrator.dispatch.sessions",
    "ContextEngine": "toolcrew.orchestrator.sdk.tool_loop",
    "CustomAgent": "toolcrew.orchestrator.sdk.tool_agent",
    "ExecResult": "toolcrew.contract.calls",
    "HumanMessage": "toolcrew.orchestrator.loop.chat_messages",
    "LLMClient": "toolcrew.orchestrator.sdk.tool_agent",
    "LocalTools": "toolcrew.orchestrator.sdk.local_tools",
    "ReActOptions": "toolcrew.orchestrator.loop.limits",
    "ReActStrategy": "toolcrew.orchestrator.loop.agent",
    "RunResult": "toolcrew.orchestrator.loop.agent",
    "Session": "toolcrew.orchestrator.dispatch.sessions",
    "SystemMessage": "toolcrew.orchestrator.loop.chat_messages",
    "ToolAgent": "toolcrew.orchestrator.sdk.tool_agent",
    "ToolClient": "toolcrew.orchestrator.sdk.client",
    "ToolLoopDeps": "toolcrew.orchestrator.sdk.tool_loop",
    "ToolMessage": "toolcrew.orchestrator.loop.chat_messages",
    "ToolRegistry": "toolcrew.contract.registry",
    "ToolResult": "toolcrew.contract.calls",
    "as_tool": "toolcrew.orchestrator.functions.function_tools",
    "convert_to_openai_tool": "toolcrew.orchestrator.functions.openai_tools",
    "create_output_controller": "toolcrew.orchestrator.sdk.tool_loop",
    "create_tool_registry": "toolcrew.orchestrator.sdk.tool_loop",
    "generate_tool_prompt": "toolcrew.orchestrator.dialects.prompts",
    "run_tool_loop": "toolcrew.orchestrator.sdk.tool_loop",
    "tool": "toolcrew.contract.functions.function_tools",
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
    # A name is imported at its first use, so that small processes of this package start without the imports of the
    # SDK.
    if name not in _HOMES:
        raise AttributeError(f"module 'toolcrew' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
