"""Requests with fields of any type and size: the server answers each with a code that blames the request."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.guest.stream_client import RunningServer, StreamError

_CODES = {
    None,
    "INVALID_ARGUMENTS",
    "FILE_NOT_FOUND",
    "FILE_EXISTS",
    "NOT_A_DIRECTORY",
    "IS_DIRECTORY",
    "PATH_NOT_ALLOWED",
    "PERMISSION_DENIED",
    "OFFSET_OUT_OF_RANGE",
    "NETWORK_ERROR",
}
_NAMES = ("path", "source", "target", "user", "mode", "metadata", "offset", "bytes", "depth", "recursive", "port", "x")
_PATHS = st.sampled_from(["f", "folder", "folder/f", "missing", "", ".", "..", "/", "//", "f/", "\0", "a/../f", "link"])
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _PATHS
    | st.text(max_size=20)
    | st.just("x" * 5000),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=4,
)
_FIELDS = st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=5)


def without_removal_of_the_test(fields: dict[str, Any]) -> dict[str, Any]:
    """Keep absolute paths and `..` out: the server of the test may have all rights."""
    return {
        name: value
        for name, value in fields.items()
        if not (isinstance(value, str) and (value.startswith("/") or ".." in value))
    }


@pytest.mark.parametrize("op", ["stat", "make_folder", "move", "remove", "set_metadata"])
def test_requests(server: RunningServer, op: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(_FIELDS)
    def ask(fields: dict[str, Any]) -> None:
        make_files(server)
        assert code_of(lambda: server.client.call(op, **without_removal_of_the_test(fields))) in _CODES

    ask()


@pytest.mark.parametrize("what", ["read", "list", "watch", "port"])
def test_streams(server: RunningServer, what: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(_FIELDS)
    def ask(fields: dict[str, Any]) -> None:
        make_files(server)
        stream = server.client.open(what, **without_removal_of_the_test(fields))
        assert code_of(stream.opened) in _CODES
        stream.close()

    ask()


def code_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except StreamError as error:
        return str(error.code)
    return None


def make_files(server: RunningServer) -> None:
    (server.workspace / "folder").mkdir(exist_ok=True)
    if not os.path.lexists(server.workspace / "f"):
        (server.workspace / "f").write_bytes(b"12345")
    if not os.path.lexists(server.workspace / "link"):
        (server.workspace / "link").symlink_to("folder")
