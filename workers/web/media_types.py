"""Kinds of content that Content-Type headers announce."""

import re
from email.message import Message

_NAME = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+\-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+\-]{0,126}")
_TEXT_LIKE = frozenset(
    f"application/{name}"
    for name in (
        "javascript",
        "ecmascript",
        "x-javascript",
        "x-sh",
        "toml",
        "yaml",
        "x-yaml",
        "sql",
        "graphql",
        "rtf",
        "x-ndjson",
        "ndjson",
        "jsonl",
    )
)
UNKNOWN = "application/octet-stream"


def media_type(header: str) -> str:
    """Return `type/subtype` in lower case, safe to display. A missing type means HTML, as in browsers; an invalid
    type means bytes.
    """
    name = header.partition(";")[0].strip().lower()
    if not name:
        return "text/html"
    return name if _NAME.fullmatch(name) else UNKNOWN


def declared_charset(header: str) -> str | None:
    """Return the charset parameter; None if the header has no charset."""
    message = Message()
    message["content-type"] = header.replace("\r", "").replace("\n", "")
    charset = message.get_param("charset")
    return charset if isinstance(charset, str) else None


def is_html(name: str) -> bool:
    return name in ("text/html", "application/xhtml+xml")


def is_json(name: str) -> bool:
    return name in ("application/json", "text/json") or name.endswith("+json")


def reads_as_text(name: str) -> bool:
    """Return whether the body is text. Other bodies are not read; only their type and size are reported."""
    return (
        name.startswith("text/")
        or is_html(name)
        or is_json(name)
        or name in _TEXT_LIKE
        or name == "application/xml"
        or name.endswith("+xml")
    )
