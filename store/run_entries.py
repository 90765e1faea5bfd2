"""What a run's log holds, one record a thing that must not happen twice."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, TypeAdapter

from contract.calls import Record, ToolCall, ToolResult


class _Entry(Record):
    """`at`: Unix seconds. `wall_s`: how long the run had worked by then, setting up and being dead not counted."""

    at: float
    wall_s: float = 0.0


class SessionOpening(_Entry):
    """A session of that name is about to be opened."""

    type: Literal["session_opening"] = "session_opening"
    session: str


class SessionOpened(_Entry):
    """It is there, with the item's workspace in it. `info`: the fields of SessionInfo."""

    type: Literal["session_opened"] = "session_opened"
    session: str
    info: dict[str, JsonValue]


class Replied(_Entry):
    """A whole reply of the model, before any of its calls runs. `chunks` in the OpenAI wire shape, neighbours joined."""

    type: Literal["replied"] = "replied"
    chunks: tuple[dict[str, Any], ...]


class Reviewed(_Entry):
    """What an approver made of a call: the call as it may run, or the result that refuses it."""

    type: Literal["reviewed"] = "reviewed"
    call: str
    approved: ToolCall | None = None
    refused: ToolResult | None = None


class Resulted(_Entry):
    """The one result of a call."""

    type: Literal["resulted"] = "resulted"
    call: str
    result: ToolResult


class Exported(_Entry):
    """The item's artifacts are where they belong: their session need not be there any more. `missing`: what of them there was not, in sentences."""

    type: Literal["exported"] = "exported"
    paths: tuple[str, ...]
    missing: tuple[str, ...] = ()


Entry = Annotated[SessionOpening | SessionOpened | Replied | Reviewed | Resulted | Exported, Field(discriminator="type")]
_ANY: TypeAdapter[Entry] = TypeAdapter(Entry)


def parse_entry(text: str | bytes) -> Entry:
    """Raises ValidationError for what another release wrote."""
    return _ANY.validate_json(text)
