"""Values of tag calls: decoding of the text between the delimiters, and encoding."""

import re
from collections.abc import Mapping

_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#([0-9]{1,7})|#[xX]([0-9a-fA-F]{1,6}));")
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
_ESCAPES = str.maketrans({character: f"&{name};" for name, character in _NAMED.items()})
_TAG_START = re.compile(r"<(?=[\w/!?])")
_FIRST_BREAK = re.compile(r"[ \t]*\r?\n")
_LAST_BREAK = re.compile(r"\r?\n[ \t]*\Z")


def decode_attribute(raw: str, quote: str) -> str:
    """Decode the value between two quotation marks `quote`. A doubled mark at the end becomes a single one if the value
    has an odd number of marks.
    """
    if raw.endswith(quote) and raw.count(quote) % 2:
        raw = raw[:-1]
    return decode_entities(raw)


def decode_entities(text: str) -> str:
    """Decode the five named entities and references to valid characters, once. Everything else is unchanged."""
    return _ENTITY.sub(_decode, text) if "&" in text else text


def strip_body(body: str) -> str:
    """Return the text between `<name>` and `</name>` without the line breaks at its start and at its end."""
    first = _FIRST_BREAK.match(body)
    if first is not None:
        body = body[first.end() :]
    start = body.rfind("\n")
    # Only the last line can match. A search from the front would try every line break of a long text.
    last = _LAST_BREAK.match(body, start - 1 if body[:start].endswith("\r") else start) if start >= 0 else None
    return body[: last.start()] if last is not None else body


def build_tag_call(name: str, arguments: Mapping[str, str]) -> str:
    """Return the canonical tag of a call."""
    children = "".join(f'<{key} value="{escape_value(value)}" />' for key, value in arguments.items())
    return f'<tool_action name="{escape_value(name)}">{children}</tool_action>'


def build_plain_tag_call(name: str, arguments: Mapping[str, str]) -> str:
    """Return a call whose values are between tags, as small models write it. A small model that sees values in
    attributes avoids double quotes in commands, and writes wrong ones. Only a `<` that could begin a tag is escaped, so
    no value can contain a tag, and a small model sees `<<` and `< file` as it should write them.
    """
    children = "".join(f"<{key}>{_TAG_START.sub('&lt;', value)}</{key}>" for key, value in arguments.items())
    return f'<tool_action name="{escape_value(name)}">{children}</tool_action>'


def escape_value(value: str) -> str:
    return value.translate(_ESCAPES)


def _decode(match: re.Match[str]) -> str:
    entity, decimal, hexadecimal = match.groups()
    if entity:
        return _NAMED[entity]
    code = int(decimal) if decimal else int(hexadecimal, 16)
    return chr(code) if _is_character(code) else match.group()


def _is_character(code: int) -> bool:
    return code in (0x9, 0xA, 0xD) or 0x20 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or 0x10000 <= code <= 0x10FFFF
