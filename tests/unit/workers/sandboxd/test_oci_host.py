"""Control groups and ranges of ids of sandboxes, on folders of a test."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack.stack import missing
from tests.unit.workers.sandboxd.test_oci_bundle import build_spec
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.cgroups import PARENT, Cgroups
from toolcrew.workers.sandboxd.disks.base import WorkspaceMount
from toolcrew.workers.sandboxd.disks.mounts import ID_RANGE
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEADLINE, LABEL_DEPLOYMENT, LABEL_LEASE, ListedContainer
from toolcrew.workers.sandboxd.runtime.cgroup_namespace import HOST_NAMESPACE
from toolcrew.workers.sandboxd.runtime.engine import EngineFacts
from toolcrew.workers.sandboxd.runtime.hardening import ImageFacts, SandboxSpec
from toolcrew.workers.sandboxd.runtime.id_ranges import IdRanges, id_map
from toolcrew.workers.sandboxd.runtime.oci import OciRuntime, find_program

SANDBOX = "5a5a5a5a5a5a5a5a"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("memory", "pids", "freezer"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_cgroup_file_paths_of_version_1_and_2(root: Path) -> None:
    first = Cgroups(root)
    assert (first.version, first.file(SANDBOX, "memory", "m")) == (1, root / "memory" / PARENT / SANDBOX / "m")
    (root / "cgroup.controllers").touch()
    second = Cgroups(root)
    assert (second.version, second.file(SANDBOX, "memory", "m")) == (2, root / PARENT / SANDBOX / "m")


def test_cgroups_are_removed_and_the_parent_only_when_empty(root: Path) -> None:
    groups = Cgroups(root)
    for sandbox in (SANDBOX, "other"):
        for name in ("memory", "pids", "freezer"):
            (root / name / PARENT / sandbox).mkdir(parents=True)
    assert groups.exists(SANDBOX)

    groups.remove(SANDBOX, 1.0)
    groups.remove(SANDBOX, 1.0)
    groups.remove_parent()

    assert not groups.exists(SANDBOX)
    assert groups.exists("other")
    groups.remove("other", 1.0)
    groups.remove_parent()
    assert [list((root / name).iterdir()) for name in ("memory", "pids", "freezer")] == [[], [], []]


def test_kill_without_a_cgroup_has_no_effect(root: Path) -> None:
    Cgroups(root).kill(SANDBOX, 0.1)


def test_process_of_another_cgroup_is_not_opened(root: Path) -> None:
    (root / "pids" / PARENT / SANDBOX).mkdir(parents=True)
    (root / "pids" / PARENT / SANDBOX / "cgroup.procs").write_text("2\n")
    assert Cgroups(root).open_process(SANDBOX, 1) is None


def test_id_ranges_of_a_host_do_not_overlap(tmp_path: Path) -> None:
    with closing(IdRanges(tmp_path)) as first, closing(IdRanges(tmp_path)) as second:
        bases = [ranges.take() for ranges in (first, second) for _ in range(512)]

        assert len(set(bases)) == 1024
        assert all((base - bases[0]) % ID_RANGE == 0 for base in bases)
        assert all(0x4000_0000 <= base < 0x8000_0000 - ID_RANGE for base in bases)
        with pytest.raises(SandboxUnavailable, match="512"):
            first.take()
        first.give_back(bases[0])
        assert first.take() == bases[0]


class PinningEngine:
    """An engine that makes every pin, and then loses its answer if `loses_answers`."""

    def __init__(self, *, loses_answers: bool = False) -> None:
        self.pins: list[str] = []
        self.labels: dict[str, str] = {}
        self._loses_answers = loses_answers

    async def pin(self, name: str, image: str, labels: dict[str, str], volumes: object) -> None:
        self.pins.append(name)
        self.labels = labels
        if self._loses_answers:
            raise SandboxUnavailable("the answer was lost")

    async def volume_path(self, volume: str) -> str:
        return f"/volumes/{volume}"

    async def list_containers(self, deployment: str, product: str) -> list[ListedContainer]:
        labels = {LABEL_DEPLOYMENT: deployment}
        return [ListedContainer(f"id of {name}", name, "created", labels, 0.0) for name in self.pins]

    async def remove(self, name: str) -> None:
        self.pins.remove(name)


@asynccontextmanager
async def open_runtime(engine: Any, folder: Path, layers: Path | None = None) -> AsyncIterator[OciRuntime]:
    program = find_program()
    if os.geteuid() != 0 or program is None:
        missing("no OCI runtime for root")
    layers = layers or folder / "layers"
    layers.mkdir(exist_ok=True)
    facts = EngineFacts("1", 2, True, ("runc",), "6.13", data_root=str(folder), layer_root=str(layers))
    runtime = OciRuntime(engine, str(program), facts, folder / "oci")
    try:
        yield runtime
    finally:
        await runtime.close()


def build_pinned_spec(**labels: str) -> SandboxSpec:
    image = ImageFacts(id="sha256:1", layers=("/layer",))
    return build_spec(image_facts=image, guest_volume="guest", labels=labels, workspace=WorkspaceMount("/missing"))


async def test_pin_of_a_failed_start_is_listed_for_removal(tmp_path: Path) -> None:
    engine = PinningEngine(loses_answers=True)
    async with open_runtime(engine, tmp_path) as runtime:
        with pytest.raises(SandboxUnavailable):
            await runtime.start(build_pinned_spec(), "toolcrew-a-1")
        assert [listed.name for listed in await runtime.list_sandboxes("d")] == engine.pins
        assert len(engine.pins) == 1


async def test_pin_has_no_deadline_of_its_first_sandbox(tmp_path: Path) -> None:
    engine = PinningEngine()
    async with open_runtime(engine, tmp_path) as runtime:
        for number in range(2):
            with pytest.raises(SandboxUnavailable, match="/missing"):
                await runtime.start(
                    build_pinned_spec(**{LABEL_DEADLINE: "1", LABEL_LEASE: "x"}), f"toolcrew-a-{number}"
                )
        assert len(engine.pins) == 1
        assert engine.labels == {LABEL_LEASE: "x"}
    assert engine.pins == []


async def test_id_maps_of_image_layers_are_tried_on_their_own_file_system(tmp_path: Path) -> None:
    async with open_runtime(PinningEngine(), tmp_path) as runtime:
        assert (runtime.unmapped, runtime.stacks_layers) == (None, True)
    # The file system of /proc has no id maps on any kernel.
    async with open_runtime(PinningEngine(), tmp_path, Path("/proc")) as runtime:
        assert "owners of image layers at /proc" in (runtime.unmapped or "")
        assert not runtime.stacks_layers


def test_id_range_is_released_when_its_sandboxd_ends(tmp_path: Path) -> None:
    with closing(IdRanges(tmp_path)) as ranges:
        base = ranges.take()
    with closing(IdRanges(tmp_path)) as ranges:
        assert ranges.take() == base


def test_id_map_contains_an_id_of_this_process() -> None:
    assert id_map(0x4000_0000, 10001).splitlines() == ["0 1073741824 65536", "65536 10001 1"]


FIND_OBSTACLE = """
from toolcrew.workers.sandboxd.runtime.engine import EngineFacts
from toolcrew.workers.sandboxd.runtime.cgroup_namespace import enter_host_namespace
from toolcrew.workers.sandboxd.runtime.oci import find_obstacle
enter_host_namespace()
facts = EngineFacts("1", 2, True, ("runc",), "6.13", storage_driver="overlay2", layer_root="{root}/overlay2")
print("control group" in (find_obstacle(facts) or ""))
"""


# A private /run with what a container of sandboxd may have there. The arguments: a shell command, then the program.
IN_A_CONTAINER = [
    "unshare",
    "--cgroup",
    "--mount",
    "sh",
    "-ec",
    'mount -t tmpfs none /run; eval "$1"; shift; exec "$@"',
]
BIND_NAMESPACE = f"touch {HOST_NAMESPACE}; mount --bind /proc/{os.getpid()}/ns/cgroup {HOST_NAMESPACE}"

needs_namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")


@needs_namespaces
@pytest.mark.skipif(find_program() is None, reason="neither crun nor runc is installed")
@pytest.mark.parametrize(
    ("prefix", "is_obstacle"),
    [
        ([], False),
        ([*IN_A_CONTAINER, "sh", ":"], True),
        ([*IN_A_CONTAINER, "sh", BIND_NAMESPACE], False),
        # setpriv: root without CAP_SYS_ADMIN, which setns needs.
        ([*IN_A_CONTAINER, "sh", BIND_NAMESPACE, "setpriv", "--bounding-set", "-sys_admin"], True),
    ],
    ids=["on the host", "alone", "with the host's namespace", "without rights"],
)
def test_own_cgroup_namespace_is_left_or_an_obstacle_on_version_2(
    tmp_path: Path, prefix: list[str], *, is_obstacle: bool
) -> None:
    (tmp_path / "overlay2").mkdir()
    command = [*prefix, sys.executable, "-c", FIND_OBSTACLE.format(root=tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == str(is_obstacle)


@needs_namespaces
def test_sandboxd_does_not_start_with_something_else_in_place_of_the_hosts_namespace() -> None:
    command = [*IN_A_CONTAINER, "sh", f"echo x > {HOST_NAMESPACE}"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "toolcrew.workers.sandboxd", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert str(HOST_NAMESPACE) in done.stdout + done.stderr
