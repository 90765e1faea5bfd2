"""The objects that a supervisor gives to the function that serves a file or search request."""

from __future__ import annotations

import time

from guest.failures import TIMEOUT, RequestFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.call_pipes import CallPipes, ReportWriter
    from guest.paths import GuestPaths


class Watch:
    """The time limit of a file request. The function that serves the request calls `check` between two pieces of
    work.
    """

    def __init__(self, pipes: CallPipes, timeout_s: float) -> None:
        self._pipes = pipes
        self._timeout_s = timeout_s
        self._limit_at = time.monotonic() + timeout_s

    def check(self) -> None:
        """Raise RequestFailure(TIMEOUT) after the time limit, and RequestFailure(CANCELLED) after a cancel."""
        if time.monotonic() >= self._limit_at:
            raise RequestFailure(TIMEOUT, f"not done after {self._timeout_s:g} s")
        self._pipes.check_cancel()


class RequestContext:
    """The objects that the function that serves a file or search request may use.

    The function calls `watch.check()` between two pieces of work. The supervisor closes all descriptors that the
    function opens.
    """

    __slots__ = ("paths", "pipes", "watch")

    def __init__(self, paths: GuestPaths, pipes: CallPipes, watch: Watch) -> None:
        self.paths = paths
        self.pipes = pipes
        self.watch = watch

    @property
    def writer(self) -> ReportWriter:
        """Return the supervisor's end of the report pipe."""
        return self.pipes.writer

    @property
    def body(self) -> int | None:
        """Return a descriptor of the request's body, or None when the request has no body."""
        return self.pipes.body
