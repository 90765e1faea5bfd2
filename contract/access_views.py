"""Pages of lists, API keys and tools, as the HTTP API returns them."""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from toolcrew.contract.clock import Instant
from toolcrew.contract.specs import NO_NETWORK

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
    the tenant's policy). `off`: who disabled the tool; null: not disabled. `aliases`: other names of parameters.
    `command_parameter`: the parameter with a shell command; `input_parameter`: the one with its standard input.
    `network`: the network access of the sandbox, as the description states it.
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
    aliases: dict[str, str] = Field(default_factory=dict)
    command_parameter: str | None = None
    input_parameter: str | None = None
    network: str = NO_NETWORK


class SkillView(BaseModel):
    """A skill. `source`: `system` (installed on the workers for all tenants) or `tenant` (installed for this tenant).

    `tool`: whether the skill is a tool with its own name: yes, no, or "name taken" by a tool of the workers.
    `hides_system`: the skill replaces the workers' skill of the same name. `digest`: sha256 of its files. `bytes`:
    size of all files. `warnings`: problems that the author should fix.
    """

    name: str
    source: str
    tool: str
    hides_system: bool
    description: str
    license: str | None
    compatibility: str | None
    digest: str
    files: int
    bytes: int
    has_scripts: bool
    warnings: list[str]
