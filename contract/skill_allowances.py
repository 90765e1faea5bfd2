"""`allowed-tools` of a SKILL.md: which calls a skill asks to make unasked. What becomes of that is its tenant's to say
(orchestrator/runs/run_parts.py).
"""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from contract.names import BUILTIN_TOOLS
from contract.specs import MAX_ALLOWED_TOOLS, AllowedTool

# `Bash(git commit:*)`, `Read`, between blanks or commas.
_ENTRY = re.compile(r"[\s,]*(?P<tool>[A-Za-z0-9_.-]+)(?:\((?P<about>[^()]*)\))?(?=[\s,]|$)")
_PREFIX_MARK = re.compile(r"(?::\*| \*)$")
_OURS = {name.removesuffix("_tool"): name for name in BUILTIN_TOOLS}
_COMMANDS = "bash_tool"


def parse_allowed_tools(value: Any, warnings: list[str]) -> tuple[AllowedTool, ...]:
    """What the front matter's value names: a text of entries, or a list of them. What cannot be kept to is left out,
    with a warning.
    """
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        warnings.append("allowed-tools is neither a text nor a list of texts and is ignored")
        return ()
    found = list(_entries(texts, warnings))
    if len(found) > MAX_ALLOWED_TOOLS:
        warnings.append(f"allowed-tools names more than {MAX_ALLOWED_TOOLS} tools: the rest is ignored")
    return tuple(found[:MAX_ALLOWED_TOOLS])


def _entries(texts: Iterable[str], warnings: list[str]) -> Iterable[AllowedTool]:
    for text in texts:
        at = 0
        while text[at:].strip(" \t\r\n,"):
            match = _ENTRY.match(text, at)
            if match is None:
                warnings.append(f"allowed-tools: {text[at:][:80].strip()!r} is ignored: write Tool or Bash(words:*)")
                break
            at = match.end()
            entry = _entry(match["tool"], match["about"], warnings)
            if entry is not None:
                yield entry


def _entry(tool: str, about: str | None, warnings: list[str]) -> AllowedTool | None:
    name = _OURS.get(tool.lower(), tool)
    try:
        if about is None or about.strip() in ("*", ":*"):
            return AllowedTool(tool=name)
        words = tuple(_PREFIX_MARK.sub("", about.strip()).split())
        if (
            name == _COMMANDS
            and words
            and _PREFIX_MARK.search(about.strip())
            and not any("*" in word for word in words)
        ):
            return AllowedTool(tool=name, argv_prefix=words)
    except ValidationError:
        warnings.append(f"allowed-tools: {tool[:80]!r} is ignored: it is no name of a tool, or its words are too many")
        return None
    warnings.append(
        f"allowed-tools: {tool[:40]}({about[:80]}) is ignored: of commands the first words can be given, as Bash(git "
        "log:*)"
    )
    return None
