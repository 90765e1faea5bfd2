"""Output rows of a batch: one JSON row for each item, in the shape of OpenAI's batch output. Builds rows and reads
them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.run_events import Failure, FailureKind, Grade
from toolcrew.orchestrator.loop.agent import RunResult
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.store.batches import CHAT_URL, MAX_ID_CHARS, ItemOutcome

MAX_ROW_BYTES = 256 * 1024 * 1024

_CUT = frozenset(
    {StopReason.CUT_REPLY, StopReason.MAX_ITERATIONS, StopReason.MAX_WALL, StopReason.MAX_TOKENS, StopReason.MAX_COST}
)
_ESCAPED = {number: f"\\u{number:04x}" for number in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
"""Characters that rows contain only as escapes. Some readers would split a row at these characters, and some of the
characters control a terminal that shows the row.
"""


class RowResponse(BaseModel):
    """Response for an item. `body`: its shape depends on the item's url (docs/batches.md)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    status_code: int = Field(ge=100, le=599)
    request_id: str
    body: dict[str, Any]


class RowError(BaseModel):
    """Error of an item. `kind`: cause of the error; None in rows that toolcrew did not write."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    code: str
    message: str
    kind: FailureKind | None = None


class Row(BaseModel):
    """A line of an output or errors file. `id`: id of the run. A row with an error may have a partial response too. For
    an item with a grader, `task` is the id of its line, and `grade` its grade.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    custom_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    response: RowResponse | None
    error: RowError | None
    task: str = ""
    grade: Grade | None = None

    @property
    def is_success(self) -> bool:
        """Return whether the item succeeded."""
        return self.error is None


def build_row(outcome: ItemOutcome) -> dict[str, Any]:
    """Return the row of an item that has ended. The response of a failed item is null or the partial result."""
    response, failure = None, outcome.failure
    if outcome.body is not None or failure is None:
        response = {"status_code": outcome.status_code, "request_id": outcome.run, "body": outcome.body or {}}
    error = None if failure is None else {"code": failure.code, "message": failure.message, "kind": failure.kind.value}
    row = {"id": outcome.run, "custom_id": outcome.custom_id, "response": response, "error": error}
    if outcome.task:
        grade = outcome.grade.model_dump() if outcome.grade is not None else None
        row |= {"task": outcome.task, "grade": grade, "grader_output": outcome.output}
    return row


def build_row_line(row: Mapping[str, Any]) -> bytes:
    """Return the row as one line with a newline at the end. The line is UTF-8 and contains no other character that
    any reader treats as the end of a line.

    Raises ValueError with a sentence: the row could not be read again.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False).translate(_ESCAPED)
        try:
            line = text.encode() + b"\n"
        except UnicodeEncodeError:
            # A file name or a model wrote half of a surrogate pair. An escape preserves the half.
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the row cannot be written as JSON ({error})") from error
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"the row is larger than {MAX_ROW_BYTES} bytes")
    return line


def parse_row(line: bytes) -> Row:
    """Parse one line of a file. Raises ValueError with a sentence: the line is not a row."""
    try:
        return Row.model_validate(json.loads(line))
    except ValidationError as error:
        raise ValueError(f"the line is not a row of a batch: {describe_invalid(error, Row)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not a row of a batch: {error}") from None


def parse_outcome(row: Row) -> Iterator[ItemOutcome]:
    """Yield the outcome of the item of a row.

    Yields nothing for an item that may start again: the infrastructure failed, the item was cancelled, or the row does
    not say what kind of failure it was.
    """
    failure, status = None, row.response.status_code if row.response is not None else 500
    if row.error is not None:
        if row.error.kind in (None, FailureKind.INFRASTRUCTURE, FailureKind.CANCELLED):
            return
        failure = Failure(kind=row.error.kind, code=row.error.code, message=row.error.message)
    body = row.response.body if row.response is not None else None
    yield ItemOutcome(
        custom_id=row.custom_id,
        run=row.id,
        status_code=status,
        body=body,
        failure=failure,
        task=row.task,
        grade=row.grade,
    )


def build_run_body(
    result: RunResult,
    *,
    has_transcript: bool = False,
    sandbox_s: float = 0.0,
    artifacts: Iterable[str] | None = None,
    missing: Iterable[str] = (),
    file: str = "",
) -> dict[str, JsonValue]:
    """Return the body of a row of /v1/agent/runs, without fields that were not requested.

    `sandbox_s`: time in which the run had a session of its own. `missing`: reasons why some artifacts are missing.
    `file`: id of the artifacts' archive in the store.
    """
    body: dict[str, JsonValue] = {
        "run": result.run,
        "answer": result.answer,
        "stop_reason": result.stop_reason.value,
        "finish_reason": result.finish_reason,
        "steps": result.steps,
        "usage": {name: count for name, count in asdict(result.usage).items() if name != "cost"},
        "cost": result.cost,
        "clocks": result.clocks.model_dump(),
        "call_usage": result.call_usage.model_dump(),
        "sandbox_s": sandbox_s,
    }
    return _add_lists(
        body,
        transcript=[dict(message) for message in result.transcript] if has_transcript else None,
        **_build_artifact_fields(artifacts, missing),
    ) | _build_archive_field(file)


def build_call_body(
    result: ToolResult, *, artifacts: Iterable[str] | None = None, missing: Iterable[str] = (), file: str = ""
) -> dict[str, JsonValue]:
    """Return the body of a row of /v1/tools/execute: the result of the call."""
    return _add_lists(
        result.model_dump(mode="json"), **_build_artifact_fields(artifacts, missing)
    ) | _build_archive_field(file)


def build_chat_body(result: RunResult, *, model: str, created: float) -> dict[str, JsonValue]:
    """Return the body of a row of /v1/chat/completions: a `chat.completion`. `created`: Unix seconds."""
    usage, is_refusal = result.usage, result.stop_reason is StopReason.REFUSED
    return {
        "id": f"chatcmpl-{result.run}",
        "object": "chat.completion",
        "created": int(created),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None if is_refusal else result.answer,
                    "refusal": result.answer if is_refusal else None,
                },
                "logprobs": None,
                "finish_reason": result.finish_reason or ("length" if result.stop_reason in _CUT else "stop"),
            }
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            **({} if result.cost is None else {"cost": result.cost}),
        },
    }


def build_answer_body(
    url: str,
    result: RunResult,
    *,
    model: str,
    created: float,
    **fields: Any,
) -> dict[str, JsonValue]:
    """Return the body of a run's row in the format that the url of its item requires. `fields`: passed to
    `build_run_body`.
    """
    if url == CHAT_URL:
        return build_chat_body(result, model=model, created=created)
    return build_run_body(result, **fields)


def _build_artifact_fields(paths: Iterable[str] | None, missing: Iterable[str]) -> dict[str, Iterable[str] | None]:
    """Return the fields about artifacts; None for fields that are left out."""
    return {"artifacts": paths, "artifacts_missing": list(missing) or None}


def _build_archive_field(file: str) -> dict[str, JsonValue]:
    """Return the field with the id of the archive; no field if there is no archive."""
    return {"artifacts_file": file} if file else {}


def _add_lists(body: dict[str, JsonValue], **lists: Iterable[Any] | None) -> dict[str, JsonValue]:
    """Return the body with the lists that are not None."""
    return body | {name: list(entries) for name, entries in lists.items() if entries is not None}
