"""Parser of Agent Skills: front matter and text of SKILL.md, and checks of a bundle's files. Most deviations from the
standard give warnings only. The module reads no files.
"""

import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from toolcrew.contract.names import BUILTIN_TOOLS
from toolcrew.contract.specs import MAX_ALLOWED_TOOLS, MAX_SKILL_DESCRIPTION, AllowedTool, SkillSummary

SKILL_FILE = "SKILL.md"
SCRIPTS = "scripts/"
OMITTED_FOLDERS = frozenset({".git", "__pycache__"})
"""Folders that a bundle omits."""
MAX_BUNDLE_BYTES = 64 * 1024 * 1024
MAX_BUNDLE_FILES = 2000
MAX_ARCHIVE_BYTES = MAX_BUNDLE_BYTES + 8192 * MAX_BUNDLE_FILES
"""Limit of a bundle as a tar archive: its bytes and, for each file, two headers, the longest possible name and padding.
"""
MAX_SKILL_FILE_BYTES = 1024 * 1024
INTERPRETERS: Mapping[str, str] = {".py": "python3", ".sh": "bash", ".js": "node"}
"""Suffix of a script that has no line `#!` -> what runs it."""
STANDARD_NAME_CHARS, STANDARD_DESCRIPTION_CHARS, STANDARD_COMPATIBILITY_CHARS = 64, 1024, 500
_STANDARD_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_USABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STANDARD_KEYS = frozenset({"name", "description", "license", "compatibility", "metadata", "allowed-tools"})
_PLAIN_LINE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):(?:[ \t]+(.*))?")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_FRONT_MATTER_CHARS = 16_384
_MAX_DEPTH = 20
"""Limit of nested lists and mappings in a front matter."""
_MAX_NODES = 2000
"""Limit of the values in a front matter."""


class SkillBroken(ValueError):
    """Raised when the folder cannot be used as a skill. The message says why and what to fix."""


@dataclass(frozen=True)
class SkillText:
    """Content of a SKILL.md. `body`: the Markdown below the front matter."""

    name: str
    description: str
    license: str | None
    compatibility: str | None
    body: str
    warnings: tuple[str, ...]
    allowed_tools: tuple[AllowedTool, ...] = ()


@dataclass(frozen=True)
class BundleFile:
    """File of a skill's folder. `path`: relative to the folder, with `/`. `first_bytes`: its first two."""

    path: str
    size: int
    is_executable: bool
    first_bytes: bytes
    leads_out: bool = False
    """True for a link to something outside the folder."""


class BundleDigest:
    """Content hash of a bundle: the hash of its files in the order of their paths."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, path: str, data: bytes, *, is_executable: bool) -> None:
        name = path.encode("utf-8", "surrogateescape")
        self._sum.update(b"%d:%s%s%d:" % (len(name), name, b"x" if is_executable else b"-", len(data)))
        self._sum.update(data)

    def hexdigest(self) -> str:
        return self._sum.hexdigest()


def parse_skill(text: str, folder: str) -> SkillText:
    """Parse the text of SKILL.md. `folder`: the name of its folder. Raises SkillBroken without a usable name or
    description.
    """
    front, body = _split(text)
    fields, warnings = _read_front_matter(front)
    name = _text_of(fields, "name", warnings)
    if name is None:
        raise SkillBroken("its front matter has no name: add `name: " + (folder or "my-skill") + "`")
    if not _USABLE_NAME.fullmatch(name):
        raise SkillBroken(
            f"its name {name[:100]!r} cannot be used: use lower-case letters, digits and single hyphens, at most "
            f"{STANDARD_NAME_CHARS}"
        )
    if not _STANDARD_NAME.fullmatch(name) or len(name) > STANDARD_NAME_CHARS:
        warnings.append(
            f"the name must have only lower-case letters, digits and single hyphens, at most {STANDARD_NAME_CHARS}"
        )
    if name != folder:
        warnings.append(f"the name {name} differs from the folder's, {folder[:100]}")
    description = _text_of(fields, "description", warnings)
    if description is None:
        raise SkillBroken(
            "its front matter has no description: say in a sentence what the skill does and when to use it"
        )
    description = _limit_text(description, "description", STANDARD_DESCRIPTION_CHARS, MAX_SKILL_DESCRIPTION, warnings)
    compatibility = _text_of(fields, "compatibility", warnings)
    if compatibility is not None:
        compatibility = _limit_text(compatibility, "compatibility", STANDARD_COMPATIBILITY_CHARS, 1000, warnings)
    licence = _text_of(fields, "license", warnings)
    if licence is not None:
        licence = _limit_text(licence, "license", 500, 500, warnings)
    extra = sorted(str(key)[:60] for key in fields if key not in _STANDARD_KEYS)
    if extra:
        warnings.append(f"keys that are not in the standard are ignored: {', '.join(extra[:10])}")
    allowed = parse_allowed_tools(fields.get("allowed-tools"), warnings)
    return SkillText(name, description, licence, compatibility, body, tuple(warnings), allowed)


def check_bundle(files: Iterable[BundleFile]) -> list[str]:
    """Return warnings about a bundle's files. Raises SkillBroken if there are too many files, if they are too large, or
    if a link leads outside the folder.
    """
    count, size, warnings = 0, 0, []
    for file in files:
        count, size = count + 1, size + file.size
        if file.leads_out:
            raise SkillBroken(f"{file.path[:200]} is a link that leads out of its folder: copy the file into it")
        if file.path.startswith(SCRIPTS) and not file.is_executable and file.first_bytes == b"#!":
            warnings.append(f"{file.path[:200]} begins with #! and has no run bit: chmod +x it")
        if count > MAX_BUNDLE_FILES:
            raise SkillBroken(f"it has more than {MAX_BUNDLE_FILES} files: leave out what the skill does not use")
        if size > MAX_BUNDLE_BYTES:
            raise SkillBroken(
                f"its files are larger than {MAX_BUNDLE_BYTES // 1024 // 1024} MiB: leave out what the skill does not "
                "use"
            )
    return warnings


def build_summary(text: SkillText, files: Iterable[BundleFile], digest: str, warnings: Iterable[str]) -> SkillSummary:
    """Return the published summary of a skill. `warnings`: warnings about its files."""
    listed = list(files)
    messages = [*text.warnings, *warnings]
    if len(messages) > 20:
        messages = [*messages[:19], f"and {len(messages) - 19} more"]
    return SkillSummary(
        name=text.name,
        description=text.description,
        license=text.license,
        compatibility=text.compatibility,
        digest=digest,
        files=len(listed),
        bytes=sum(file.size for file in listed),
        has_scripts=any(file.path.startswith(SCRIPTS) for file in listed),
        warnings=tuple(warning[:400].encode("utf-8", "replace").decode() for warning in messages),
        allowed_tools=text.allowed_tools,
    )


def _split(text: str) -> tuple[str, str]:
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        raise SkillBroken(
            "it has no front matter: begin SKILL.md with a line ---, `name:`, `description:` and a line ---"
        )
    end = next((number for number, line in enumerate(lines[1:], start=1) if line.rstrip() == "---"), None)
    if end is None:
        raise SkillBroken("its front matter has no end: close it with a line ---")
    front = "\n".join(lines[1:end])
    if len(front) > _MAX_FRONT_MATTER_CHARS:
        raise SkillBroken(f"its front matter is longer than {_MAX_FRONT_MATTER_CHARS} characters: move text below it")
    return front, "\n".join(lines[end + 1 :]).strip("\n")


def _read_front_matter(front: str) -> tuple[dict[Any, Any], list[str]]:
    try:
        return _parse_yaml(front), []
    except SkillBroken as broken:
        # People write `description: Use it: often`, which is not valid YAML but has a clear meaning.
        plain = _parse_plain(front)
        if plain is None:
            raise
        return plain, [f"{broken}; it was read as plain lines `key: value`: put the value with the colon into quotes"]


def _parse_yaml(front: str) -> dict[Any, Any]:
    try:
        _check_yaml(front)
        fields = yaml.load(front, Loader=_LOADER)
    except SkillBroken:
        raise
    # PyYAML's constructors raise all of these for text that is tagged as something else (`!!int x`).
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 2} of SKILL.md" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise SkillBroken(f"its front matter is not valid YAML{line} ({problem}): fix SKILL.md") from error
    if not isinstance(fields, dict):
        raise SkillBroken("its front matter is not a list of `key: value`: fix SKILL.md")
    return fields


def _check_yaml(front: str) -> None:
    """Check the YAML events of the text before any object is built from them.

    Aliases and merge keys repeat everything that they refer to: a few hundred bytes of them take seconds and gigabytes
    to build. The number of events is at most the number of characters.
    """
    depth = nodes = 0
    for event in yaml.parse(front, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise SkillBroken(
                "its front matter has anchors or aliases (& or *): write each value where it is needed, or put it into "
                "quotes"
            )
        if getattr(event, "tag", None) is not None:
            raise SkillBroken("its front matter has a tag (!): write the value without it, or put it into quotes")
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and not event.style:
            raise SkillBroken("its front matter has a merge key (<<): write the values out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > _MAX_DEPTH or nodes > _MAX_NODES:
            raise SkillBroken("its front matter is nested too deeply, or has too many values: write plain values only")


def _parse_plain(front: str) -> dict[Any, Any] | None:
    """Parse lines `key: value`. Indented lines continue the line above. Return None for any other text."""
    fields: dict[Any, Any] = {}
    key = None
    for line in front.split("\n"):
        match = _PLAIN_LINE.fullmatch(line)
        if match is not None:
            key = match[1]
            if key in fields:
                return None
            fields[key] = _remove_quotes((match[2] or "").strip())
        elif line.startswith((" ", "\t")) and key is not None:
            fields[key] = f"{fields[key]} {line.strip()}".strip()
        elif line.strip() and not line.startswith("#"):
            return None
    # A value that begins like a YAML structure is an error in the YAML, not text.
    return (
        None if any(value[:1] in ("[", "{", "|", ">", "&", "*", "!", '"', "'") for value in fields.values()) else fields
    )


def _remove_quotes(value: str) -> str:
    return value[1:-1] if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'" else value


def _text_of(fields: Mapping[Any, Any], key: str, warnings: list[str]) -> str | None:
    """Return the text of a field on one line; None if the field is missing, empty or not text."""
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        if not isinstance(value, int | float | datetime.date):
            warnings.append(f"{key} is not text and is ignored")
            return None
        try:
            value = str(value)
        except ValueError:  # an integer of thousands of digits
            return None
        warnings.append(f"{key} is not text and was read as {value[:60]!r}: put it into quotes")
    text = " ".join(value.encode("utf-8", "replace").decode().replace("\0", " ").split())
    return text or None


def _limit_text(text: str, key: str, standard: int, max_chars: int, warnings: list[str]) -> str:
    if len(text) > standard:
        warnings.append(
            f"{key} has {len(text)} characters, the standard allows {standard}"
            + (f"; it was cut at {max_chars}" if len(text) > max_chars else "")
        )
    return text[:max_chars]


# --- `allowed-tools` of a SKILL.md ------------------------------------------------------------------------------------

# The calls that a skill asks to make without approval. Its tenant decides (orchestrator/runs/skill_disclosure.py).

# `Bash(git commit:*)`, `Read`, between blanks or commas.
_ENTRY = re.compile(r"[\s,]*(?P<tool>[A-Za-z0-9_.-]+)(?:\((?P<about>[^()]*)\))?(?=[\s,]|$)")
_PREFIX_MARK = re.compile(r"(?::\*| \*)$")
_OURS = {name.removesuffix("_tool"): name for name in BUILTIN_TOOLS}
_COMMANDS = "bash_tool"


def parse_allowed_tools(value: Any, warnings: list[str]) -> tuple[AllowedTool, ...]:
    """Parse `allowed-tools` of the front matter: a text with entries, or a list of texts. Invalid entries are left out,
    with a warning.
    """
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        warnings.append("allowed-tools is neither a text nor a list of texts and is ignored")
        return ()
    tools = list(_entries(texts, warnings))
    if len(tools) > MAX_ALLOWED_TOOLS:
        warnings.append(f"allowed-tools names more than {MAX_ALLOWED_TOOLS} tools: the rest is ignored")
    return tuple(tools[:MAX_ALLOWED_TOOLS])


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
        warnings.append(
            f"allowed-tools: {tool[:80]!r} is ignored: it is not the name of a tool, or it has too many words"
        )
        return None
    warnings.append(
        f"allowed-tools: {tool[:40]}({about[:80]}) is ignored: of commands the first words can be given, as Bash(git "
        "log:*)"
    )
    return None
