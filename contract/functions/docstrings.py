"""Parser of Google-style docstrings. It finds the description of the function, and the text for each parameter."""

import inspect
import re
from dataclasses import dataclass, field

_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Params|Returns?|Raises?|Yields?|Examples?|Notes?|Warnings?|Todo|See Also|References)"
    r"\s*:\s*$"
)
_PARAMETERS = ("Args", "Arguments", "Parameters", "Params")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class Docstring:
    """Parts of a docstring. `description`: the text before the first section."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str | None) -> Docstring:
    """Parse a docstring. Never raises: a text without sections is the description."""
    lines = inspect.cleandoc(text or "").splitlines()
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in lines:
        match = _SECTION.match(line)
        if match:
            name = match.group(1)
            sections.setdefault(name, [])
        elif not name or not line or line[0].isspace():
            sections[name].append(line)
        else:
            # Text without indentation ends a section and belongs to no parameter.
            name = "prose"
            sections.setdefault(name, []).append(line)
    entries: dict[str, str] = {}
    for heading in _PARAMETERS:
        entries.update(_parse_entries(sections.get(heading, [])))
    return Docstring("\n".join(sections[""]).strip(), entries)


def _parse_entries(lines: list[str]) -> dict[str, str]:
    """Parse entries `name (type): text`, which continue on lines with deeper indentation."""
    entries: dict[str, str] = {}
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    current = ""
    for line in lines:
        match = _ENTRY.match(line[depth:])
        if match:
            current = match.group(1)
            entries[current] = match.group(2).strip()
        elif current and line.strip():
            entries[current] = f"{entries[current]} {line.strip()}".strip()
    return entries
