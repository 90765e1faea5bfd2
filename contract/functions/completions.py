"""Reply of a model to a request of a tool."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of the model server; 0 if the server reports none. `cached_tokens`: the prompt tokens that the
    server had in its cache. `cost`: computed from the prices of the endpoint, or reported by the server; None if it is
    unknown.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cost if other.cost is None else other.cost + (self.cost or 0.0),
        )


@dataclass(frozen=True)
class Completion:
    """Whole reply of a model. `finish_reason` is the server's value; "length" means that the text is incomplete."""

    text: str
    usage: TokenUsage
    finish_reason: str | None
