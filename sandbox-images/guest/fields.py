"""Fields of a frame's header: each one checked, an unknown one refused."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BODY = 67_108_864
_COMMON = frozenset(("id", "op", "body_bytes", "timeout_s"))


def check_fields(header: dict[str, Any], *names: str) -> None:
    """Raises Failure when the header has a field that is neither common to all requests nor one of `names`."""
    unknown = header.keys() - _COMMON - set(names)
    if unknown:
        raise Failure(INVALID_ARGUMENTS, f"unknown field {min(unknown)!a}")


def read_whole(header: dict[str, Any], name: str, least: int, most: int | None, default: int | None = None) -> int:
    value = header.get(name, default)
    # bool is an int in Python, and JSON's true is no number.
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be a whole number {bounds}")
    return value


def read_timeout(header: dict[str, Any]) -> float:
    value = header.get("timeout_s")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise Failure(INVALID_ARGUMENTS, "'timeout_s' must be a number above 0")
    return float(value)


def read_text(header: dict[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be a string, not empty and without NUL")
    return value
