"""Runs the tools of LLM agents at scale. This module has the public names of toolcrew; each is imported at first use.

    from toolcrew import ToolClient

The names in `__all__` are public, and everything else may change with any release. The docstring of a name describes
it: `help(toolcrew.ToolClient)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The same names for type checkers, which cannot read _MODULES. A test compares both.
    from toolcrew.contract.approvals import Decision as Decision
    from toolcrew.contract.calls import ExecResult as ExecResult, ToolCall as ToolCall, ToolResult as ToolResult
    from toolcrew.contract.errors import (
        ApiUnavailable as ApiUnavailable,
        ErrorCode as ErrorCode,
        ToolcrewError as ToolcrewError,
        ToolFailure as ToolFailure,
    )
    from toolcrew.contract.functions.call_context import CallContext as CallContext, ModelAdapter as ModelAdapter
    from toolcrew.contract.functions.function_tools import tool as tool
    from toolcrew.contract.registry import ToolRegistry as ToolRegistry
    from toolcrew.contract.run_events import (
        CallFinished as CallFinished,
        CallStarted as CallStarted,
        RunEvent as RunEvent,
        StepStarted as StepStarted,
        parse_event as parse_event,
    )
    from toolcrew.contract.run_spec import ItemEnvironment as ItemEnvironment, RunBody as RunBody
    from toolcrew.contract.run_views import BatchOptions as BatchOptions
    from toolcrew.contract.session_spec import SandboxOptions as SandboxOptions
    from toolcrew.contract.session_views import Checkpoint as Checkpoint
    from toolcrew.orchestrator.adapters.inspect_config import ToolcrewSandboxConfig as ToolcrewSandboxConfig
    from toolcrew.orchestrator.adapters.langchain import as_langchain_tools as as_langchain_tools
    from toolcrew.orchestrator.adapters.openai_agents import as_agents_tools as as_agents_tools
    from toolcrew.orchestrator.adapters.verifiers import (
        ToolcrewEnv as ToolcrewEnv,
        ToolcrewHarness as ToolcrewHarness,
        ToolcrewTaskset as ToolcrewTaskset,
    )
    from toolcrew.orchestrator.approvals.approvers import (
        AutoApprover as AutoApprover,
        CallbackApprover as CallbackApprover,
    )
    from toolcrew.orchestrator.batches.displays import JsonLines as JsonLines
    from toolcrew.orchestrator.batches.lines import load_lines as load_lines
    from toolcrew.orchestrator.dialects.model import Message as Message, Model as Model
    from toolcrew.orchestrator.dialects.prompts import generate_tool_prompt as generate_tool_prompt
    from toolcrew.orchestrator.sessions.session import Session as Session
    from toolcrew.orchestrator.functions.function_tools import as_tool as as_tool
    from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool as convert_to_openai_tool
    from toolcrew.orchestrator.loop.agent import Agent as Agent, ReActStrategy as ReActStrategy, RunResult as RunResult
    from toolcrew.orchestrator.loop.chat_messages import (
        AIMessage as AIMessage,
        HumanMessage as HumanMessage,
        SystemMessage as SystemMessage,
        ToolMessage as ToolMessage,
    )
    from toolcrew.orchestrator.loop.limits import ReActOptions as ReActOptions
    from toolcrew.orchestrator.models.choice import choose_model as choose_model
    from toolcrew.orchestrator.models.scripted import ScriptedModel as ScriptedModel
    from toolcrew.orchestrator.runs.client_batches import RowPaths as RowPaths
    from toolcrew.orchestrator.sdk.http.async_client import AsyncClient as AsyncClient
    from toolcrew.orchestrator.sdk.http.client import Client as Client
    from toolcrew.orchestrator.sdk.client import ToolClient as ToolClient
    from toolcrew.orchestrator.sdk.local_tools import LocalTools as LocalTools
    from toolcrew.orchestrator.sdk.seed_names import (
        ModelGateway as ModelGateway,
        ToolContext as ToolContext,
        buildToolSystemPrompt as buildToolSystemPrompt,
        createOutputController as createOutputController,
        createToolRegistry as createToolRegistry,
        executeToolCall as executeToolCall,
        generateToolPrompt as generateToolPrompt,
        parseToolDecision as parseToolDecision,
        runToolLoop as runToolLoop,
        tool_schema as tool_schema,
    )
    from toolcrew.orchestrator.sdk.tool_agent import (
        CustomAgent as CustomAgent,
        LLMClient as LLMClient,
        ToolAgent as ToolAgent,
    )
    from toolcrew.orchestrator.sdk.tool_loop import (
        Chat as Chat,
        ContextEngine as ContextEngine,
        ToolLoopDeps as ToolLoopDeps,
        ToolLoopRegistry as ToolLoopRegistry,
        ToolLoopResult as ToolLoopResult,
        create_output_controller as create_output_controller,
        create_tool_registry as create_tool_registry,
        run_tool_loop as run_tool_loop,
    )
    from toolcrew.contract.settings import load_settings as load_settings
    from toolcrew.orchestrator.traces.reading import load_trace as load_trace
    from toolcrew.workers.custom.testing import LocalWorker as LocalWorker
    from toolcrew.workers.seed_names import (
        BashTool as BashTool,
        BuiltInToolsRegistry as BuiltInToolsRegistry,
        FileEditTool as FileEditTool,
        FileReadTool as FileReadTool,
        FileWriteTool as FileWriteTool,
        GlobTool as GlobTool,
        GrepTool as GrepTool,
        SkillsSandboxExecutor as SkillsSandboxExecutor,
    )

# Module -> its public names.
_MODULES: dict[str, tuple[str, ...]] = {
    # Sessions and calls.
    "contract.calls": ("ExecResult", "ToolCall", "ToolResult"),
    "contract.errors": ("ApiUnavailable", "ErrorCode", "ToolFailure", "ToolcrewError"),
    "contract.session_spec": ("SandboxOptions",),
    "orchestrator.sessions.session": ("Session",),
    "contract.session_views": ("Checkpoint",),
    "orchestrator.sdk.client": ("ToolClient",),
    # Programs that have the URL of the API and a key.
    "contract.run_spec": ("ItemEnvironment", "RunBody"),
    "contract.run_views": ("BatchOptions",),
    "orchestrator.sdk.http.async_client": ("AsyncClient",),
    "orchestrator.sdk.http.client": ("Client",),
    # Tools of your own.
    "contract.functions.call_context": ("CallContext", "ModelAdapter"),
    "contract.functions.function_tools": ("tool",),
    "contract.registry": ("ToolRegistry",),
    "orchestrator.functions.function_tools": ("as_tool",),
    "orchestrator.functions.openai_tools": ("convert_to_openai_tool",),
    "orchestrator.sdk.local_tools": ("LocalTools",),
    "workers.custom.testing": ("LocalWorker",),
    # Runs and their events.
    "contract.run_events": ("CallFinished", "CallStarted", "RunEvent", "StepStarted", "parse_event"),
    "orchestrator.loop.agent": ("Agent", "ReActStrategy", "RunResult"),
    "orchestrator.loop.limits": ("ReActOptions",),
    "orchestrator.traces.reading": ("load_trace",),
    # Batches.
    "orchestrator.batches.displays": ("JsonLines",),
    "orchestrator.batches.lines": ("load_lines",),
    "orchestrator.runs.client_batches": ("RowPaths",),
    # Approvals.
    "contract.approvals": ("Decision",),
    "orchestrator.approvals.approvers": ("AutoApprover", "CallbackApprover"),
    # Models.
    "orchestrator.dialects.model": ("Message", "Model"),
    "orchestrator.models.choice": ("choose_model",),
    "orchestrator.models.scripted": ("ScriptedModel",),
    "contract.settings": ("load_settings",),
    # Agents that handle the messages themselves.
    "orchestrator.dialects.prompts": ("generate_tool_prompt",),
    "orchestrator.loop.chat_messages": ("AIMessage", "HumanMessage", "SystemMessage", "ToolMessage"),
    "orchestrator.sdk.tool_agent": ("CustomAgent", "LLMClient", "ToolAgent"),
    "orchestrator.sdk.tool_loop": (
        "Chat",
        "ContextEngine",
        "ToolLoopDeps",
        "ToolLoopRegistry",
        "ToolLoopResult",
        "create_output_controller",
        "create_tool_registry",
        "run_tool_loop",
    ),
    # Names of the requirement documents (docs/names.md).
    "orchestrator.sdk.seed_names": (
        "ModelGateway",
        "ToolContext",
        "buildToolSystemPrompt",
        "createOutputController",
        "createToolRegistry",
        "executeToolCall",
        "generateToolPrompt",
        "parseToolDecision",
        "runToolLoop",
        "tool_schema",
    ),
    "workers.seed_names": (
        "BashTool",
        "BuiltInToolsRegistry",
        "FileEditTool",
        "FileReadTool",
        "FileWriteTool",
        "GlobTool",
        "GrepTool",
        "SkillsSandboxExecutor",
    ),
    # Tools for other frameworks; each needs its extra.
    "orchestrator.adapters.inspect_config": ("ToolcrewSandboxConfig",),
    "orchestrator.adapters.langchain": ("as_langchain_tools",),
    "orchestrator.adapters.openai_agents": ("as_agents_tools",),
    "orchestrator.adapters.verifiers": ("ToolcrewEnv", "ToolcrewHarness", "ToolcrewTaskset"),
}
_MODULE_OF = {name: f"toolcrew.{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    # Small processes of this package, such as sandboxd, must start without the imports of the SDK.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'toolcrew' has no attribute '{name}'")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
