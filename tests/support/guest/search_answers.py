"""A tool environment whose guest answers searches from a script, and the final events of such answers."""

from collections.abc import Mapping
from typing import Any

from tests.support.records.builders import build_context, build_reply
from toolcrew.contract.guest_protocol import A, GuestReply, GuestRequest
from toolcrew.workers.sandbox_client import GuestResponse
from toolcrew.workers.tools.base import OnData


def build_glob_done(**fields: Any) -> dict[str, Any]:
    plain = {"total": 0, "shown": 0, "cut": False, "ignored": 0, "unreadable": 0, "partial": False, "hints": []}
    return {**plain, **fields}


def build_grep_done(**fields: Any) -> dict[str, Any]:
    counts = (
        "matches",
        "files",
        "shown",
        "shown_files",
        "cut_lines",
        "searched",
        "ignored",
        "large",
        "binary",
        "unreadable",
    )
    names = ("large_names", "binary_names", "unreadable_names", "hints")
    plain = {
        **dict.fromkeys(counts, 0),
        **{name: [] for name in names},
        "is_file": False,
        "cut": False,
        "partial": False,
    }
    return {**plain, **fields}


class ScriptedBench:
    """A ToolEnvironment for one request. `pieces` arrive unchanged; `shown` is the output that a watcher received."""

    def __init__(
        self,
        pieces: bytes | list[bytes] | list[tuple[str, bytes]],
        done: Mapping[str, Any],
        *,
        is_watched: bool = False,
    ) -> None:
        self.context = build_context()
        self.is_watched = is_watched
        self.shown: list[str] = []
        self.request: Mapping[str, Any] = {}
        self._pieces = [pieces] if isinstance(pieces, bytes) else pieces
        self._done = done

    def run(self, request: GuestRequest[A], body: bytes = b"", on_data: OnData | None = None) -> GuestReply[A]:
        assert on_data is not None
        self.request = request.as_header()
        for piece in self._pieces:
            on_data(*(("lines", piece) if isinstance(piece, bytes) else piece))
        return build_reply(request, GuestResponse(self._done))

    def show(self, stream: str, text: str) -> None:
        assert stream == "stdout"
        self.shown.append(text)
