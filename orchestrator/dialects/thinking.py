"""What a reply says before it begins: a `<think>` block at its very start is no answer."""

THINK = "<think>"
THINK_END = "</think>"


def strip_thinking(text: str) -> str:
    """`text` behind a think block at its start; nothing is left of a block that never ends."""
    if not text.startswith(THINK):
        return text
    return text.partition(THINK_END)[2].lstrip()
