"""What serves a file or search request: where files are, its body and reports, its limit."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.pipes import CallPipes, Watch
    from guest.places import Places
    from guest.reports import ReportWriter


class Bench:
    """`watch.check()` is asked between two pieces of work; what the server opens its supervisor closes."""

    __slots__ = ("pipes", "places", "watch")

    def __init__(self, places: Places, pipes: CallPipes, watch: Watch) -> None:
        self.places = places
        self.pipes = pipes
        self.watch = watch

    @property
    def writer(self) -> ReportWriter:
        return self.pipes.writer

    @property
    def body(self) -> int | None:
        """A descriptor of the request's body, None when it has none."""
        return self.pipes.body
