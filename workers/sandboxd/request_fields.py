"""Checks of the fields of requests that are not calls. A wrong field raises ToolFailure(INVALID_ARGUMENTS)."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.workers.sandboxd.connection import parse_count, parse_text

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}:[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def parse_session(header: Mapping[str, Any]) -> str:
    """Return the name of a session, `<tenant>:<session>`. Neither part contains a colon, so no two tenants share a
    name.
    """
    name = parse_text(header, "sandbox")
    if _SESSION.fullmatch(name) is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"'{name[:200]}' is not the name of a session: <tenant>:<session>, each of A-Z, a-z, 0-9, _ and -",
        )
    return name


def parse_fence(header: Mapping[str, Any]) -> int | None:
    """Return the fence: the number of the session's opening that the request refers to; None for any opening."""
    return parse_count(header, "fence") if "fence" in header else None


def parse_spec(header: Mapping[str, Any]) -> SessionSpec:
    """Return the options of the session that a request opens."""
    fields = {name: value for name, value in header.items() if name not in ("verb", "sandbox", "policy", "moved")}
    try:
        return SessionSpec.model_validate(fields)
    except ValidationError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{find_invalid(error, SessionSpec)}; correct the request"
        ) from None


def parse_skill(header: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return scope, digest and archive size of a request about a skill. The scope is "" for a skill that all tenants
    share. A size of 0 means that no archive follows.
    """
    digest = parse_text(header, "digest")
    if not _DIGEST.fullmatch(digest):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "digest must be a SHA-256 in hexadecimal")
    scope = "" if header.get("shared") is True else parse_session(header).partition(":")[0]
    return scope, digest, parse_count(header, "body_bytes")
