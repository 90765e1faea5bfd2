"""What a batch may not name that is handed over to other orchestrators: paths. Theirs are not the submitter's to read
or to write.
"""

from collections.abc import Iterator

from orchestrator.batches.lines import MAX_SHOWN, BadBatch, BatchFile, Complaint
from store.batches import BatchItem

WORKSPACE = (
    "its workspace is a path of the submitter's machine, which a service does not read: begin with a checkpoint "
    "(`restore`), or leave out --detach"
)
ARTIFACTS = (
    "its artifacts would go to a folder of the submitter's machine, which a service does not write: leave them out, or "
    "leave out --detach"
)


def find_paths(item: BatchItem, artifacts: str | None) -> Iterator[str]:
    """A sentence for each way in which an item needs a path of the machine on which it is worked. `artifacts`: the
    batch's folder for them.
    """
    if item.ground.workspace is not None:
        yield WORKSPACE
    if item.ground.artifacts or artifacts is not None:
        yield ARTIFACTS


def check_detached(file: BatchFile, artifacts: str | None, name: str) -> None:
    """Raises BadBatch for items that can only be worked where their batch was submitted."""
    complaints = [Complaint(sentence, item.line) for item in file.items for sentence in find_paths(item, None)]
    if artifacts is not None:
        told = (
            f"a batch that is handed over has no folder for artifacts here ({artifacts}): leave out --artifacts, or "
            "leave out --detach"
        )
        complaints.insert(0, Complaint(told))
    if complaints:
        raise BadBatch(name, complaints[:MAX_SHOWN], max(0, len(complaints) - MAX_SHOWN))
