"""A sandboxd whose mounts the engine does not see, as in a separate mount namespace. The daemon detects this before
it serves.
"""

import os
from pathlib import Path

import pytest

from tests.support.sandboxd.containers import IMAGE, open_engine
from tests.support.sandboxd.workspace_harness import MIB, require_images
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.workers.sandboxd.daemon import open_daemon
from toolcrew.workers.sandboxd.disks import image as image_module
from toolcrew.workers.sandboxd.disks.image import TEMPLATES
from toolcrew.workers.sandboxd.runtime.engine import Engine

DEPLOYMENT = "unseen"


@pytest.fixture(autouse=True)
def unmounted_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the engine's view: the folder, with nothing mounted on it."""
    open_engine()
    require_images()
    monkeypatch.setattr(image_module, "_mount", lambda image, _place: os.close(image))


async def open_on(folder: Path, **fields: object) -> str:
    """Return the kind of workspace that sandboxd uses, and the reason."""
    own = {
        "sandboxd_state": folder / "state",
        "sandboxd_leases": folder / "leases",
        "deployment": DEPLOYMENT,
        "sandbox_image": IMAGE,
    }
    engine = Engine()
    try:
        async with open_daemon(SandboxdSettings.model_validate({**own, **fields}), engine) as daemon:
            return f"{daemon.choice.workspaces.kind}: {daemon.choice.note}"
    finally:
        assert await engine.list_containers(DEPLOYMENT) == []
        assert {path.name for path in (folder / "state" / "workspaces").iterdir()} <= {TEMPLATES}
        engine.close()


async def test_sandboxd_uses_the_next_kind_of_workspace_and_reports_why(tmp_path: Path) -> None:
    served = await open_on(tmp_path, sandbox_workspace_bytes=300 * MIB)

    # Not memory, because no setting allows so much memory.
    assert served.startswith("folder: no disk images")
    assert "the engine does not see" in served
    assert "bind source path does not exist" in served


async def test_sandboxd_does_not_start_if_disk_images_are_required(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="bind source path does not exist"):
        await open_on(tmp_path, sandbox_workspace="image")
