"""What a display of a batch has to do, whatever it shows, and where: on a terminal, in a log, for a program."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from contract.tenancy import DEFAULT_TENANT
from orchestrator.batches.progress import Progress
from orchestrator.batches.snapshot import Snapshot
from orchestrator.batches.summary import Summary, build_summary
from store.batches import BatchEvent


class Display(Protocol):
    """A context manager: leaving it, at any moment and for any reason, ends the display cleanly with a summary. Not for
    several threads.
    """

    def __enter__(self) -> "Display": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, batch_event: BatchEvent) -> None:
        """Count one more, and show what is to be shown of it."""

    def tick(self) -> None:
        """Time has passed: to be called a few times a second, also when nothing happens."""


@dataclass(frozen=True)
class Watched:
    """The batch that a display shows. `wall`: Unix seconds; `ticks`: seconds that never jump. `is_kept`: commands can
    name the batch afterwards. `rows`: the files that its rows go to, of successes and of failures, if this process
    writes any. `tenant`: whose it is."""

    batch: str
    progress: Progress
    wall: Callable[[], float] = time.time
    ticks: Callable[[], float] = time.monotonic
    is_kept: bool = True
    rows: tuple[str, ...] = ()
    tenant: str = DEFAULT_TENANT

    def snapshot(self) -> Snapshot:
        return self.progress.snapshot(self.wall())

    def summary(self) -> Summary:
        return build_summary(
            self.snapshot(), batch=self.batch, tenant=self.tenant, is_kept=self.is_kept, rows=self.rows
        )
