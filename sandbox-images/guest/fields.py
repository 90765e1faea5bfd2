"""Fields of headers: each class of requests declares its fields, each with the function that reads it. Other functions
convert names of files and programs to text that every encoder accepts.
"""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, MAX_BODY, RequestFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, ClassVar, Self, TypeGuard

    Reader = Callable[[dict[str, Any], str], Any]

_HEX = frozenset("0123456789abcdef")
_COMMON = frozenset(("id", "op", "body_bytes", "timeout_s"))


class GuestRequest:
    """Base class of requests. The fields that `FIELDS` declares become attributes. The constructor raises
    RequestFailure for any other field.

    `SERVER`: the module and the function that serve the request in a supervisor, unless the supervisor does so itself.
    The module is named as text and is imported only there: PID 1 serves no request and must stay small.
    """

    OP: ClassVar[str]
    SERVER: ClassVar[tuple[str, str]]
    FIELDS: ClassVar[dict[str, Reader]] = {}
    timeout_s: float

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, *self.FIELDS)
        self.timeout_s = read_timeout(header)
        for name, read in self.FIELDS.items():
            setattr(self, name, read(header, name))

    @classmethod
    def restore(cls, attributes: dict[str, Any]) -> Self:
        """Return the parsed request with these attributes, without a second check."""
        request = cls.__new__(cls)
        vars(request).update(attributes)
        return request

    @property
    def lane(self) -> str | None:
        """Return the name of the lane, or None. Requests of one lane run one after the other."""
        return None


def check_fields(header: dict[str, Any], *names: str) -> None:
    """Raise RequestFailure when the header has a field that is neither common to all requests nor one of `names`."""
    unknown = header.keys() - _COMMON - set(names)
    if unknown:
        raise RequestFailure(INVALID_ARGUMENTS, f"unknown field {min(unknown)!a}")


def read_fields(header: dict[str, Any], kind: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return the fields of a stream or of its request. `kind`: the name of the field that has chosen the readers.

    Raises RequestFailure for an unknown field and for an invalid one.
    """
    unknown = header.keys() - readers.keys() - {kind}
    if unknown:
        allowed = ", ".join(sorted(readers)) or "no fields"
        raise RequestFailure(INVALID_ARGUMENTS, f"unknown field {min(unknown)[:100]!a}; this {kind!r} has {allowed}")
    return {name: read(header, name) for name, read in readers.items()}


def read_whole(header: dict[str, Any], name: str, least: int, most: int | None, default: int | None = None) -> int:
    """Return an integer field from `least` to `most`. Raises RequestFailure when the value is missing or invalid."""
    value = header.get(name, default)
    # In Python, bool is a subclass of int. JSON's true is not a number.
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be a whole number {bounds}")
    return value


def parse_body_bytes(header: dict[str, Any]) -> int:
    """Return the declared size of a call's body, in bytes. Raises RequestFailure(INVALID_ARGUMENTS)."""
    return read_whole(header, "body_bytes", 0, MAX_BODY)


def is_request_id(value: object) -> TypeGuard[str]:
    """Return whether the value is a request id: 32 lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == 32 and _HEX.issuperset(value)


def read_timeout(header: dict[str, Any]) -> float:
    """Return the time limit of a request, in seconds. Raises RequestFailure when the value is missing or invalid."""
    value = header.get("timeout_s")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise RequestFailure(INVALID_ARGUMENTS, "'timeout_s' must be a number above 0")
    return float(value)


def read_text(header: dict[str, Any], name: str) -> str:
    """Return a text field, which is not empty and has no NUL. Raises RequestFailure when the value is missing or
    invalid.
    """
    value = header.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be a string, not empty and without NUL")
    return value


def read_any_text(header: dict[str, Any], name: str) -> str:
    """Read a text field that may be empty or contain NUL. The code that uses the text checks it."""
    value = header.get(name)
    if not isinstance(value, str):
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be a string")
    return value


def read_flag(header: dict[str, Any], name: str) -> bool:
    """Return a boolean field; False when it is missing."""
    value = header.get(name, False)
    if not isinstance(value, bool):
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be true or false")
    return value


def read_variables(header: dict[str, Any], name: str) -> dict[str, str]:
    """Return the environment variables in a field of a header; none when it is missing. Raises RequestFailure when a
    variable is invalid.
    """
    value = header.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be an object of strings")
    for variable, text in value.items():
        if not variable or "=" in variable or "\0" in variable or "\0" in text:
            raise RequestFailure(INVALID_ARGUMENTS, f"{variable!a} cannot be an environment variable")
    return value


def read_script_bytes(header: dict[str, Any], name: str) -> int:
    """Return the size of a script, which is the start of the body."""
    size = read_whole(header, name, 1, MAX_BODY)
    if size > read_whole(header, "body_bytes", 0, MAX_BODY):
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} is larger than the body")
    return size


def optional(read: Reader) -> Reader:
    """Return a reader of a field that may be missing or null. For such a field the reader returns None."""
    return lambda header, name: None if header.get(name) is None else read(header, name)


def whole(least: int, most: int | None = None, default: int | None = None) -> Reader:
    """Return a reader of an integer from `least` to `most`."""
    return lambda header, name: read_whole(header, name, least, most, default)


def choice(*choices: str, default: str | None = None) -> Reader:
    """Return a reader of one of several texts."""

    def read(header: dict[str, Any], name: str) -> str:
        value = header.get(name, default)
        if value not in choices:
            raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be one of {', '.join(choices)}")
        return str(value)

    return read


def printable(name: bytes | str) -> str:
    """Return a name as text that every encoder accepts. Bytes that are not UTF-8 are shown as escapes."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass")
    return raw.decode("utf-8", "backslashreplace")


def escaped(name: bytes) -> str:
    """Return a path as one line of text. Characters that are not printable appear as escapes."""
    text = printable(name)
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def encode_text(text: str, subject: str) -> bytes:
    """Return the bytes of a name or an argument. Raises RequestFailure when the text cannot be encoded."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise RequestFailure(INVALID_ARGUMENTS, f"{subject} has a character that cannot be encoded") from None
