"""Model endpoints: servers that answer the runs of the deployment, or of one tenant. Stored in Redis; a change needs
no restart.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, model_validator

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.secrets import SecretName
from toolcrew.contract.signing import SigningKeys, readable

ENDPOINTS_FRESH_S = 1.0
"""Maximum age, in seconds, of the endpoints that a process has cached."""
MAX_FALLBACKS = 3
"""Longest chain of fallbacks that one request follows."""
WAIT_NOTICE_S = 0.5
"""Waiting time in seconds after which users of a run are informed that its request to the model waits for a rate or
concurrency limit of the endpoint.
"""
BlockReason = Literal["rate_limit", "down"]
BLOCK_CAUSES: Mapping[str, str] = {
    "rate_limit": "the rate limit of its server",
    "down": "its server does not answer",
}
EndpointName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
ENDPOINT_NAME: TypeAdapter[str] = TypeAdapter(EndpointName)
Price = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens, in the currency of `max_cost`. `cached_per_million` None: a cached prompt token costs
    as much as any other.
    """

    prompt_per_million: float
    completion_per_million: float
    cached_per_million: float | None = None

    def cost(self, usage: TokenUsage) -> float:
        """Return the cost of `usage`."""
        cached = self.prompt_per_million if self.cached_per_million is None else self.cached_per_million
        new_tokens = max(0, usage.prompt_tokens - usage.cached_tokens)
        return (
            new_tokens * self.prompt_per_million
            + usage.cached_tokens * cached
            + usage.completion_tokens * self.completion_per_million
        ) / 1e6


class ModelEndpoint(Record):
    """A model at an OpenAI-compatible server.

    `model`: its name at the server. `secret`: the name of the stored secret with the API key; null: no key. Prices are
    per million tokens. `fallback`: the endpoint that answers while this one is down or blocked.
    `context_tokens`: size of the context window. `concurrency`: limit of requests at the same time.
    """

    base_url: str = Field(pattern=r"^https?://[A-Za-z0-9._~\[\]:-]+(/[A-Za-z0-9._~/-]*)?$", max_length=2048)
    model: str = Field(min_length=1, max_length=256)
    secret: SecretName | None = None
    prompt_price: Price | None = None
    completion_price: Price | None = None
    cached_price: Price | None = None
    context_tokens: int | None = Field(default=None, ge=1, le=1_000_000_000)
    concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    requests_per_minute: int | None = Field(default=None, ge=1, le=1_000_000_000)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=1_000_000_000_000)
    fallback: EndpointName | None = None

    @model_validator(mode="after")
    def _check_prices(self) -> Self:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ValueError("only one of the prompt price and the completion price is set: set both")
        if self.cached_price is not None and self.prompt_price is None:
            raise ValueError("the cached price is set, but not the other two prices: set all three")
        return self

    @property
    def prices(self) -> Prices | None:
        """Return the prices; None if they are not set."""
        if self.prompt_price is None or self.completion_price is None:
            return None
        return Prices(self.prompt_price, self.completion_price, self.cached_price)

    def cost_of(self, usage: TokenUsage) -> float | None:
        """Return the cost of a reply with that usage; None without prices."""
        return self.prices.cost(usage) if self.prices is not None else None


class EndpointBlocked(Exception):
    """The endpoint receives no requests for the next `remaining_s` seconds: its server requested that (`rate_limit`),
    or does not answer (`down`).
    """

    def __init__(self, remaining_s: float, reason: BlockReason) -> None:
        super().__init__(reason)
        self.remaining_s = remaining_s
        self.reason = reason


@dataclass(frozen=True)
class RequestLease:
    """The permission to send one request to an endpoint. `second`: when it was granted, in Unix seconds. `tokens`: the
    estimated tokens of the request.
    """

    second: str = ""
    tokens: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class EndpointView(BaseModel):
    """An endpoint for display, without its API key. `tenant`: the owner; null: the deployment. `base_url` and `secret`
    (its name) are only for operators. `running`: number of requests that run now, if `concurrency` is set. `blocked_s`:
    seconds for which it receives no requests. `state`: `valid`, or why the endpoint is not used.
    """

    name: str
    tenant: str | None
    state: str = "valid"
    model: str | None = None
    base_url: str | None = None
    secret: str | None = None
    prompt_price: float | None = None
    completion_price: float | None = None
    cached_price: float | None = None
    context_tokens: int | None = None
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    fallback: str | None = None
    running: int = 0
    blocked_s: float = 0.0


def endpoint_field(name: str, tenant: str | None) -> str:
    """Return the field of an endpoint in the hash of endpoints. `tenant` None: an endpoint of the deployment."""
    return name if tenant is None else f"{tenant}/{name}"


def endpoint_purpose(field: str) -> str:
    """Return the purpose for which an endpoint's record is signed. A record is valid only for its own field, so that an
    endpoint of one tenant cannot be copied to another one.
    """
    return f"model {field}"


def seal_endpoint(keys: SigningKeys, field: str, endpoint: ModelEndpoint) -> str:
    """Return the signed record of an endpoint. The signature is valid only for this field of the hash of endpoints."""
    return keys.seal(endpoint_purpose(field), endpoint.model_dump_json(exclude_defaults=True))


def parse_endpoints(keys: SigningKeys, hash_fields: Mapping[bytes, bytes]) -> dict[str, ModelEndpoint | ConfigError]:
    """Return the endpoints by their fields (`endpoint_field`). For a record that cannot be read, the value is the
    error.
    """
    endpoints: dict[str, ModelEndpoint | ConfigError] = {}
    for raw in sorted(hash_fields):
        field = raw.decode(errors="replace")
        advice = "run the same release everywhere, or set it again (toolcrew models set NAME)"
        try:
            with readable(f"the model endpoint {field}", advice):
                record = keys.unseal(endpoint_purpose(field), hash_fields[raw])
                endpoints[field] = ModelEndpoint.model_validate_json(record, strict=True)
        except ConfigError as error:
            endpoints[field] = error
    return endpoints
