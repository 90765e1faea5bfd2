"""sandboxd whose sandboxes have a folder of the host at /srv. Data that commands append there outlives sandbox,
session and host.
"""

import os
import sys
from typing import Any

from toolcrew.workers.sandboxd import daemon
from toolcrew.workers.sandboxd.__main__ import main
from toolcrew.workers.sandboxd.disks.mounts import ROOTS, attach_below, clone_tree
from toolcrew.workers.sandboxd.runtime.base import AttachedContainer
from toolcrew.workers.sandboxd.runtime.hardening import SandboxSpec
from toolcrew.workers.sandboxd.runtime.oci import OciRuntime

PLACE = "srv"
"""A folder that the image has, because the root of a sandbox is read-only."""


class TallyRuntime(OciRuntime):
    """The runtime of sandboxd with one additional mount, which exists only in tests."""

    def _run_program(self, sandbox: str, running: Any, lock: int) -> AttachedContainer:
        mount = clone_tree(os.environ["TALLY"], id_map=self._ranges.namespace(running.base))
        try:
            root = os.open(ROOTS / sandbox, os.O_PATH | os.O_DIRECTORY)
            try:
                attach_below(mount, root, PLACE)
            finally:
                os.close(root)
        finally:
            os.close(mount)
        return super()._run_program(sandbox, running, lock)

    async def find_drift(self, container: str, spec: SandboxSpec) -> list[str]:
        found = await super().find_drift(container, spec)
        return [drift for drift in found if drift != f"other mounts is ['/{PLACE}'], not []."]


if __name__ == "__main__":
    daemon.OciRuntime = TallyRuntime  # type: ignore[misc]
    sys.exit(main())
