"""Whether a file that was changed can still be read as what its name says. Told, never a reason to refuse."""

from __future__ import annotations

import json
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_BYTES = 262_144
_ONLY_PARSE = 0x0400
"""`ast.PyCF_ONLY_AST`; loading ast takes longer than to parse."""
_MESSAGE_CHARS = 200


def describe_syntax(name: bytes, before: bytes, parts: tuple[bytes | memoryview, ...]) -> str | None:
    """A note when the new content, in parts, is no valid Python, JSON or TOML; None when it is, or cannot be judged."""
    kind = name[name.rfind(b".") :]
    parse = _PARSERS.get(kind)
    if parse is None or max(len(before), sum(map(len, parts))) > _MAX_BYTES:
        return None
    complaint = _complain(parse, b"".join(parts))
    if complaint is None:
        return None
    since = "" if not before else " any more" if _complain(parse, before) is None else ", as before"
    return f"[note: the file is no valid {_NAMES[kind]}{since}: {complaint}]"


def _complain(parse: Callable[[bytes], object], data: bytes) -> str | None:
    try:
        parse(data)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"[:_MESSAGE_CHARS]
    except ValueError as error:
        return str(error)[:_MESSAGE_CHARS]
    except (RecursionError, MemoryError):
        return None
    return None


def _parse_toml(data: bytes) -> object:
    """Where Python has no parser for it, any file passes."""
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(data.decode())
    return None


def _parse_python(data: bytes) -> object:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(data, "file", "exec", _ONLY_PARSE, dont_inherit=True)


_PARSERS: dict[bytes, Callable[[bytes], object]] = {
    b".py": _parse_python,
    b".pyi": _parse_python,
    b".json": json.loads,
    b".toml": _parse_toml,
}
_NAMES = {b".py": "Python", b".pyi": "Python", b".json": "JSON", b".toml": "TOML"}
