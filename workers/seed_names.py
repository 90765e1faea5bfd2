"""Names from the requirement documents for the tools of a worker.

Each name is an alias of a class or function elsewhere.
"""

from toolcrew.workers.skills.tool import build_skill_tool
from toolcrew.workers.tools.builtin import build_registry
from toolcrew.workers.tools.edit import EDIT_TOOL
from toolcrew.workers.tools.glob import GLOB_TOOL
from toolcrew.workers.tools.grep import GREP_TOOL
from toolcrew.workers.tools.read import READ_TOOL
from toolcrew.workers.tools.shell import BASH_TOOL
from toolcrew.workers.tools.write import WRITE_TOOL

BuiltInToolsRegistry = build_registry
SkillsSandboxExecutor = build_skill_tool
"""Builds the tool that runs skills in the sandbox of a call."""
FileReadTool = READ_TOOL
FileWriteTool = WRITE_TOOL
FileEditTool = EDIT_TOOL
BashTool = BASH_TOOL
GlobTool = GLOB_TOOL
GrepTool = GREP_TOOL
