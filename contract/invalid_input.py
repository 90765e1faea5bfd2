"""Describes input that a record does not accept: the field, what is wrong with it, and similar names.

The sentences of pydantic are never shown. They name types of Python, not what to write, and differ between releases.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

MAX_PART_CHARS, MAX_PATH_PARTS = 60, 12
MAX_REASON_CHARS = 300
MAX_EXPLAINED = 20
_MAX_NAME_CHARS = 100
"""Characters of a name that are compared with other names. The time of a comparison grows with the square of them."""
_NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
_SYNONYMS = {
    "custom_id": "id", "prompt": "instruction", "task": "instruction", "question": "instruction", "text": "instruction",
    "timeout": "timeout_s", "folder": "workspace", "dir": "workspace", "files": "artifacts", "args": "arguments",
    "checkpoint": "restore",
}  # fmt: skip
_FIXED = {
    "missing": "is missing: add it",
    "none_required": "must be null",
    "string_unicode": "must be valid Unicode, without half of a surrogate pair",
    "finite_number": "must be a finite number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "timezone_aware": "must be a time with a time zone, such as 2026-01-31T12:00:00Z",
    "recursion_loop": "contains itself, or nests too deeply",
    "json_type": "must be JSON text",
    "byte_size": "must be a size, such as 512MiB or 4GiB",
    "byte_size_unit": "must be a size, such as 512MiB or 4GiB",
}
_KINDS = {
    "string": "a string",
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen": "a list",
    "iterable": "a list",
    "dict": "an object",
    "mapping": "an object",
    "model": "an object",
    "dataclass": "an object",
    "bytes": "bytes",
    "url": "a URL, such as https://example.com/path",
    "datetime": "a time in ISO 8601, such as 2026-01-31T12:00:00Z",
    "date": "a date, such as 2026-01-31",
    "time": "a time of day, such as 12:00:00",
    "uuid": "a UUID",
}
"""First part of the name of an error -> what the value must be."""
_BOUNDS = (
    ("gt", "must be greater than {}"),
    ("ge", "must be at least {}"),
    ("lt", "must be less than {}"),
    ("le", "must be at most {}"),
    ("multiple_of", "must be a multiple of {}"),
)
_UNION_LABEL = re.compile(
    r"(str|int|float|bool|bytes|none|constrained-\w+|(list|dict|tuple|set|literal|function-[\w-]+|nullable|lax-or-strict)"
    r"\[.*)",
    re.DOTALL,
)
"""The part that pydantic adds to a path for each type of a union."""

Details = Mapping[str, Any]
"""One error as `ValidationError.errors` returns it. `input` and `ctx` may be missing."""


@dataclass(frozen=True)
class InvalidPart:
    """A part of the input that is not accepted.

    `path`: names and indexes from the outside to the inside. `reason`: the end of a sentence that begins with the
    field, such as "must be a list". `is_sentence`: `reason` is a complete sentence instead. `nearest`: names or values
    that are similar to an unknown one, best first. `value`: the input, which may be secret; no message contains it.
    """

    path: tuple[str | int, ...]
    reason: str
    is_sentence: bool = False
    nearest: tuple[str, ...] = ()
    value: object = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        if not self.path:
            return self.reason if self.is_sentence else f"the value {self.reason}"
        return f"`{format_path(self.path)}`{':' if self.is_sentence else ''} {self.reason}"


def format_path(path: Iterable[str | int]) -> str:
    """Return the path of a field for a message, without lone surrogates. Long parts are cut."""
    parts = [str(part).encode("utf-8", "replace").decode() for part in path][:MAX_PATH_PARTS]
    return ".".join(part if len(part) <= MAX_PART_CHARS else part[: MAX_PART_CHARS - 3] + "..." for part in parts)


def describe_invalid(error: ValueError, kind: type[BaseModel] | None = None) -> str:
    """Return the first problem of a record as a sentence, without the value of the field. For an error that is not from
    pydantic, return the text of the error. `kind`: as in find_invalid.
    """
    return str(find_invalid(error, kind)) if isinstance(error, ValidationError) else str(error)


def find_invalid(error: ValidationError, kind: type[BaseModel] | None = None) -> InvalidPart:
    """Return the first invalid part. `kind`: the class of the record, whose field names are compared with an unknown
    one.
    """
    return explain_errors(error.errors(include_url=False), kind)[0]


def explain_errors(errors: Iterable[Details], kind: type[BaseModel] | None = None) -> list[InvalidPart]:
    """Return the invalid parts of the first MAX_EXPLAINED errors. The errors of all types of a union are one part."""
    parts: list[InvalidPart] = []
    # Names are compared for each error, which takes seconds for the errors of a body with many unknown fields.
    for details in islice(errors, MAX_EXPLAINED):
        part = explain_error(details, kind)
        last = parts[-1] if parts else None
        if last is not None and (merged := _merge_union(last, part)) is not None:
            parts[-1] = merged
        else:
            parts.append(part)
    return parts


def explain_error(details: Details, kind: type[BaseModel] | None = None) -> InvalidPart:
    """Return the invalid part of one error."""
    return replace(_explain(details, kind), value=details.get("input"))


def _explain(details: Details, kind: type[BaseModel] | None) -> InvalidPart:
    path, error_type = tuple(details["loc"]), str(details["type"])
    if error_type == "finite_number" and path[-1:] == ("float",):
        # The part for one type of the union of all JSON values.
        path = path[:-1]
    context: Mapping[str, Any] = details.get("ctx") or {}
    if error_type in ("value_error", "assertion_error"):
        text = str(details["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return InvalidPart(path, text[:MAX_REASON_CHARS], is_sentence=True)
    if error_type in ("extra_forbidden", "unexpected_keyword_argument"):
        return _explain_unknown(path, _find_fields(kind, path[:-1]))
    if error_type in ("literal_error", "enum", "union_tag_invalid"):
        return _explain_choice(path, str(context.get("expected", context.get("expected_tags", ""))), details)
    if error_type == "json_invalid":
        return _explain_json(path, str(context.get("error", "")))
    return InvalidPart(path, _explain_value(error_type, context)[:MAX_REASON_CHARS])


def _explain_value(error_type: str, context: Mapping[str, Any]) -> str:
    """Return what the value must be, for an error whose name and limits say it."""
    if error_type in _FIXED:
        return _FIXED[error_type]
    for name, text in _BOUNDS:
        if name in context:
            return text.format(_format_number(context[name]))
    if error_type == "string_pattern_mismatch":
        return _explain_pattern(str(context.get("pattern")))
    if error_type.endswith(("_too_short", "_too_long")) or error_type in ("too_short", "too_long"):
        return _explain_length(error_type, context)
    expected = _KINDS.get(error_type.split("_", 1)[0])
    return f"must be {expected}" if expected is not None else f"is invalid ({error_type.replace('_', ' ')})"


def _explain_pattern(pattern: str) -> str:
    if pattern == _NAME_PATTERN:
        return "must have 1 to 64 letters, digits, '-' and '_'"
    return f"must be {_KINDS['url']}" if pattern.startswith("^https?://") else f"must match {pattern}"


def _explain_length(error_type: str, context: Mapping[str, Any]) -> str:
    unit = {"string": "character", "url": "character", "bytes": "byte"}.get(error_type.split("_", 1)[0], "item")
    if "min_length" in context:
        limit = int(context["min_length"])
        return "must not be empty" if limit == 1 else f"must have at least {limit} {unit}s"
    limit = int(context.get("max_length", 0))
    return f"must have at most {limit} {unit}{'' if limit == 1 else 's'}"


def _explain_json(path: tuple[str | int, ...], problem: str) -> InvalidPart:
    """Return the part for text that is not JSON. The position is part of the path or of the problem."""
    found = re.search(r"line (\d+) column (\d+)", problem)
    if found is not None:
        place = f" (line {found[1]}, column {found[2]})"
    else:
        place = f" (character {path[-1]})" if path and isinstance(path[-1], int) else ""
    what = "is nested too deeply" if "recursion" in problem else "is not valid JSON"
    return InvalidPart(tuple(part for part in path if isinstance(part, str)), f"{what}{place}")


def _explain_choice(path: tuple[str | int, ...], expected: str, details: Details) -> InvalidPart:
    """Return the part for a value that is none of the allowed values."""
    value, names = details.get("input"), re.findall(r"'([^']*)'", expected)
    nearest = difflib.get_close_matches(value[:_MAX_NAME_CHARS], names, 3, 0.0) if isinstance(value, str) else ()
    return InvalidPart(path, f"must be {expected}"[:MAX_REASON_CHARS], nearest=tuple(nearest))


def _explain_unknown(path: tuple[str | int, ...], fields: Mapping[str, Any]) -> InvalidPart:
    """Return the part for a field that the record does not have. `fields`: the annotations of its fields."""
    name = str(path[-1])
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])|[- ]", "_", name[:_MAX_NAME_CHARS]).lower()
    synonym = _SYNONYMS.get(plain)
    first = [synonym] if synonym in fields else []
    nearest = tuple(dict.fromkeys([*first, *difflib.get_close_matches(plain, fields, 3, 0.0)]))[:3]
    inner = next((f"{outer}.{name}" for outer, inside in fields.items() if name in _list_fields(inside)), None)
    if inner is not None:
        return InvalidPart(path, f"is an unknown field: write it as `{inner}`", nearest=(inner,))
    close = first or difflib.get_close_matches(plain, fields, 1)
    if close:
        advice = f"did you mean `{close[0]}`?"
    elif fields:
        advice = f"the fields are {', '.join(sorted(fields))}"
    else:
        advice = "remove it"
    return InvalidPart(path, f"is an unknown field: {advice}", nearest=nearest)


def _find_fields(kind: type[BaseModel] | None, path: Iterable[str | int]) -> dict[str, Any]:
    """Return the fields of the object at `path` in a record of the class `kind`."""
    annotation: Any = kind
    for step in path:
        # Indexes, keys of an object and the parts for the types of a union name no field.
        annotation = _list_fields(annotation).get(str(step), annotation)
    return _list_fields(annotation)


def _list_fields(annotation: Any) -> dict[str, Any]:
    """Return the fields of all records in a type: name as it is written, and annotation."""
    return {
        facts.alias or name: facts.annotation
        for model in _find_models(annotation)
        for name, facts in model.model_fields.items()
    }


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        yield annotation
    arguments = get_args(annotation)
    for inner in arguments[:1] if get_origin(annotation) is Annotated else arguments:
        yield from _find_models(inner)


def _merge_union(last: InvalidPart, part: InvalidPart) -> InvalidPart | None:
    """Return one part for two types of a union; None if the parts belong to different fields."""
    if not (part.path and isinstance(part.path[-1], str) and _UNION_LABEL.fullmatch(part.path[-1])):
        return None
    path = part.path[:-1]
    is_merged = last.path == path
    is_first = last.path[:-1] == path and isinstance(last.path[-1], str) and _UNION_LABEL.fullmatch(last.path[-1])
    if not (is_merged or is_first):
        return None
    prefix = "must be "
    if last.reason.startswith(prefix) and part.reason.startswith(prefix):
        kinds = dict.fromkeys([*last.reason.removeprefix(prefix).split(" or "), part.reason.removeprefix(prefix)])
        return replace(last, path=path, reason=prefix + " or ".join(kinds))
    return replace(last, path=path)


def _format_number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)
