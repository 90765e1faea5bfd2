"""What a tool says of itself: the spec a model, an operator and a validator read."""

from typing import Literal

from pydantic import Field, JsonValue

from contract.calls import MAX_TIMEOUT_S, Record, ToolName


class ToolSpec(Record):
    """Name, description, JSON Schema of the parameters, limits and flags. `audience` session: a verb of the SDK, never shown to a model."""

    name: ToolName
    description: str = Field(min_length=1, max_length=8192)
    parameters: dict[str, JsonValue]
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    """The tool's own limit, shorter or longer; None: the dispatcher's default."""
    max_timeout_s: float = Field(default=MAX_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)
    requires_permission: bool = False
    dangerous: bool = False
    read_only: bool = False
    idempotent: bool = False
    pool: Literal["sandbox", "web", "tools", "local"] = "sandbox"
    """Where it runs: beside the session's sandbox; in the pool with network; in the pool of operators' tools; in the program itself."""
    audience: Literal["model", "session"] = "model"
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names a model may use for a parameter -> its canonical name."""
    command_parameter: str | None = None
    """The parameter that holds a shell command, by its canonical name: then danger and command rules are decided per command."""
    input_parameter: str | None = None
    """The parameter with text for the standard input of that command or, without one, of a program that runs already: judged as well
    where a shell may read it."""


class Catalog(Record):
    """What the workers publish: the specs they can run."""

    tools: tuple[ToolSpec, ...] = ()
