"""From what a server says that it has to specs of ours: which tools, under which names, with which flags. What is left
out is told.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import structlog

from contract.specs import ToolSpec
from workers.foreign_schemas import HIDDEN, SchemaRefused, bound_schema
from workers.mcp.settings import Entry
from workers.web.fences import one_line, printable

log = structlog.get_logger(__name__)

MAX_FITTED_CHARS = 64
_TAIL_CHARS = 10
_UNFIT = re.compile("[^A-Za-z0-9_-]")
MAX_TOOLS = 200
"""Of one server."""
MAX_TOGETHER_BYTES = 512 * 1024
"""Of one server's specs: every worker publishes them again and again, and every orchestrator reads them."""
MAX_DESCRIPTION_CHARS = 4000
MAX_NAME_CHARS = 256
"""Of what a server calls a tool: it is sent in a header with each call."""
_SHOWN_NAME_CHARS = 100


def fit_name(server: str, tool: str) -> str:
    """The name; one that had to be changed or cut ends in a hash of what it was. `server`: as TOOLCREW_MCP_SERVERS lets
    it be.
    """
    plain = f"mcp__{server}__{tool}"
    fitted = _UNFIT.sub("_", plain)
    if tool and fitted == plain and len(plain) <= MAX_FITTED_CHARS:
        return plain
    digest = hashlib.sha256(f"{server}\0{tool}".encode("utf-8", "surrogatepass")).hexdigest()[:_TAIL_CHARS]
    return f"{fitted[: MAX_FITTED_CHARS - _TAIL_CHARS - 1]}_{digest}"


def fit_names(server: str, tools: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Name here -> the server's own name, by our names; and the server's names that were left out, since another tool
    has their name here. Whatever the order they come in: who needed no change goes first, then by the server's own
    names."""
    given = sorted(set(tools), key=lambda tool: (fit_name(server, tool) != f"mcp__{server}__{tool}", tool))
    taken: dict[str, str] = {}
    for tool in given:
        taken.setdefault(fit_name(server, tool), tool)
    kept = set(taken.values())
    return dict(sorted(taken.items())), [tool for tool in given if tool not in kept]


@dataclass(frozen=True)
class ImportedTool:
    """`name`: what the server calls it."""

    name: str
    spec: ToolSpec


def import_tools(
    server: str, entry: Entry, listed: Iterable[Any], pool: Literal["sandbox", "tools"]
) -> tuple[ImportedTool, ...]:
    """The tools of a server's list that can be offered, by name. Never raises: what is wrong with one is logged, and
    costs no other.
    """
    wanted = {name: tool for name, tool in _named(server, listed).items() if _is_wanted(name, entry)}
    names, clashing = fit_names(server, wanted)
    for name in clashing:
        _leave_out(server, name, "another tool of the server has its name here: exclude one of them")
    found: list[ImportedTool] = []
    room = MAX_TOGETHER_BYTES
    for ours, theirs in names.items():
        if len(found) == MAX_TOOLS:
            log.error("mcp_tools_too_many", server=server, kept=MAX_TOOLS, listed=len(names))
            break
        try:
            spec = _build_spec(server, ours, wanted[theirs], entry, pool)
        except SchemaRefused as refused:
            _leave_out(server, theirs, str(refused))
            continue
        size = len(spec.model_dump_json().encode())
        if size > room:
            _leave_out(
                server,
                theirs,
                f"the server's tools are larger than {MAX_TOGETHER_BYTES} bytes together: narrow its include",
            )
            continue
        room -= size
        found.append(ImportedTool(theirs, spec))
    return tuple(found)


def _named(server: str, listed: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """By name, the first of each."""
    named: dict[str, dict[str, Any]] = {}
    for tool in listed:
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not name:
            _leave_out(server, "", "it has no name")
        elif len(name) > MAX_NAME_CHARS:
            _leave_out(server, name, f"its name is longer than {MAX_NAME_CHARS} characters")
        elif name in named:
            _leave_out(server, name, "the server lists it twice; the first is taken")
        else:
            named[name] = tool
    return named


def _is_wanted(name: str, entry: Entry) -> bool:
    def fits(patterns: Iterable[str]) -> bool:
        # Only `*` has a meaning: a name with brackets is meant as it stands.
        return any(fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]")) for pattern in patterns)

    return fits(entry.include) and not fits(entry.exclude)


def _build_spec(
    server: str, name: str, tool: dict[str, Any], entry: Entry, pool: Literal["sandbox", "tools"]
) -> ToolSpec:
    """Raises SchemaRefused."""
    return ToolSpec(
        name=name,
        description=_describe(server, tool),
        parameters=bound_schema(tool.get("inputSchema")),
        timeout_s=entry.timeout_s,
        max_timeout_s=entry.timeout_s,
        pool=pool,
        # What the server says of the network is not ours to change.
        tells_network=False,
        tenants=entry.tenants,
        **_flags(tool, entry),
    )


def _describe(server: str, tool: dict[str, Any]) -> str:
    given = tool.get("description")
    text = HIDDEN.sub("\ufffd", printable(given)).strip() if isinstance(given, str) else ""
    if len(text) > MAX_DESCRIPTION_CHARS:
        text = text[:MAX_DESCRIPTION_CHARS] + "..."
    return f"[A tool of the MCP server {server}, in its words:] {text or 'It says nothing of this tool.'}"


def _flags(tool: dict[str, Any], entry: Entry) -> dict[str, bool]:
    """What a trusted server says of its tool, else the worst."""
    hints = tool.get("annotations") if entry.trust == "trusted" else None
    told = hints if isinstance(hints, dict) else {}
    read_only = told.get("readOnlyHint") is True
    destructive = not read_only and told.get("destructiveHint") is not False
    return {
        "read_only": read_only,
        "idempotent": read_only or told.get("idempotentHint") is True,
        "requires_permission": not read_only,
        "dangerous": destructive,
    }


def _leave_out(server: str, name: str, why: str) -> None:
    log.error("mcp_tool_left_out", server=server, name=one_line(name, _SHOWN_NAME_CHARS), why=why)
