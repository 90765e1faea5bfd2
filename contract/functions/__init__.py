"""Functions as tools: what whoever writes one imports, whether a program runs it itself or a worker does."""

from contract.errors import ErrorCode, ToolFailure
from contract.functions.call_context import CallContext, ModelAdapter
from contract.functions.completions import Completion, Usage
from contract.functions.function_tools import FunctionTool, tool
from contract.functions.session_state import SessionState

__all__ = [
    "CallContext",
    "Completion",
    "ErrorCode",
    "FunctionTool",
    "ModelAdapter",
    "SessionState",
    "ToolFailure",
    "Usage",
    "tool",
]
