"""Hosts on which sandboxd must not start, or must report a missing guarantee. Each case gives one clear sentence and
leaves nothing behind.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient
from structlog.testing import capture_logs

from tests.support.sandboxd.containers import IMAGE, open_engine
from tests.support.sandboxd.engine_stubs import answers_nothing, refuses, stub_engine
from tests.support.stack.log_lines import read_start_error
from toolcrew.contract.errors import OperatorError, SandboxUnavailable
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenant_classes import TenantClass
from toolcrew.workers.sandboxd.daemon import open_daemon
from toolcrew.workers.sandboxd.guarantees import build_rows
from toolcrew.workers.sandboxd.leases import Lease
from toolcrew.workers.sandboxd.plans import Plans
from toolcrew.workers.sandboxd.program import examine
from toolcrew.workers.sandboxd.runtime.base import AttachedContainer
from toolcrew.workers.sandboxd.runtime.engine import Engine, EngineFacts
from toolcrew.workers.sandboxd.runtime.engine_gate import EngineCallKinds, Lane

SHORT_DEADLINES = EngineCallKinds(
    *(Lane(name, at_once=2, deadline_s=0.2) for name in ("starts", "removals", "start checks", "freezes", "fills")),
    probe_s=0.2,
)


@pytest.fixture(scope="module")
def api() -> APIClient:
    return open_engine()


def build_settings(folder: Path, **fields: Any) -> SandboxdSettings:
    own = {
        "sandboxd_state": folder / "state" / "one",
        "sandboxd_leases": folder / "leases",
        "deployment": "badhosts",
        "pool_size": 0,
    }
    return SandboxdSettings(**{**own, "sandbox_image": IMAGE, "sandbox_workspace": "tmpfs", **fields})


async def open_on(settings: SandboxdSettings, engine: Engine | None = None) -> None:
    engine = engine or Engine()
    try:
        async with open_daemon(settings, engine):
            pass
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sandbox_image": "no-such-image:ever"},
            r"the engine has no image no-such-image:ever: build it, or pull it, .*TOOLCREW_SANDBOX_IMAGE",
        ),
        (
            {"sandbox_runtime": "runsc-missing"},
            r"the engine has no runtime 'runsc-missing' \(it has: .*runc.*\): install it",
        ),
        (
            {"tenant_classes": {"far": TenantClass(runtime="kata-missing")}},
            r"no runtime 'kata-missing' .*tenant class",
        ),
        (
            {"tenant_classes": {"web": TenantClass(network="egress")}},
            r"TOOLCREW_TENANT_CLASSES: class 'web' has network egress.*TOOLCREW_EGRESS_SOCKET",
        ),
    ],
    ids=["image", "runtime", "runtime of a class", "egress without a proxy"],
)
async def test_a_missing_requirement_is_reported_with_the_setting_to_change(
    api: APIClient, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(OperatorError, match=message):
        await open_on(build_settings(tmp_path, **fields))


class EngineWithoutSeccomp(Engine):
    async def facts(self) -> EngineFacts:
        return replace(await super().facts(), seccomp=False)


async def test_a_kernel_without_seccomp_starts_no_sandboxes(api: APIClient, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="runs without seccomp, so sandboxes would not be isolated"):
        await open_on(build_settings(tmp_path), EngineWithoutSeccomp())


class EngineWithOtherDriver(Engine):
    async def facts(self) -> EngineFacts:
        return replace(await super().facts(), storage_driver="zfs", layer_root="")


async def test_the_log_and_the_check_say_why_the_engine_starts_the_sandboxes(api: APIClient, tmp_path: Path) -> None:
    settings = build_settings(tmp_path, sandbox_start="auto")
    with capture_logs() as lines:
        await open_on(settings, EngineWithOtherDriver())
    reasons = [line["reason"] for line in lines if line["event"] == "oci_start_not_used"]
    assert [("driver zfs" in reason) for reason in reasons] == [True]
    engine = EngineWithOtherDriver()
    try:
        rows = build_rows(await examine(settings, Plans(settings), engine))
    finally:
        engine.close()
    assert [
        row.state for row in rows if row.name == "sandboxes start without the engine" and reasons[0] in row.why
    ] == ["broken"]


async def test_sandboxd_does_not_start_with_an_engine_that_hangs_or_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")

    async with stub_engine(tmp_path / "engine", answers_nothing):
        with pytest.raises(SandboxUnavailable, match=r"did not answer within 0.2 s: check it, or restart it"):
            await open_on(build_settings(tmp_path), Engine(SHORT_DEADLINES))
    (tmp_path / "engine").unlink(missing_ok=True)
    async with stub_engine(tmp_path / "engine", refuses(b"the database is locked")):
        with pytest.raises(SandboxUnavailable, match="refused: the database is locked"):
            await open_on(build_settings(tmp_path))


OTHER_RUNTIME = "io.containerd.runc.v2"
"""The second name of runc in every engine."""


class EngineWithBadRuntime(Engine):
    """An engine that records the runtimes of started sandboxes. `bad` changes the requested profile."""

    def __init__(self, bad: str = "") -> None:
        super().__init__()
        self.bad = bad
        self.started: list[str] = []

    async def start(self, config: Mapping[str, Any], name: str) -> AttachedContainer:
        runtime = str(config["HostConfig"]["Runtime"])
        self.started.append(runtime)
        weaker = {**config["HostConfig"], "PidsLimit": 4096} if runtime == self.bad else config["HostConfig"]
        return await super().start({**config, "HostConfig": weaker}, name)


async def test_the_profile_is_checked_under_the_runtime_of_every_class(api: APIClient, tmp_path: Path) -> None:
    far = TenantClass(runtime=OTHER_RUNTIME)
    settings = build_settings(tmp_path, sandbox_start="engine", tenant_classes={"far": far})
    good, bad = EngineWithBadRuntime(), EngineWithBadRuntime(OTHER_RUNTIME)

    await open_on(settings, good)
    with pytest.raises(
        SandboxUnavailable, match=rf"the runtime '{OTHER_RUNTIME}' of a tenant class .*does not apply.*PidsLimit"
    ):
        await open_on(settings, bad)

    assert good.started == bad.started == ["runc", OTHER_RUNTIME]


def find_files(folder: Path) -> list[str]:
    """Return all files and folders, except the two folders of sandboxd itself."""
    return sorted(str(path) for path in folder.rglob("*") if path not in {folder / "leases", folder / "state"})


async def test_the_check_examines_the_state_folder_and_changes_nothing_in_it(api: APIClient, tmp_path: Path) -> None:
    settings, engine = build_settings(tmp_path, sandbox_workspace="folder"), Engine()
    settings.state().mkdir(parents=True)
    (settings.state() / "kept").touch()
    before = settings.state().parent.stat().st_mtime_ns
    try:
        evidence = await examine(settings, Plans(settings), engine)
    finally:
        engine.close()

    assert evidence.problem is None
    # The folder may be a mount point, so nothing is created next to it.
    assert settings.state().parent.stat().st_mtime_ns == before
    assert [path.name for path in settings.state().iterdir()] == ["kept"]


async def test_the_check_examines_a_real_sandbox_and_leaves_nothing(api: APIClient, tmp_path: Path) -> None:
    settings, engine = build_settings(tmp_path), Engine()
    try:
        evidence = await examine(settings, Plans(settings), engine)
        leftovers = await engine.list_containers("badhosts")
    finally:
        engine.close()
    states = {row.name: row.state for row in build_rows(evidence)}

    assert evidence.problem is None
    assert {
        name: states[name]
        for name in ("engine answers", "profile holds", "images are present", "workspaces are limited")
    } == {
        "engine answers": "holds",
        "profile holds": "holds",
        "images are present": "holds",
        "workspaces are limited": "holds",
    }
    assert states["files outlive their sandbox"] == "broken"
    assert leftovers == []
    assert find_files(tmp_path) == []


async def test_a_check_removes_leftovers_of_a_killed_check_and_not_of_a_running_one(
    api: APIClient, tmp_path: Path
) -> None:
    settings, engine = build_settings(tmp_path), Engine()
    for label, age_s in (("killed", 7200), ("running", 60)):
        folder = settings.state() / f"doctor-{label}.state"
        (folder / "workspaces").mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    settings.sandboxd_leases.mkdir(parents=True)
    (settings.sandboxd_leases / "doctor-killed.name").touch()
    running = Lease.take(settings.sandboxd_leases, "doctor-running")
    try:
        evidence = await examine(settings, Plans(settings), engine)
        names = [path.name for path in settings.sandboxd_leases.glob("*.name")]
    finally:
        running.give_back()
        engine.close()

    assert evidence.problem is None
    assert [path.name for path in settings.state().iterdir()] == ["doctor-running.state"]
    assert names == ["doctor-running.name"]


async def test_the_check_without_an_engine_still_reports_the_other_guarantees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/missing")
    classes = {"web": TenantClass(network="egress")}
    settings, engine = build_settings(tmp_path, tenant_classes=classes, egress_socket=tmp_path / "proxy"), Engine()
    try:
        rows = {row.name: row for row in build_rows(await examine(settings, Plans(settings), engine))}
    finally:
        engine.close()

    assert rows["engine answers"].state == rows["profile holds"].state == "broken"
    assert "start it" in rows["engine answers"].why
    assert rows["network follows the class"].state == "broken"
    assert rows["large programs start"].state != "unknown"


class SettingsWithOtherUid(SandboxdSettings):
    """Settings with which the proxy at the socket runs under a forbidden uid."""

    def proxy_uids(self) -> frozenset[int]:
        return frozenset({os.geteuid() + 1})


@pytest.mark.parametrize(
    ("kind", "state", "message"),
    [
        (SandboxdSettings, "holds", "through the egress proxy"),
        (SettingsWithOtherUid, "broken", "which may not be the egress proxy"),
    ],
)
async def test_the_check_accepts_an_egress_proxy_only_under_an_allowed_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[SandboxdSettings], state: str, message: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/missing")
    settings = kind(tenant_classes={"web": TenantClass(network="egress")}, egress_socket=tmp_path / "proxy")
    engine = Engine()
    try:
        async with stub_engine(tmp_path / "proxy", answers_nothing):
            evidence = await examine(settings, Plans(settings), engine)
    finally:
        engine.close()
    row = next(row for row in build_rows(evidence) if row.name == "network follows the class")

    assert row.state == state
    assert message in row.why


def start_sandboxd(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "toolcrew.workers.sandboxd", *arguments]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def test_the_program_ends_with_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    missing = f"unix://{tmp_path}/missing"
    stranger = '{"a": {"pool": {"strange": 1}}}'
    with (
        start_sandboxd(DOCKER_HOST=missing, TOOLCREW_SANDBOXD_SOCKET=str(tmp_path / "socket")) as stopped,
        start_sandboxd("--check", DOCKER_HOST=missing, TOOLCREW_TENANT_CLASSES=stranger) as checked,
    ):
        sentence, complaint = stopped.communicate(timeout=60)[1], checked.communicate(timeout=60)[1]

    assert (stopped.returncode, checked.returncode) == (1, 1)
    assert read_start_error(sentence).startswith("the Docker engine does not answer")
    assert complaint == (
        "sandboxd: TOOLCREW_TENANT_CLASSES: class 'a' has a pool of image 'strange', which it may not use: add it "
        "to its images\n"
    )
