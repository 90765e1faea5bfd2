"""Pages of lists, API keys and tools, as the HTTP API returns them."""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from toolcrew.contract.clock import Instant

T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """A page of a list. `next_cursor`: the cursor of the next page; null at the end of the list."""

    data: list[T]
    next_cursor: str | None = None


class KeyView(BaseModel):
    """Information about an API key, without the key itself. `tail`: its last characters. Times are in ISO 8601."""

    id: str
    tenant: str = ""
    role: str = ""
    name: str = ""
    tail: str = ""
    created_at: Instant | None = None
    expires_at: Instant | None = None
    state: str


class DisabledTool(BaseModel):
    """A record that a tool is disabled. `by`: the API key or tenant that disabled the tool. `at`: ISO 8601."""

    by: str
    at: str
    reason: str | None


class ToolView(BaseModel):
    """A tool that the workers publish.

    `state`: the state for the tenant of the request: enabled, disabled (by an operator), or forbidden (not allowed by
    the tenant's policy). `off`: who disabled the tool; null: not disabled.
    """

    name: str
    description: str
    state: Literal["enabled", "disabled", "forbidden"]
    off: DisabledTool | None = None
    pool: str
    parameters: dict[str, Any]
    timeout_s: float | None
    max_timeout_s: float
    requires_permission: bool
    dangerous: bool
    read_only: bool
    idempotent: bool
