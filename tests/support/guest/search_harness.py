"""Folders to search, and the guest's searches run in this process: their output and the content of their done event."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.guest.guest_harness import GUEST_PARENT, RIPGREP

assert GUEST_PARENT
from guest.failures import RequestFailure  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402
from guest.search.glob_search import glob  # noqa: E402
from guest.search.grep_search import grep  # noqa: E402
from guest.search.requests import GlobRequest, GrepRequest  # noqa: E402


class Found:
    """The result of a search: lines, fields, or the failure."""

    def __init__(self, text: str, fields: dict[str, Any], failure: RequestFailure | None) -> None:
        self.text = text
        self.lines = text.splitlines()
        self.fields = fields
        self.failure = failure

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def code(self) -> str | None:
        return self.failure.code if self.failure else None


class Harness:
    """A workspace, a /tmp and an output folder for one test. Each new file has a later modification time than the
    file before.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.ripgrep = RIPGREP
        self.workspace = base / "ws"
        self.tmp = base / "tmp"
        self.output = base / "output"
        self.clear()

    def clear(self) -> None:
        for folder in (self.workspace, self.tmp, self.output):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (self.output / ".state").mkdir()
        self._turn = 1_000_000

    def make(self, name: str | bytes, content: str | bytes = "x\n") -> Path:
        path = self.workspace / (name if isinstance(name, str) else os.fsdecode(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        self._turn += 1
        os.utime(path, (self._turn, self._turn))
        return path

    def paths(self, **how: bool) -> GuestPaths:
        return GuestPaths((bytes(self.workspace), bytes(self.tmp)), bytes(self.output), ripgrep=self.ripgrep, **how)

    def glob(self, pattern: str, **fields: Any) -> Found:
        plain = {"pattern": pattern, "path": ".", "kind": "file", "limit": 100, "max_bytes": 32768, "timeout_s": 10}
        return self._search(glob, GlobRequest, {**plain, **fields}, self.paths())

    def grep(self, pattern: str, *, use_openat2: bool = True, **fields: Any) -> Found:
        plain = {
            "pattern": pattern,
            "path": ".",
            "mode": "content",
            "limit": 100,
            "max_bytes": 32768,
            "max_lines": 2000,
            "timeout_s": 10,
        }
        paths = self.paths(use_openat2=use_openat2)
        return self._search(grep, GrepRequest, {**plain, **fields}, paths)

    @staticmethod
    def _search(serve: Any, request_class: Any, fields: dict[str, Any], paths: GuestPaths) -> Found:
        with _descriptors_closed():
            bench = LocalContext(paths)
            try:
                done = serve(request_class(fields), bench)
            except RequestFailure as failure:
                return Found(bench.sent.decode(), {}, failure)
        return Found(bench.sent.decode(), done, None)


class LocalContext:
    """The context that a supervisor gives a request, without a supervisor: all data of one stream is kept, and no limit
    or cancel applies.
    """

    def __init__(self, paths: GuestPaths, stream: str = "lines", body: bytes = b"") -> None:
        self.paths = paths
        self.sent = b""
        self.watch = self
        self.writer = self
        self.body = os.memfd_create("body")
        os.write(self.body, body)
        self._stream = stream

    def check(self) -> None:
        """Apply no limit."""

    def send(self, stream: str, data: bytes) -> None:
        if stream != "found":  # the first matches of a glob, which the result has too
            assert stream == self._stream
            self.sent += data


@contextlib.contextmanager
def _descriptors_closed() -> Iterator[None]:
    """Close everything that a search opens and restore the working directory, as a supervisor does."""
    here = os.open(".", os.O_PATH)
    before = set(os.listdir("/proc/self/fd"))
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)
        for name in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(OSError):
                os.close(int(name))
