"""The size of a benchmark: its full size, or with --smallest the size that only shows that it runs."""

from typing import TypeVar

T = TypeVar("T")

_is_smallest = False


def use_smallest() -> None:
    """Select the smallest sizes. Call this before a benchmark's module is imported: its constants are set then."""
    global _is_smallest
    _is_smallest = True


def size(full: T, smallest: T) -> T:
    """Return the full size, or the smallest one after use_smallest()."""
    return smallest if _is_smallest else full
