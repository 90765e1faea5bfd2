"""Content-Type headers: what kind of content they announce."""

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
    """`type/subtype` in lower case, safe to show. A page without a type is taken for HTML, as browsers do; a broken one
    for bytes.
    """
    name = header.partition(";")[0].strip().lower()
    if not name:
        return "text/html"
    return name if _NAME.fullmatch(name) else UNKNOWN


def declared_charset(header: str) -> str | None:
    """The charset parameter; None when there is none."""
    message = Message()
    message["content-type"] = header.replace("\r", "").replace("\n", "")
    charset = message.get_param("charset")
    return charset if isinstance(charset, str) else None


def is_html(name: str) -> bool:
    return name in ("text/html", "application/xhtml+xml")


def is_json(name: str) -> bool:
    return name in ("application/json", "text/json") or name.endswith("+json")


def reads_as_text(name: str) -> bool:
    """Whether the body is worth reading: everything else is told by type and size only."""
    return (
        name.startswith("text/")
        or is_html(name)
        or is_json(name)
        or name in _TEXT_LIKE
        or name == "application/xml"
        or name.endswith("+xml")
    )
