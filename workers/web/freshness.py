"""What an answer's headers say about keeping it."""

import re
from collections.abc import Mapping

from workers.web.cache import FRESH_S

MAX_VALIDATOR_CHARS = 512

_MAX_AGE = re.compile(r"max-age\s*=\s*\"?(\d{1,10})")


def may_be_kept(headers: Mapping[str, str]) -> bool:
    """Whether the server lets the page be kept at all."""
    return "no-store" not in _directives(headers) and headers.get("vary", "").strip() != "*"


def fresh_for_s(headers: Mapping[str, str]) -> float:
    """Seconds for which a new call needs not ask the server; at most FRESH_S, which is also what silence means."""
    directives = _directives(headers)
    if "no-cache" in directives:
        return 0.0
    told = _MAX_AGE.search(directives)
    return min(FRESH_S, float(told[1])) if told else FRESH_S


def validator(headers: Mapping[str, str], name: str) -> str | None:
    """An ETag or Last-Modified to send back later; None when there is none, or it would be no good header."""
    value = headers.get(name, "").strip()
    return value if 0 < len(value) <= MAX_VALIDATOR_CHARS and value.isascii() and value.isprintable() else None


def _directives(headers: Mapping[str, str]) -> str:
    return headers.get("cache-control", "").lower()
