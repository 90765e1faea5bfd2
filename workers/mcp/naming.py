"""What a tool of an MCP server is called here: `mcp__<server>__<tool>`, in the characters and the length that every
model takes.
"""

import hashlib
import re
from collections.abc import Iterable

MAX_NAME_CHARS = 64
_TAIL_CHARS = 10
_UNFIT = re.compile("[^A-Za-z0-9_-]")


def fit_name(server: str, tool: str) -> str:
    """The name; one that had to be changed or cut ends in a hash of what it was. `server`: as TOOLCREW_MCP_SERVERS lets
    it be.
    """
    plain = f"mcp__{server}__{tool}"
    fitted = _UNFIT.sub("_", plain)
    if tool and fitted == plain and len(plain) <= MAX_NAME_CHARS:
        return plain
    digest = hashlib.sha256(f"{server}\0{tool}".encode("utf-8", "surrogatepass")).hexdigest()[:_TAIL_CHARS]
    return f"{fitted[: MAX_NAME_CHARS - _TAIL_CHARS - 1]}_{digest}"


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
