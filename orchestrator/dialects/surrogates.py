"""Joins halves of a surrogate pair that arrive in separate deltas. Replaces a half whose other half never comes."""

import re

SURROGATE = re.compile("[\ud800-\udfff]")


def join_surrogates(text: str) -> str:
    """Return `text` in a form that can be encoded: pairs become their character, lone halves become U+FFFD."""
    if SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class SurrogateJoiner:
    """Joins halves across the deltas of one stream. Holds at most one character, always a leading half."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        if not self._half and (not text or text.isascii()):
            return text
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return join_surrogates(text)

    def finish(self) -> str:
        half, self._half = self._half, ""
        return join_surrogates(half)
