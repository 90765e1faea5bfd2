"""The registry of the built-in tools and session verbs of a worker."""

from toolcrew.contract.registry import ToolRegistry
from toolcrew.workers.tools.base import WorkerRegistry
from toolcrew.workers.tools.edit import EDIT_TOOL
from toolcrew.workers.tools.glob import GLOB_TOOL
from toolcrew.workers.tools.grep import GREP_TOOL
from toolcrew.workers.tools.read import READ_TOOL
from toolcrew.workers.tools.session import SESSION_VERBS
from toolcrew.workers.tools.shell import BASH_TOOL
from toolcrew.workers.tools.write import WRITE_TOOL


def build_registry() -> WorkerRegistry:
    """Return a new registry with all built-in tools and session verbs."""
    return ToolRegistry((BASH_TOOL, READ_TOOL, WRITE_TOOL, EDIT_TOOL, GLOB_TOOL, GREP_TOOL, *SESSION_VERBS))
