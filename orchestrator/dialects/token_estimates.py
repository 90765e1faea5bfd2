"""Estimates of tokens: for requests that are not counted yet, and for servers that do not count."""

from collections.abc import Mapping
from typing import Any

from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest

CHARS_PER_TOKEN = 4
PART_TOKENS = 1000
"""Estimated tokens of an image, a sound or a file in a message. Its size in bytes says little about its tokens."""
_MEDIA = frozenset({"image_url", "input_image", "input_audio", "file", "input_file", "video_url", "audio_url"})
_NAMES = frozenset({"id", "index", "type", "role", "tool_call_id", "finish_reason"})


def estimate_prompt(request: ModelRequest) -> int:
    """Return about how many tokens a request has."""
    return _count_chars([request.messages, request.tools]) // CHARS_PER_TOKEN


class CompletionEstimate:
    """Estimate of the tokens of a reply, or of the part of it that has arrived."""

    def __init__(self) -> None:
        self._chars = 0
        self.has_begun = False

    @property
    def tokens(self) -> int:
        return -(-self._chars // CHARS_PER_TOKEN)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk of the reply."""
        self.has_begun = True
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._chars += _count_chars(choice.get("delta"), 0)


def _count_chars(value: Any, key_weight: int = 1) -> int:
    """Return the characters of all texts in a JSON value. Texts that only have a technical meaning are left out.
    `key_weight` 0: leave out the names of fields, which each delta repeats.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        # A tool may have a parameter `type`, whose value is a schema.
        if isinstance(kind := value.get("type"), str) and kind in _MEDIA:
            return PART_TOKENS * CHARS_PER_TOKEN
        counted = {key: inner for key, inner in value.items() if key not in _NAMES or isinstance(inner, Mapping)}
        return sum(key_weight * len(key) + _count_chars(inner, key_weight) for key, inner in counted.items())
    if isinstance(value, list | tuple):
        return sum(_count_chars(inner, key_weight) for inner in value)
    return 0
