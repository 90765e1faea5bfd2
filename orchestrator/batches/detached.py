"""Refuses local paths in a batch that other orchestrators run.

Security: a submitter must not read or write files of the machines on which the orchestrators run.
"""

from collections.abc import Iterator

from toolcrew.contract.file_ids import is_stored
from toolcrew.orchestrator.batches.lines import MAX_SHOWN, BadBatch, BatchFile, LineError
from toolcrew.store.batches import BatchItem

WORKSPACE = (
    "the workspace or the grader's files are a path of the submitter's machine, which a service cannot read: set "
    "TOOLCREW_WORKSPACE_STORE so that they are uploaded, or use the id of an upload"
)
ARTIFACTS = (
    "the artifacts would go to a folder of the submitter's machine, which a service cannot write: submit the batch "
    "without --artifacts"
)


def find_paths(item: BatchItem, artifacts: str | None) -> Iterator[str]:
    """Yield a sentence for each path that an item needs on the machine that runs the item. `artifacts`: the batch's
    local folder for artifacts.
    """
    if not all(map(is_stored, item.sources)):
        yield WORKSPACE
    if artifacts is not None:
        yield ARTIFACTS


def check_detached(file: BatchFile, artifacts: str | None, name: str, *, uploads: bool = False) -> None:
    """Raise BadBatch if items can only run on the machine of the submitter. `uploads`: the workspaces of the items
    are uploaded.
    """
    errors = [
        LineError(sentence, item.line) for item in file.items for sentence in find_paths(item, None) if not uploads
    ]
    if artifacts is not None:
        sentence = (
            f"artifacts of a detached batch go to the store, not to {artifacts}: omit --artifacts, and copy the files "
            "with `toolcrew batches export BATCH --artifacts DIR` after the batch"
        )
        errors.insert(0, LineError(sentence))
    if errors:
        raise BadBatch(name, errors[:MAX_SHOWN], max(0, len(errors) - MAX_SHOWN))
