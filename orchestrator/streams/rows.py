"""Rows that a sandbox sends in a stream, such as the entries of a folder: lines of JSON. They are untrusted."""

from collections.abc import AsyncIterator

from pydantic import ValidationError

from toolcrew.contract.calls import R
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.orchestrator.streams.stream import Stream

MAX_LINE_BYTES = 64 * 1024
_INVALID = "the stream server of the sandbox sent an invalid answer: open another session"


def parse_answer_fields(kind: type[R], fields: object) -> R:
    """Return what the sandbox has answered. Its fields are untrusted. Raises SandboxUnavailable."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SandboxUnavailable(_INVALID) from error


async def read_row_lines(stream: Stream) -> AsyncIterator[list[bytes]]:
    """Yield the lines of each piece of a stream. Raises ToolFailure, OperatorError."""
    rest = b""
    while (piece := await stream.read()) is not None:
        *lines, rest = (rest + piece.data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise SandboxUnavailable(_INVALID)
        if lines:
            yield lines


def parse_row(kind: type[R], line: bytes) -> R:
    """Return a line of a stream as a record. Raises SandboxUnavailable."""
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise SandboxUnavailable(_INVALID) from error
