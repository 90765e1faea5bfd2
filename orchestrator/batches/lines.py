"""A batch's input file: JSON lines in two shapes, read as a stream and checked as a whole before anything runs."""

import codecs
import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from contract.calls import MAX_BLOB_BYTES
from contract.errors import ErrorCode, OperatorError
from orchestrator.batches.grounds import Grounds
from orchestrator.batches.line_shapes import (
    BODIES,
    LIMIT_NAMES,
    Fields,
    OpenAILine,
    Shape,
    ShortCall,
    ShortRun,
    Unfit,
    build_item,
)
from orchestrator.batches.strict_json import NotStrict, find_columns, parse_object
from store.archives.files import TenantStore
from store.batches import CALLS_URL, MAX_INPUT_BYTES, MAX_ITEMS, RUNS_URL, BatchItem

MANY_VALUES = 64
"""Lists, objects and what they hold: as records these take ten times their text and more, so items with more of them
are kept as text.
"""


class ItemList(Sequence[BatchItem]):
    """Filled once, in the order of the lines. Those that are kept as text are made anew whenever they are asked for."""

    def __init__(self) -> None:
        self._kept: list[BatchItem | bytes] = []

    def add(self, item: BatchItem, values: int) -> None:
        """`values`: how many there are in its line, or a few more."""
        self._kept.append(item if values <= MANY_VALUES else item.model_dump_json().encode())

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, place: int) -> BatchItem: ...

    @overload
    def __getitem__(self, place: slice) -> list[BatchItem]: ...

    def __getitem__(self, place: int | slice) -> BatchItem | list[BatchItem]:
        return [_made(kept) for kept in self._kept[place]] if isinstance(place, slice) else _made(self._kept[place])

    def __iter__(self) -> Iterator[BatchItem]:
        return map(_made, self._kept)


def _made(kept: BatchItem | bytes) -> BatchItem:
    return BatchItem.model_validate_json(kept) if isinstance(kept, bytes) else kept


MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_SHOWN = 20
"""Errors that are shown; the rest is counted."""
MAX_COUNTED = 1000
"""The file is read no further behind so many errors."""
_MAX_VALUE_CHARS = 60
_OUTER_NAMES = frozenset({"method", "url", "body"})
"""What tells a line of OpenAI's shape from a short one."""

S = TypeVar("S", bound=Shape)

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a line; `line` None: with the file. Both numbers count from 1."""

    message: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        if self.line is None:
            return self.message
        return f"line {self.line}{f', column {self.column}' if self.column is not None else ''}: {self.message}"


class BadBatch(OperatorError):
    """A file that is not run: nothing of it was started. `complaints`: the first of its errors; `more`: how many others
    there are.
    """

    code = ErrorCode.INVALID_ARGUMENTS

    def __init__(self, name: str, complaints: Iterable[Complaint], more: int = 0) -> None:
        self.complaints = tuple(complaints)
        self.more = more
        count = len(self.complaints) + more
        rest = [f"  and {more} more" + ("; what follows was not read" if more >= MAX_COUNTED else "")] if more else []
        told = [f"  {complaint}" for complaint in self.complaints] + rest
        head = (
            f"{name} has {count} error{'s' if count > 1 else ''} and nothing of it was started: mend the file and "
            "submit it again"
        )
        super().__init__("\n".join([head, *told]))


@dataclass(frozen=True)
class BatchFile:
    """A file without an error. `sha256` and `bytes`: of its content as it was read; `url`: of all its lines, None for
    the short form.
    """

    items: Sequence[BatchItem]
    sha256: str
    bytes: int
    url: str | None


def load_lines(path: Path, store: TenantStore | None = None, max_bytes: int = MAX_BLOB_BYTES) -> BatchFile:
    """The items of a file, in its order; names of workspaces in it begin at its folder. `store`, `max_bytes`:
    as for Grounds. Raises BadBatch with all that is wrong.
    """
    try:
        # Looked at first: opening a pipe would wait for somebody who writes it, and a device may never end.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadBatch(
                str(path),
                [
                    Complaint(
                        "it is no plain file, and its lines are read again to go on with the batch: save them to one"
                    )
                ],
            )
        with path.open("rb") as file:
            return read_lines(file, path.parent, str(path), store, max_bytes)
    except FileNotFoundError:
        raise BadBatch(str(path), [Complaint("the file does not exist: look at its name")]) from None
    except (OSError, ValueError) as error:
        raise BadBatch(
            str(path), [Complaint(f"the file cannot be read ({error}): give a file of JSON lines")]
        ) from error


def read_lines(
    stream: BinaryIO, folder: Path | None, name: str, store: TenantStore | None = None, max_bytes: int = MAX_BLOB_BYTES
) -> BatchFile:
    """The same of a stream that has no folder of its own; `name`: what messages call it; `folder` None: lines may name
    no path. Raises BadBatch, OSError.
    """
    reader = _Reader(Grounds(folder, store, max_bytes))
    reader.read(stream)
    if reader.complaints:
        raise BadBatch(name, reader.complaints, reader.more)
    if not reader.items:
        raise BadBatch(
            name, [Complaint("the file holds no line: write one object a line, with an id and an instruction")]
        )
    return BatchFile(reader.items, reader.sha256.hexdigest(), reader.bytes, reader.url)


class _Reader:
    def __init__(self, grounds: Grounds) -> None:
        self.items = ItemList()
        self.complaints: list[Complaint] = []
        self.more = 0
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.url: str | None = None
        self._grounds = grounds
        self._lines_of: dict[str, int] = {}
        self._shape: tuple[str | None, int] | None = None

    def read(self, stream: BinaryIO) -> None:
        number = 0
        while self.more < MAX_COUNTED and (raw := stream.readline(MAX_LINE_BYTES + 2)):
            number += 1
            self.bytes += len(raw)
            self.sha256.update(raw)
            if self.bytes > MAX_INPUT_BYTES:
                return self._complain(
                    Complaint(f"the file is larger than {MAX_INPUT_BYTES} bytes: make several batches of it")
                )
            line = raw.rstrip(b"\r\n")
            if len(line) > MAX_LINE_BYTES:
                told = (
                    f"it is longer than {MAX_LINE_BYTES} bytes: put what is large into the workspace; what follows was "
                    "not read"
                )
                return self._complain(Complaint(told, number))
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                if len(self._lines_of) >= MAX_ITEMS:
                    return self._complain(
                        Complaint(
                            f"this is line {MAX_ITEMS + 1} of at most {MAX_ITEMS}: make several batches of it", number
                        )
                    )
                self._read_line(number, line)
        return None

    def _read_line(self, number: int, line: bytes) -> None:
        text = ""
        try:
            text = _decode(line)
            found = parse_object(text)
        except NotStrict as error:
            return self._complain(Complaint(error.message, number, error.column))
        complaints = list(self._take(number, found, text.count(",") + text.count("{") + text.count("[")))
        shown = complaints[: MAX_SHOWN - len(self.complaints)]
        for (_, message), column in zip(shown, find_columns(text, [path for path, _ in shown]), strict=True):
            self._complain(Complaint(message, number, column))
        self.more += len(complaints) - len(shown)
        return None

    def _take(self, number: int, found: dict[str, Any], values: int) -> Iterator[tuple[FieldPath, str]]:
        """The line's item is kept, or it is said why there is none."""
        is_openai = not _OUTER_NAMES.isdisjoint(found)
        yield from self._check_id(number, "custom_id" if is_openai else "id", found)
        url = str(found.get("url")) if is_openai else None
        yield from self._check_shape(number, url)
        if is_openai:
            problems = _parse(OpenAILine, found, (), is_told=not self._is_full)[1]
            yield from problems
            if url not in BODIES or not isinstance(found.get("body"), dict):
                return
        shape: type[Fields] = BODIES[url] if url is not None else ShortCall if "tool" in found else ShortRun
        fields, problems = _parse(
            shape, found["body"] if is_openai else found, ("body",) if is_openai else (), is_told=not self._is_full
        )
        yield from problems
        if fields is None:
            return
        custom_id, prefix = found.get("custom_id" if is_openai else "id"), ("body",) if is_openai else ()
        try:
            item = build_item(number, custom_id, url or (CALLS_URL if "tool" in found else RUNS_URL), fields)
        except Unfit as error:
            yield (*prefix, *error.path), error.message
            return
        except ValidationError:
            # Of the line around the body, which was told above.
            return
        for path, message in self._grounds.complaints(item.ground):
            yield (*prefix, *path), message
        # Once a line is wrong nothing will run: what the rest asks for need not be kept.
        if not self.complaints:
            self.items.add(item.model_copy(update={"ground": self._grounds.settle(item.ground)}), values)

    def _check_id(self, number: int, name: str, found: dict[str, Any]) -> Iterator[tuple[FieldPath, str]]:
        custom_id = found.get(name)
        first = self._lines_of.setdefault(custom_id, number) if isinstance(custom_id, str) else number
        if first != number:
            yield (
                (name,),
                f"'{_short(str(custom_id))}' is the id of line {first} as well: give each line one of its own",
            )

    def _check_shape(self, number: int, url: str | None) -> Iterator[tuple[FieldPath, str]]:
        """All lines are short ones, or all have the first one's url."""
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
                    "body, or all short"
                ),
            )
        else:
            yield (
                ("url",),
                f"this is '{url}' and line {first} has '{expected}': a file has one url, make two batches of it",
            )

    @property
    def _is_full(self) -> bool:
        return len(self.complaints) >= MAX_SHOWN

    def _complain(self, complaint: Complaint) -> None:
        if self._is_full:
            self.more += 1
        else:
            self.complaints.append(complaint)


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        at = len(line[: error.start].decode()) + 1
        raise NotStrict(f"this is no UTF-8 (byte 0x{line[error.start]:02x}): save the file as UTF-8", at) from None


def _parse(
    shape: type[S], fields: Any, prefix: FieldPath, *, is_told: bool
) -> tuple[S | None, list[tuple[FieldPath, str]]]:
    """The record, or what is wrong with it; without its sentences where nobody reads them."""
    try:
        return shape.model_validate(fields), []
    except ValidationError as error:
        told = [(problem, (*prefix, *problem["loc"])) for problem in error.errors(include_url=False)]
        return None, [
            (path, _sentence(shape, problem, path) if is_told and at < MAX_SHOWN else "")
            for at, (problem, path) in enumerate(told)
        ]


def _sentence(shape: type[BaseModel], problem: ErrorDetails, path: FieldPath) -> str:
    kind, value, last = problem["type"], problem["input"], str(path[-1])
    field = f"`{'.'.join(_short(str(step)) for step in path)}`"
    if kind == "missing":
        return f"{field} is missing: give it"
    if kind == "extra_forbidden":
        return f"{field} is not known: {_nearest(shape, last, problem['loc'][:-1])}"
    if kind == "literal_error" and last == "url":
        return f"{field} is one of {', '.join(BODIES)}, not {_shown(value)}"
    return (
        f"{field} {problem['msg'].removeprefix('Input ').removeprefix('String ')[:300]}, not {_shown(value)}: mend it"
    )


_MEANT = {
    "custom_id": "id", "prompt": "instruction", "task": "instruction", "question": "instruction", "text": "instruction",
    "timeout": "timeout_s", "folder": "workspace", "dir": "workspace", "files": "artifacts", "args": "arguments",
    "checkpoint": "restore",
}  # fmt: skip


def _nearest(shape: type[BaseModel], name: str, above: FieldPath) -> str:
    names = list(LIMIT_NAMES if above == ("limits",) else shape.model_fields)
    if name in LIMIT_NAMES and "limits" in names:
        return f"write it as `limits.{name}`"
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])|[- ]", "_", name[:100]).lower()
    close = [meant] if (meant := _MEANT.get(plain)) in names else difflib.get_close_matches(plain, names, 1)
    return f"did you mean `{close[0]}`?" if close else f"there are {', '.join(sorted(names))}"


def _shown(value: object) -> str:
    """A value in a sentence."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
