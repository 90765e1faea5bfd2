"""skill_tool: list, load and read the skills of a call, and run their scripts in the session's sandbox.

The skills belong to the session, to the tenant, or to the worker's operator. A skill with a sidecar is also a tool
with its own name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog
from pydantic import JsonValue

from toolcrew.contract.calls import MAX_TIMEOUT_S
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import BUILTIN_TOOLS
from toolcrew.contract.plurals import count
from toolcrew.contract.schema import prepare_arguments
from toolcrew.contract.specs import NO_NETWORK, TIMEOUT_DESCRIPTION, ToolSpec
from toolcrew.store.skills import InstalledSkill
from toolcrew.workers.skills.loader import Skill, read_bundled
from toolcrew.workers.skills.of_session import SessionSkills
from toolcrew.workers.skills.runner import name_nearest, run_entrypoint, run_script
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerRegistry, WorkerTool
from toolcrew.workers.tools.read import DEFAULT_LINES, FOOTER_BYTES, MAX_LINES
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES, show_name

log = structlog.get_logger(__name__)

MAX_LISTED_FILES = 100
MAX_READ_BYTES = 10 * 1024 * 1024
_LINE_CHARS = 2000

_ABOUT = (
    "Use a skill: instructions, files and scripts for a kind of task. If a task fits a skill's description, load the "
    "skill first and follow it. `action` read returns one of its files, list all skills; run starts one of its scripts "
    f"in the sandbox, {NO_NETWORK}, with `args` as JSON on standard input."
)
_PARAMETERS: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "default": ""},
        "action": {
            "type": "string",
            "enum": ["load", "list", "read", "run"],
            "default": "load",
        },
        "script": {
            "type": "string",
            "minLength": 1,
            "description": "with action run: a file below scripts/",
        },
        "args": {
            "type": "object",
            "default": {},
        },
        "path": {
            "type": "string",
            "minLength": 1,
            "description": "with action read",
        },
        "offset": {
            "type": "integer",
            "minimum": 1,
            "default": 1,
            "description": "with action read: first line",
            "x-hidden": True,
        },
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_LINES,
            "default": DEFAULT_LINES,
            "description": "with action read: number of lines",
            "x-hidden": True,
        },
        "timeout": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": f"with action run: {TIMEOUT_DESCRIPTION.format(MAX_TIMEOUT_S)}",
        },
    },
    "required": [],
    "additionalProperties": False,
}


class TenantSkills(Protocol):
    """The skills that are installed for tenants (workers/skills/installed.py)."""

    def all(self, tenant: str) -> Mapping[str, InstalledSkill]: ...

    def find(self, tenant: str, name: str) -> Skill | None: ...


@dataclass(frozen=True)
class _Roots:
    """The three sources of skills: the session, the tenant, the operator. They are searched in this order."""

    session: SessionSkills | None
    tenant: TenantSkills | None
    system: Mapping[str, Skill]

    def find(self, name: str, environment: ToolEnvironment) -> Skill | None:
        own = self.session.find(name, environment) if self.session is not None else None
        return own or self.find_tool(name, environment)

    def find_tool(self, name: str, environment: ToolEnvironment) -> Skill | None:
        """Return the tenant's or the operator's skill with that name, to run it as a tool.

        A session's skill is no tool: it was not checked, and the model has seen the description of another tool.
        """
        own = self.tenant.find(environment.context.tenant, name) if self.tenant is not None else None
        return own or self.system.get(name)

    def all(self, environment: ToolEnvironment) -> dict[str, str]:
        """Return name -> description of every skill of the call."""
        descriptions = {name: skill.summary.description for name, skill in self.system.items()}
        if self.tenant is not None:
            descriptions |= {
                name: record.skill.description for name, record in self.tenant.all(environment.context.tenant).items()
            }
        if self.session is not None:
            descriptions |= self.session.all(environment)
        return dict(sorted(descriptions.items()))


def build_skill_tool(
    skills: Sequence[Skill], installed: TenantSkills | None = None, of_session: SessionSkills | None = None
) -> WorkerTool:
    """Return the tool over these skills.

    For the same name, a session's skill is used before the tenant's, and the tenant's skill before one of `skills`. The
    tool's description names no skill; the orchestrator adds the names of the tenant's skills.
    """
    spec = ToolSpec(
        name="skill_tool",
        description=_ABOUT,
        parameters=_PARAMETERS,
        aliases={"skill": "name", "file_path": "path"},
    )
    roots = _Roots(of_session, installed, {skill.name: skill for skill in skills})
    return WorkerTool(spec, partial(_run, roots), validators=(_check_action,))


def _line_of(name: str, description: str) -> str:
    return f"- {name}: {show_name(description)}"


def _check_action(arguments: Mapping[str, Any]) -> str | None:
    """Return an error message for an argument that does not belong to the action, or a missing one.

    The JSON schema cannot state these rules, because model servers refuse or ignore conditional schemas.
    """
    action = arguments["action"]
    if action != "list" and not arguments["name"]:
        return f"parameter 'name' is required with action {action}: action list names the skills"
    if action == "read" and "path" not in arguments:
        return "parameter 'path' is required with action read: action load names the skill's files"
    for parameter, owner in (("script", "run"), ("path", "read")):
        if action != owner and parameter in arguments:
            return f"'{parameter}' goes with action {owner}: leave it out, or use that action"
    return None


def _run(roots: _Roots, arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    action, name = arguments["action"], arguments["name"]
    if action == "list":
        return _list(roots.all(environment))
    is_tool = action == "run" and "script" not in arguments
    skill = (roots.find_tool(name, environment) if is_tool else None) or roots.find(name, environment)
    if skill is None:
        nearest = name_nearest(name, roots.all(environment), "there are no skills at all")
        raise ToolFailure(ErrorCode.FILE_NOT_FOUND, f"there is no skill {show_name(name)}; {nearest}")
    if is_tool:
        return _run_tool(skill, arguments["args"], environment)
    if action == "run":
        return run_script(skill, arguments["script"], arguments["args"], arguments, environment)
    return _read(skill, arguments) if action == "read" else _load(skill)


def _run_tool(skill: Skill, arguments: Mapping[str, JsonValue], environment: ToolEnvironment) -> Outcome:
    if skill.tool is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"parameter 'script' is required: the skill {skill.name} is not a tool; use action load to see its scripts",
        )
    prepared, _ = prepare_arguments(skill.tool.spec, arguments)
    return run_entrypoint(skill, skill.tool.sidecar, prepared, environment)


def _list(skills: Mapping[str, str]) -> Outcome:
    lines: list[str] = []
    remaining_bytes = MAX_OUTPUT_BYTES - FOOTER_BYTES
    for name, description in skills.items():
        line = _line_of(name, description)
        remaining_bytes -= len(line.encode()) + 1
        if remaining_bytes < 0:
            lines.append(f"[{len(skills) - len(lines)} more, from {name} on: name one to load it]")
            return Outcome("\n".join(lines), {"skills": len(skills)}, truncated=True)
        lines.append(line)
    return Outcome("\n".join(lines) or "[no skills]", {"skills": len(skills)})


def _load(skill: Skill) -> Outcome:
    """Return the text of SKILL.md and the list of the skill's files."""
    body = skill.body.encode("utf-8", "replace")
    is_cut = len(body) > MAX_OUTPUT_BYTES - FOOTER_BYTES
    text = body[: MAX_OUTPUT_BYTES - FOOTER_BYTES].decode("utf-8", "ignore").replace("\0", "\ufffd")
    parts = [f'<skill name="{skill.name}">', text or "[no instructions]", "</skill>"]
    if is_cut:
        parts.append("[the instructions were cut here: read SKILL.md with action read]")
    parts.append(f"Its files, which action read shows; those below scripts/ can be run ({len(skill.files)}):")
    parts += [f"- {show_name(file.path)} ({count(file.size, 'byte')})" for file in skill.files[:MAX_LISTED_FILES]]
    hidden_count = len(skill.files) - MAX_LISTED_FILES
    if hidden_count > 0:
        parts.append(f"[and {hidden_count} more]")
    metadata: dict[str, JsonValue] = {"skill": skill.name, "files": len(skill.files)}
    if skill.place is None:
        # Show no digest for a session's own skill, which the session can change at any time.
        metadata["digest"] = skill.summary.digest
    return Outcome("\n".join(parts), metadata, truncated=is_cut or hidden_count > 0)


def _read(skill: Skill, arguments: Mapping[str, Any]) -> Outcome:
    path, first, limit = arguments["path"], arguments["offset"], arguments["limit"]
    # Only files that were found when the skill was loaded can be read, so a path cannot lead elsewhere.
    file = skill.find(path)
    if file is None:
        nearest = name_nearest(path, (file.path for file in skill.files), "it has no files")
        raise ToolFailure(ErrorCode.FILE_NOT_FOUND, f"the skill {skill.name} has no file {show_name(path)}: {nearest}")
    if file.size > MAX_READ_BYTES:
        raise ToolFailure(
            ErrorCode.FILE_TOO_LARGE,
            f"{show_name(path)} has {file.size} bytes, more than the {MAX_READ_BYTES} that can be read: process it "
            "with a script of the skill",
        )
    try:
        text = read_bundled(skill, file).decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ToolFailure(
            ErrorCode.BINARY_FILE,
            f"{show_name(path)} is not text ({file.size} bytes): use a script of the skill to process it",
        )
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        return Outcome("[empty file]", {"lines": 0, "size_bytes": file.size})
    if first > len(lines):
        raise ToolFailure(
            ErrorCode.OFFSET_OUT_OF_RANGE, f"{show_name(path)} has {count(len(lines), 'line')}: use a smaller offset"
        )
    return _page(lines, first, limit, file.size)


def _page(lines: Sequence[str], first: int, limit: int, size: int) -> Outcome:
    visible: list[str] = []
    remaining_bytes, is_cut = MAX_OUTPUT_BYTES - FOOTER_BYTES, False
    for number, line in enumerate(lines[first - 1 : first - 1 + limit], start=first):
        numbered = f"{number}\t{line[:_LINE_CHARS]}" + (
            f" [cut: {len(line)} characters]" if len(line) > _LINE_CHARS else ""
        )
        remaining_bytes -= len(numbered.encode("utf-8", "replace")) + 1
        if remaining_bytes < 0:
            is_cut = True
            break
        is_cut = is_cut or len(line) > _LINE_CHARS
        visible.append(numbered)
    last, total = first + len(visible) - 1, len(lines)
    footer = (
        f"[end of file: {count(total, 'line')}]"
        if last == total
        else f"[lines {first}-{last} of {total}; continue with offset={last + 1}]"
    )
    return Outcome(
        "\n".join([*visible, footer]),
        {"lines": total, "size_bytes": size},
        truncated=is_cut or (last < total and limit == DEFAULT_LINES),
    )


def register_skill_tools(registry: WorkerRegistry, skills: Iterable[Skill]) -> None:
    """Register the skills that have a sidecar as tools.

    A skill with the name of an existing tool is logged and gets no tool.
    """
    for skill in skills:
        if skill.tool is None:
            continue
        if skill.name in BUILTIN_TOOLS or registry.get(skill.name) is not None:
            log.error("skill_name_taken", skill=skill.name, folder=str(skill.source))
            continue
        registry.register(WorkerTool(skill.tool.spec, partial(_run_skill, skill)))


def _run_skill(skill: Skill, arguments: Mapping[str, Any], environment: ToolEnvironment) -> Outcome:
    assert skill.tool is not None
    return run_entrypoint(skill, skill.tool.sidecar, arguments, environment)
