"""The first sandbox of each image and runtime is looked into: whether the image hides the workspace, and what it does without."""

import structlog

from contract.errors import SandboxUnavailable
from workers.sandboxd.attestation import Guest, ask_attestation, explain_lacks, find_misfits
from workers.sandboxd.classes import SandboxPlan
from workers.sandboxd.image_faults import FOLDERS
from workers.sandboxd.workspaces.base import WorkspaceSize

log = structlog.get_logger(__name__)


class WorkspaceMissed(SandboxUnavailable):
    """A sandbox started, and its /workspace is not the one that was made for it."""


class FirstLooks:
    """Remembers the images, by runtime, whose sandboxes were as they should be. `is_hard`: whether a workspace's size is its file system's."""

    def __init__(self, is_hard: bool) -> None:
        self._is_hard = is_hard
        self._seen: set[tuple[str, str]] = set()

    async def look(self, plan: SandboxPlan, size: WorkspaceSize, sandbox: Guest) -> None:
        """At a new sandbox with a workspace of that size; what its image lacks is logged.

        Raises WorkspaceMissed, and SandboxUnavailable when its guest does not tell.
        """
        if (plan.image, plan.runtime) in self._seen:
            return
        found = await ask_attestation(sandbox)
        misfits = find_misfits(found, size.bytes, size.inodes) if self._is_hard else []
        if misfits:
            raise WorkspaceMissed(f"a sandbox of image {plan.image} does not get its workspace: {'; '.join(misfits)}; {FOLDERS}")
        for lack in explain_lacks(found, plan.image):
            log.warning("image_lacks_a_program", lack=lack)
        self._seen.add((plan.image, plan.runtime))
