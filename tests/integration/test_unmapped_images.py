"""Hosts whose kernel cannot map the owners of images, such as Linux 5.15: sandboxd starts sandboxes with plain layers."""

from pathlib import Path

import pytest
from docker import APIClient
from structlog.testing import capture_logs

from tests.integration.test_bad_hosts import build_settings, open_on
from tests.integration.test_images import shell
from tests.support.sandboxd.containers import open_engine
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.tenant_classes import TenantClass
from toolcrew.workers.sandboxd import daemon as daemon_module
from toolcrew.workers.sandboxd.daemon import open_daemon
from toolcrew.workers.sandboxd.guarantees import build_rows
from toolcrew.workers.sandboxd.plans import Plans
from toolcrew.workers.sandboxd.program import examine
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.id_ranges import FIRST_ID
from toolcrew.workers.sandboxd.runtime.oci import OciRuntime

pytestmark = pytest.mark.stack

REASON = "the kernel cannot map the owners of image layers"
IMAGES = {"sandbox_start": "oci", "sandbox_workspace": "image"}


class UnmappedRuntime(OciRuntime):
    def _try_id_map(self, layers: str) -> str | None:
        return REASON


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch) -> APIClient:
    monkeypatch.setattr(daemon_module, "OciRuntime", UnmappedRuntime)
    return open_engine()


async def test_a_sandbox_has_a_user_namespace_and_forks_copy_its_files(tmp_path: Path) -> None:
    engine = Engine()
    try:
        with capture_logs() as lines:
            async with open_daemon(build_settings(tmp_path, **IMAGES), engine) as daemon:
                factory, plan = daemon.factory, daemon.setup.plans.standard()
                assert not factory.stacks(plan)
                await factory.slots.take()
                workspace = await factory.make_workspace(plan)
                sandbox = await factory.make(plan, workspace, 1)
                shown = (
                    await shell(sandbox, "touch new; stat -c %u new /usr /etc/hosts; cat /proc/self/uid_map")
                ).split()
                assert shown[:4] == ["1000", "65534", "0", "0"]
                assert int(shown[4]) >= FIRST_ID
                assert (await shell(sandbox, "cat /etc/shadow /root/x 2>&1 | grep -c denied")).strip() == "2"
                assert await sandbox.runtime.find_drift(sandbox.container, sandbox.spec) == []
                await factory.discard(sandbox, workspace)
    finally:
        engine.close()
    assert [line["reason"] for line in lines if line["event"] == "image_owners_not_mapped"] == [REASON]
    assert not [line for line in lines if line["event"] == "oci_start_not_used"]


async def test_a_class_with_root_inside_is_refused_with_the_reason(tmp_path: Path) -> None:
    settings = build_settings(tmp_path, **IMAGES, tenant_classes={"ci": TenantClass(user="root")})
    with pytest.raises(SandboxUnavailable, match=f"user root, and {REASON}: use Linux 5.19 or later"):
        await open_on(settings)


async def test_the_check_says_what_is_missing(tmp_path: Path) -> None:
    settings = build_settings(tmp_path, **IMAGES)
    engine = Engine()
    try:
        rows = build_rows(await examine(settings, Plans(settings), engine))
    finally:
        engine.close()
    [row] = [row for row in rows if row.name == "sandboxes start without the engine"]
    assert (row.state, REASON in row.why) == ("holds", True)
