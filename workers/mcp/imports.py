"""Import of tools from the list of an MCP server: selection, names, flags and limits. Every omitted
tool is logged.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import structlog

from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.foreign_schemas import HIDDEN, SchemaRefused, bound_schema
from toolcrew.workers.mcp.settings import Entry
from toolcrew.workers.web.fences import one_line, printable

log = structlog.get_logger(__name__)

MAX_FITTED_CHARS = 64
_TAIL_CHARS = 10
_UNFIT = re.compile("[^A-Za-z0-9_-]")
MAX_TOOLS = 200
"""Maximum number of tools of a server."""
MAX_TOGETHER_BYTES = 512 * 1024
"""Maximum total size of the specs of a server. Workers publish them regularly, and every orchestrator reads them."""
MAX_DESCRIPTION_CHARS = 4000
MAX_NAME_CHARS = 256
"""Maximum length of a tool name of a server. A header of every call contains this name."""
_SHOWN_NAME_CHARS = 100


def build_tool_name(server: str, tool: str) -> str:
    """Return the name of the tool in this deployment. A name that was changed or cut ends in a hash of the original
    name. `server`: a name that TOOLCREW_MCP_SERVERS allows.
    """
    plain = f"mcp__{server}__{tool}"
    fitted = _UNFIT.sub("_", plain)
    if tool and fitted == plain and len(plain) <= MAX_FITTED_CHARS:
        return plain
    digest = hashlib.sha256(f"{server}\0{tool}".encode("utf-8", "surrogatepass")).hexdigest()[:_TAIL_CHARS]
    return f"{fitted[: MAX_FITTED_CHARS - _TAIL_CHARS - 1]}_{digest}"


def build_tool_names(server: str, tools: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return a map from the names in this deployment to the server's names, and the server's names that are omitted. A
    tool of the server is omitted if another of its tools has the same name in this deployment.

    The result does not depend on the order of `tools`. A tool whose name needs no change has priority; then the
    alphabetical order decides.
    """
    ordered = sorted(set(tools), key=lambda tool: (build_tool_name(server, tool) != f"mcp__{server}__{tool}", tool))
    by_name: dict[str, str] = {}
    for tool in ordered:
        by_name.setdefault(build_tool_name(server, tool), tool)
    named_tools = set(by_name.values())
    return dict(sorted(by_name.items())), [tool for tool in ordered if tool not in named_tools]


@dataclass(frozen=True)
class ImportedTool:
    """A tool that can be offered. `name`: the server's name of the tool."""

    name: str
    spec: ToolSpec


def import_tools(
    server: str, entry: Entry, listed: Iterable[Any], pool: Literal["sandbox", "tools"]
) -> tuple[ImportedTool, ...]:
    """Return the tools in a server's list that can be offered, by name. This function never raises. An invalid tool
    is logged and does not affect the others.
    """
    included = {name: tool for name, tool in _index_by_name(server, listed).items() if _is_included(name, entry)}
    names, clashing = build_tool_names(server, included)
    for name in clashing:
        _leave_out(server, name, "another tool of the server gets the same name: exclude one of them")
    imported: list[ImportedTool] = []
    remaining_bytes = MAX_TOGETHER_BYTES
    for name, original_name in names.items():
        if len(imported) == MAX_TOOLS:
            log.error("mcp_tools_too_many", server=server, limit=MAX_TOOLS, listed=len(names))
            break
        try:
            spec = _build_spec(server, name, included[original_name], entry, pool)
        except SchemaRefused as refused:
            _leave_out(server, original_name, str(refused))
            continue
        size = len(spec.model_dump_json().encode())
        if size > remaining_bytes:
            _leave_out(
                server,
                original_name,
                f"the tools of the server exceed {MAX_TOGETHER_BYTES} bytes in total: include fewer tools",
            )
            continue
        remaining_bytes -= size
        imported.append(ImportedTool(original_name, spec))
    return tuple(imported)


def _index_by_name(server: str, listed: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the tools by name. The first of several tools with one name is kept."""
    by_name: dict[str, dict[str, Any]] = {}
    for tool in listed:
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not name:
            _leave_out(server, "", "the tool has no name")
        elif len(name) > MAX_NAME_CHARS:
            _leave_out(server, name, f"its name is longer than {MAX_NAME_CHARS} characters")
        elif name in by_name:
            _leave_out(server, name, "the server lists the tool twice; the first entry is used")
        else:
            by_name[name] = tool
    return by_name


def _is_included(name: str, entry: Entry) -> bool:
    def fits(patterns: Iterable[str]) -> bool:
        # Only `*` is a wildcard. Brackets and question marks in a pattern match themselves.
        return any(fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]")) for pattern in patterns)

    return fits(entry.include) and not fits(entry.exclude)


def _build_spec(
    server: str, name: str, tool: dict[str, Any], entry: Entry, pool: Literal["sandbox", "tools"]
) -> ToolSpec:
    """Return the spec of a tool. Raises SchemaRefused when the input schema is not accepted."""
    return ToolSpec(
        name=name,
        description=_describe(server, tool),
        parameters=bound_schema(tool.get("inputSchema")),
        timeout_s=entry.timeout_s,
        max_timeout_s=entry.timeout_s,
        pool=pool,
        # The description of an MCP tool gets no text about the network of the session.
        tells_network=False,
        tenants=entry.tenants,
        **_flags(tool, entry),
    )


def _describe(server: str, tool: dict[str, Any]) -> str:
    description = tool.get("description")
    text = HIDDEN.sub("\ufffd", printable(description)).strip() if isinstance(description, str) else ""
    if len(text) > MAX_DESCRIPTION_CHARS:
        text = text[:MAX_DESCRIPTION_CHARS] + "..."
    text = text or "The server gives no description."
    return f"[A tool of the MCP server {server}; description of the server:] {text}"


def _flags(tool: dict[str, Any], entry: Entry) -> dict[str, bool]:
    """Return the flags of a tool. A trusted server sets them; for an untrusted server the most restrictive values
    apply.
    """
    hints = tool.get("annotations") if entry.trust == "trusted" else None
    flags = hints if isinstance(hints, dict) else {}
    read_only = flags.get("readOnlyHint") is True
    destructive = not read_only and flags.get("destructiveHint") is not False
    return {
        "read_only": read_only,
        "idempotent": read_only or flags.get("idempotentHint") is True,
        "requires_permission": not read_only,
        "dangerous": destructive,
    }


def _leave_out(server: str, name: str, reason: str) -> None:
    log.error("mcp_tool_left_out", server=server, name=one_line(name, _SHOWN_NAME_CHARS), reason=reason)
