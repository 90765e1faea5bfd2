"""Removes a `<think>` block from the start of a reply. The block is not part of the answer."""

THINK = "<think>"
THINK_END = "</think>"


def strip_thinking(text: str) -> str:
    """Return `text` after a think block at its start, or "" when the block never ends."""
    if not text.startswith(THINK):
        return text
    return text.partition(THINK_END)[2].lstrip()
