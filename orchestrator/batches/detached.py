"""Refuses local paths in a batch that other orchestrators run.

Security: a submitter must not read or write files of the machines on which the orchestrators run.
"""

from collections.abc import Iterator

from orchestrator.batches.lines import MAX_SHOWN, BadBatch, BatchFile, Complaint
from store.archives.files import is_stored
from store.batches import BatchItem

WORKSPACE = (
    "its workspace is a path of the submitter's machine, which a service does not read: set "
    "TOOLCREW_WORKSPACE_STORE so that it is uploaded, or give the id of an upload"
)
ARTIFACTS = "its artifacts would go to a folder of the submitter's machine, which a service does not write"


def find_paths(item: BatchItem, artifacts: str | None) -> Iterator[str]:
    """Yield a sentence for each path that an item needs on the machine that runs the item. `artifacts`: folder of the
    batch for artifacts.
    """
    if item.ground.workspace is not None and not is_stored(item.ground.workspace):
        yield WORKSPACE
    if artifacts is not None:
        yield ARTIFACTS


def check_detached(file: BatchFile, artifacts: str | None, name: str, *, uploads: bool = False) -> None:
    """Raise BadBatch if items can only run on the machine of the submitter. `uploads`: the workspaces of the items
    are uploaded.
    """
    complaints = [
        Complaint(sentence, item.line) for item in file.items for sentence in find_paths(item, None) if not uploads
    ]
    if artifacts is not None:
        sentence = (
            f"artifacts of a detached batch go to the store, not to {artifacts}: leave out --artifacts, and copy them "
            "with `toolcrew batches export BATCH --artifacts DIR` afterwards"
        )
        complaints.insert(0, Complaint(sentence))
    if complaints:
        raise BadBatch(name, complaints[:MAX_SHOWN], max(0, len(complaints) - MAX_SHOWN))
