"""What a model that a tool asks gives back."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Tokens as the server counted them; 0 when it does not tell."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)


@dataclass(frozen=True)
class Completion:
    """A whole reply. `finish_reason` as the server sent it: with "length" the text is cut."""

    text: str
    usage: Usage
    finish_reason: str | None
