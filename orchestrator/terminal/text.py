"""Escapes untrusted text for a terminal."""

_ALLOWED_CONTROLS = {"\n", "\t"}
_DIRECTION_MARKS = frozenset({0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)})


def escape_controls(text: str) -> str:
    """Return the text with control and bidirectional characters as visible escapes.

    Output of a sandbox must not control a terminal.
    """
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    """Return the character, or its escape."""
    code = ord(character)
    if character in _ALLOWED_CONTROLS:
        return character
    if code < 32 or 127 <= code < 160 or code in _DIRECTION_MARKS or 0xD800 <= code <= 0xDFFF:
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return character
