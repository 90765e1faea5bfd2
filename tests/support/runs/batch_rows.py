"""Rows for tests of row files, and a disk with little room."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from toolcrew.contract.run_events import Failure, FailureKind
from toolcrew.orchestrator.batches.rows import build_row, build_row_line, parse_row
from toolcrew.store.batches import ItemOutcome


def accept_any_row(custom_id: str, run: str) -> bool:
    return True


def build_outcome(custom_id: str, *, fails: bool = False, text: str = "x") -> ItemOutcome:
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, code="HOST_LOST", message=text) if fails else None
    return ItemOutcome(
        custom_id=custom_id, run=f"run-{custom_id}", status_code=200, body={"text": text}, failure=failure
    )


def rows(*ids: str, text: str = "x") -> dict[str, bytes]:
    return {custom_id: build_row_line(build_row(build_outcome(custom_id, text=text))) for custom_id in ids}


def row_bytes(*ids: str) -> bytes:
    return b"".join(rows(custom_id)[custom_id] for custom_id in ids)


def read_ids(path: Path) -> list[str]:
    return [parse_row(line).custom_id for line in path.read_bytes().splitlines(keepends=True)]


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes to `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
