"""Reader of the input file of a batch: JSON lines in OpenAI's format or in a short format. The file is read as a stream
and checked completely before any item runs.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

from pydantic import ValidationError

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ErrorCode, OperatorError
from toolcrew.contract.file_ids import TenantStore
from toolcrew.contract.invalid_input import MAX_EXPLAINED, InvalidPart, explain_errors, format_path
from toolcrew.contract.strict_json import InvalidJson, parse_object
from toolcrew.orchestrator.batches.environments import EnvironmentChecker
from toolcrew.orchestrator.batches.line_shapes import (
    BODIES,
    Fields,
    InvalidField,
    OpenAILine,
    Shape,
    ShortCall,
    ShortRun,
    build_item,
    name_samples,
)
from toolcrew.store.batches import CALLS_URL, MAX_ID_CHARS, MAX_INPUT_BYTES, MAX_ITEMS, RUNS_URL, BatchItem

MANY_VALUES = 64
"""Number of JSON values above which an item is kept in memory as text. A parsed item needs more than ten times the
memory of its text.
"""


class _ItemText(NamedTuple):
    """An item as text. `custom_id`: the id of the item, which replaces that of the text."""

    text: bytes
    custom_id: str


class ItemList(Sequence[BatchItem]):
    """Items in the order of the lines. Items that are stored as text are parsed again on each access."""

    def __init__(self) -> None:
        self._stored: list[BatchItem | _ItemText] = []

    def add(self, item: BatchItem, values: int, custom_ids: Iterable[str]) -> None:
        """Append the items of a line, which differ only in their ids and are stored once. `values`: the number of
        values in the line, or a slightly larger number.
        """
        if values > MANY_VALUES:
            text = item.model_dump_json().encode()
            self._stored += [_ItemText(text, custom_id) for custom_id in custom_ids]
        else:
            self._stored += [item.model_copy(update={"custom_id": custom_id}) for custom_id in custom_ids]

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, index: int) -> BatchItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[BatchItem]: ...

    def __getitem__(self, index: int | slice) -> BatchItem | list[BatchItem]:
        return (
            [_parse_item(stored) for stored in self._stored[index]]
            if isinstance(index, slice)
            else _parse_item(self._stored[index])
        )

    def __iter__(self) -> Iterator[BatchItem]:
        return map(_parse_item, self._stored)


def _parse_item(stored: BatchItem | _ItemText) -> BatchItem:
    """Return the item. A stored text is parsed again."""
    if isinstance(stored, BatchItem):
        return stored
    return BatchItem.model_validate_json(stored.text).model_copy(update={"custom_id": stored.custom_id})


MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_SHOWN = 20
"""Number of errors that are shown. Further errors are only counted."""
MAX_COUNTED = 1000
"""Number of hidden errors after which the rest of the file is not read."""
MAX_VALUES, MAX_DEPTH = 20_000, 64
"""Limits of one line: the number of JSON values, and the depth of nesting."""
_NOT_AN_OBJECT = "the line is not one JSON object"
_MAX_VALUE_CHARS = 60
_OUTER_NAMES = frozenset({"method", "url", "body"})
"""Fields that distinguish a line of OpenAI's shape from a short line."""

S = TypeVar("S", bound=Shape)

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True)
class LineError:
    """An error in a line, or in the whole file if `line` is None. `line` and `column` count from 1."""

    message: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        if self.line is None:
            return self.message
        return f"line {self.line}{f', column {self.column}' if self.column is not None else ''}: {self.message}"


class BadBatch(OperatorError):
    """The file has errors, and no item was started. `errors`: the first errors. `more`: number of further
    errors. `file`: the items without errors, for further checks; None if the file could not be read.
    """

    code = ErrorCode.INVALID_ARGUMENTS

    def __init__(self, name: str, errors: Iterable[LineError], more: int = 0, file: "BatchFile | None" = None) -> None:
        self.name = name
        self.errors = tuple(errors)
        self.more = more
        self.file = file
        count = len(self.errors) + more
        hidden = (
            [f"  and {more} more" + ("; the rest of the file was not read" if more >= MAX_COUNTED else "")]
            if more
            else []
        )
        lines = [f"  {error}" for error in self.errors] + hidden
        head = (
            f"{name} has {count} error{'s' if count > 1 else ''}; nothing was started. Fix the file and submit it again"
        )
        super().__init__("\n".join([head, *lines]))

    def join(self, other: "BadBatch") -> "BadBatch":
        """Return the errors of two checks of one file, in the order of the lines."""
        errors = sorted([*self.errors, *other.errors], key=lambda error: error.line or 0)
        hidden = self.more + other.more + max(0, len(errors) - MAX_SHOWN)
        return BadBatch(self.name, errors[:MAX_SHOWN], hidden, self.file)


class ErrorCollector:
    """Collects the errors that several checks of one file find, so that the user can correct all of them at once."""

    def __init__(self, found: BadBatch | None = None) -> None:
        self.found = found

    @contextmanager
    def check(self) -> Iterator[None]:
        """Context manager that catches and stores the BadBatch that the block raises."""
        try:
            yield
        except BadBatch as error:
            self.found = error if self.found is None else self.found.join(error)

    def raise_if_any(self) -> None:
        """Raise BadBatch with all errors, if there are any."""
        if self.found is not None:
            raise self.found


@dataclass(frozen=True)
class BatchFile:
    """An input file without errors.

    `sha256` and `bytes`: hash and size of the content. `url`: url of all lines; None for the short form.
    """

    items: Sequence[BatchItem]
    sha256: str
    bytes: int
    url: str | None


def load_lines(path: Path, store: TenantStore | None = None, max_bytes: int = MAX_BLOB_BYTES) -> BatchFile:
    """Return the items of a file in the order of the lines. Relative workspace paths start at the folder of the file.

    `store`, `max_bytes`: passed to EnvironmentChecker. Raises BadBatch with all errors.
    """
    try:
        # Check the type before opening: opening a pipe waits for its writer, and a device may never end.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadBatch(
                str(path),
                [
                    LineError(
                        "the path is not a regular file. The lines are read again when the batch resumes: save them "
                        "to a regular file"
                    )
                ],
            )
        with path.open("rb") as file:
            return read_lines(file, path.parent, str(path), store, max_bytes)
    except FileNotFoundError:
        raise BadBatch(str(path), [LineError("the file does not exist: check the path")]) from None
    except (OSError, ValueError) as error:
        raise BadBatch(
            str(path), [LineError(f"the file cannot be read ({error}): use a file of JSON lines")]
        ) from error


def read_lines(
    stream: BinaryIO, folder: Path | None, name: str, store: TenantStore | None = None, max_bytes: int = MAX_BLOB_BYTES
) -> BatchFile:
    """Return the items of a stream. `name`: name of the file in messages. `folder` None: lines may not name a path.

    Raises BadBatch, OSError.
    """
    reader = _Reader(EnvironmentChecker(folder, store, max_bytes))
    reader.read(stream)
    file = BatchFile(reader.items, reader.sha256.hexdigest(), reader.bytes, reader.url)
    if reader.errors:
        raise BadBatch(name, reader.errors, reader.more, file)
    if not reader.items:
        raise BadBatch(
            name, [LineError("the file has no lines: write one object per line, with an id and an instruction")]
        )
    return file


class _Reader:
    """Reads the lines of one file and collects items and errors."""

    def __init__(self, environments: EnvironmentChecker) -> None:
        self.items = ItemList()
        self.errors: list[LineError] = []
        self.more = 0
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.url: str | None = None
        self._environments = environments
        self._item_bytes = 0
        self._lines_of: dict[str, int] = {}
        self._shape: tuple[str | None, int] | None = None

    def read(self, stream: BinaryIO) -> None:
        """Read all lines, or stop at the first limit."""
        number = 0
        while self.more < MAX_COUNTED and (raw := stream.readline(MAX_LINE_BYTES + 2)):
            number += 1
            self.bytes += len(raw)
            self.sha256.update(raw)
            if self.bytes > MAX_INPUT_BYTES:
                return self._add_error(
                    LineError(f"the file is larger than {MAX_INPUT_BYTES} bytes: split it into several batches")
                )
            line = raw.rstrip(b"\r\n")
            if len(line) > MAX_LINE_BYTES:
                message = (
                    f"the line is longer than {MAX_LINE_BYTES} bytes: put large content into the workspace. The rest "
                    "of the file was not read"
                )
                return self._add_error(LineError(message, number))
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                if len(self._lines_of) >= MAX_ITEMS:
                    return self._add_error(
                        LineError(f"the file has more than {MAX_ITEMS} lines: split it into several batches", number)
                    )
                self._read_line(number, line)
        return None

    def _read_line(self, number: int, line: bytes) -> None:
        """Read one line: store its item or add its errors."""
        try:
            text = _decode(line)
            fields = parse_object(text, MAX_VALUES, MAX_DEPTH)
            # UTF-8 cannot encode a lone surrogate, which an escape may write.
            json.dumps(fields, ensure_ascii=False).encode() if "\\u" in text else None
        except UnicodeEncodeError:
            return self._add_error(LineError("a text has a lone surrogate: write both halves of the pair", number))
        except InvalidJson as error:
            return self._add_error(LineError(f"{_NOT_AN_OBJECT} ({error.message}): fix it", number, error.column))
        values = text.count(",") + text.count("{") + text.count("[")
        for path, message in self._take(number, fields, values, len(line)):
            is_named = not path or message.startswith("`")
            self._add_error(LineError(message if is_named else f"`{format_path(path)}`: {message}", number))
        return None

    def _take(
        self, number: int, line_fields: dict[str, Any], values: int, size: int
    ) -> Iterator[tuple[FieldPath, str]]:
        """Store the items of a line, or yield the errors of the line as (path of the field, message). `size`: of the
        line, in bytes.
        """
        errors_before = len(self.errors) + self.more
        is_openai = not _OUTER_NAMES.isdisjoint(line_fields)
        body = line_fields.get("body") if is_openai else line_fields
        id_name = "custom_id" if is_openai else "id"
        custom_ids = name_samples(line_fields.get(id_name), body.get("samples") if isinstance(body, dict) else None)
        yield from self._check_ids(number, id_name, custom_ids)
        yield from self._check_size(size * len(custom_ids))
        url = str(line_fields.get("url")) if is_openai else None
        yield from self._check_shape(number, url)
        if is_openai:
            problems = _parse(OpenAILine, line_fields, (), has_messages=not self._is_full)[1]
            yield from problems
            if url not in BODIES or not isinstance(line_fields.get("body"), dict):
                return
        shape: type[Fields] = BODIES[url] if url is not None else ShortCall if "tool" in line_fields else ShortRun
        prefix = ("body",) if is_openai else ()
        body_fields = line_fields["body"] if is_openai else line_fields
        fields, problems = _parse(shape, body_fields, prefix, has_messages=not self._is_full)
        yield from problems
        invalid = {path[len(prefix) : len(prefix) + 1] for path, _ in problems}
        is_misspelled = any("`instruction`" in message for _, message in problems)
        for error in (
            fields.find_errors()
            if fields is not None
            else _find_field_errors(shape, body_fields, invalid, is_misspelled)
        ):
            yield (*prefix, *error.path), error.message
        for path, message in self._find_environment_errors(body_fields, invalid):
            yield (*prefix, *path), message
        # The consumer has stored the errors that were yielded. A file with errors keeps its other items, so that
        # later checks report their errors at the same time.
        if fields is None or len(self.errors) + self.more > errors_before:
            return
        custom_id = line_fields.get(id_name)
        item = build_item(number, custom_id, url or (CALLS_URL if "tool" in line_fields else RUNS_URL), fields)
        item = self._environments.normalize(item)
        self.items.add(item, values, custom_ids)

    def _find_environment_errors(
        self, fields: dict[str, Any], invalid: set[FieldPath]
    ) -> Iterator[tuple[FieldPath, str]]:
        """Yield the errors of the workspace, of the artifacts and of the grader. `fields`: the raw JSON of the line,
        because other fields of it may have errors. `invalid`: names of fields whose errors were already reported.
        """

        def text(value: object) -> str | None:
            return value if isinstance(value, str) else None

        def texts(value: object) -> list[str]:
            return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []

        valid = {name: value for name, value in fields.items() if (name,) not in invalid}
        yield from self._environments.find_errors(text(valid.get("workspace")), texts(valid.get("artifacts")))
        if isinstance(grader := valid.get("grader"), dict):
            yield from self._environments.find_grader_errors(text(grader.get("files")), texts(grader.get("artifacts")))

    def _check_ids(self, number: int, name: str, custom_ids: list[str]) -> Iterator[tuple[FieldPath, str]]:
        """Yield an error if an earlier line has the same id, or the samples of the line are too many or have ids that
        are too long.
        """
        for custom_id in custom_ids:
            first = self._lines_of.setdefault(custom_id, number) if isinstance(custom_id, str) else number
            if first != number:
                yield (
                    (name,),
                    f"'{_short(str(custom_id))}' is also the id of line {first}: use a different id for each line",
                )
                return
        if len(custom_ids) > 1 and len(custom_ids[-1]) > MAX_ID_CHARS:
            yield (name,), f"the ids of the samples have more than {MAX_ID_CHARS} characters: use a shorter id"
        if len(self._lines_of) > MAX_ITEMS:
            yield (name,), f"the file has more than {MAX_ITEMS} items: split it into several batches"

    def _check_size(self, size: int) -> Iterator[tuple[FieldPath, str]]:
        """Yield an error if the items so far are larger than a file may be: each sample is checked and queued like a
        line of its own. `size`: of all items of the line, in bytes.
        """
        self._item_bytes += size
        if self._item_bytes > MAX_INPUT_BYTES:
            yield (
                ("samples",),
                f"the lines, each with its samples, have more than {MAX_INPUT_BYTES} bytes: put large content into the "
                "workspace, or split the file into several batches",
            )

    def _check_shape(self, number: int, url: str | None) -> Iterator[tuple[FieldPath, str]]:
        """Yield an error unless all lines are short lines, or all lines have the url of the first line."""
        if url is not None and url not in BODIES:
            return
        if self._shape is None:
            self._shape, self.url = (url, number), url
        expected, first = self._shape
        if url == expected:
            return
        if url is None or expected is None:
            yield (
                (),
                (
                    f"this line has another shape than line {first}: write all lines with custom_id, method, url and "
                    "body, or all lines in the short form"
                ),
            )
        else:
            yield (
                ("url",),
                f"this is '{url}' and line {first} has '{expected}': a file has one url, so split it into two batches",
            )

    @property
    def _is_full(self) -> bool:
        """Return whether no further error is shown."""
        return len(self.errors) >= MAX_SHOWN

    def _add_error(self, error: LineError) -> None:
        """Add an error, or count the error if enough errors are shown."""
        if self._is_full:
            self.more += 1
        else:
            self.errors.append(error)


def _decode(line: bytes) -> str:
    """Decode a line. Raises InvalidJson with the column of the first invalid byte."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        at = len(line[: error.start].decode()) + 1
        raise InvalidJson(f"it is not UTF-8 (byte 0x{line[error.start]:02x})", at) from None


def _parse(
    shape: type[S], fields: Any, prefix: FieldPath, *, has_messages: bool
) -> tuple[S | None, list[tuple[FieldPath, str]]]:
    """Return the record, or its errors as (path, message). The messages are empty if `has_messages` is False: they
    would not be shown, and building them takes time.
    """
    try:
        return shape.model_validate(fields), []
    except ValidationError as error:
        problems = error.errors(include_url=False)
        parts = explain_errors(problems, shape) if has_messages else []
        messages = [((*prefix, *part.path), _build_message(part, prefix)) for part in parts]
        unexplained = problems[MAX_EXPLAINED:] if has_messages else problems
        return None, messages + [((*prefix, *problem["loc"]), "") for problem in unexplained]


def _build_message(part: InvalidPart, prefix: FieldPath) -> str:
    """Return the message for an invalid field of a line or of its body."""
    message = str(replace(part, path=(*prefix, *part.path)))
    return f"{message}, not {_format_value(part.value)}: fix it" if part.reason.startswith("must ") else message


def _find_field_errors(
    shape: type[Fields], fields: dict[str, Any], invalid: set[FieldPath], has_misspelled_task: bool
) -> Iterator[InvalidField]:
    """Yield the errors of a line without its `invalid` fields. Errors that follow from these fields are omitted."""
    valid = {name: value for name, value in fields.items() if (name,) not in invalid}
    parsed, _ = _parse(shape, {"id": "none", **valid} if ("id",) in invalid else valid, (), has_messages=False)
    if parsed is None:
        return
    has_invalid_task = has_misspelled_task or not invalid.isdisjoint({("instruction",), ("input",)})
    for error in parsed.find_errors():
        if error.path[:1] not in invalid and (error.path or not has_invalid_task):
            yield error


def _format_value(value: object) -> str:
    """Return the value for a message."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else _short(repr(value))


def _short(text: str) -> str:
    """Return the text, cut to _MAX_VALUE_CHARS."""
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
