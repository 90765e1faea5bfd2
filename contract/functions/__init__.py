"""Public API for writing tools as Python functions. The tools run in the program itself or in a worker."""

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.call_context import CallContext, ModelAdapter
from toolcrew.contract.functions.completions import Completion, TokenUsage
from toolcrew.contract.functions.function_tools import FunctionTool, tool
from toolcrew.contract.functions.session_state import SessionState

__all__ = [
    "CallContext",
    "Completion",
    "ErrorCode",
    "FunctionTool",
    "ModelAdapter",
    "SessionState",
    "TokenUsage",
    "ToolFailure",
    "tool",
]
