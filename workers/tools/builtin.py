"""The registry of the built-in tools and session verbs of a worker."""

from contract.registry import ToolRegistry
from workers.tools.base import WorkerRegistry
from workers.tools.edit import EDIT_TOOL
from workers.tools.glob import GLOB_TOOL
from workers.tools.grep import GREP_TOOL
from workers.tools.read import READ_TOOL
from workers.tools.session import SESSION_VERBS
from workers.tools.shell import BASH_TOOL
from workers.tools.write import WRITE_TOOL


def build_registry() -> WorkerRegistry:
    """Return a new registry with all built-in tools and session verbs."""
    return ToolRegistry((BASH_TOOL, READ_TOOL, WRITE_TOOL, EDIT_TOOL, GLOB_TOOL, GREP_TOOL, *SESSION_VERBS))
