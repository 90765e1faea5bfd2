"""Show a few names of a possibly long list."""

from __future__ import annotations

from guest.fields import escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAMES = 10
MAX_NAME_CHARS = 300


def build_names(names: Iterable[bytes]) -> list[str]:
    """Return the first MAX_NAMES names as single lines, each shortened in the middle to MAX_NAME_CHARS."""
    shown: list[str] = []
    for name in names:
        if len(shown) == MAX_NAMES:
            break
        text = escaped(name)
        half = MAX_NAME_CHARS // 2
        shown.append(text if len(text) <= MAX_NAME_CHARS else f"{text[: half - 3]}...{text[-half:]}")
    return shown
