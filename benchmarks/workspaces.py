"""Measure a workspace as an image: make, mount, unmount and remove it, compared with a plain folder.

The benchmark also compares writing into the image with writing to the underlying disk.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Case, Report, interleave, median
from benchmarks.sizes import size
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import Workspace, WorkspaceMount, WorkspaceSize
from toolcrew.workers.sandboxd.disks.choice import find_obstacle
from toolcrew.workers.sandboxd.disks.image import ImageWorkspaces

MIB = 1024 * 1024
SIZE = WorkspaceSize(256 * MIB, 65_536)
ROUNDS = size(25, 1)
WARM_UP = size(2, 1)
WRITTEN_BYTES = size(128 * MIB, 4 * MIB)
FILES = size(1_000, 20)
CHUNK = bytes(range(256)) * 4096


def run(rounds: int = ROUNDS) -> Report:
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as folder:
        obstacle = find_obstacle(Path(folder), 0)
        if obstacle is not None:
            raise SandboxUnavailable(f"workspaces of the kind image cannot be measured here: {obstacle}")
        report = Report(
            "workspaces",
            notes=[f"medians of {rounds} interleaved rounds after {WARM_UP}; images of {SIZE.bytes // MIB} MiB"],
        )
        asyncio.run(_measure(Path(folder), rounds, report))
        return report


async def _measure(folder: Path, rounds: int, report: Report) -> None:
    workspaces = ImageWorkspaces(folder, 0)
    plain = folder / "plain"

    async def life() -> float:
        started = time.perf_counter()
        workspace = await workspaces.make("life", SIZE)
        async with workspace.mounted():
            pass
        took = time.perf_counter() - started
        await workspace.remove()
        return took

    def floor() -> float:
        started = time.perf_counter()
        plain.mkdir()
        took = time.perf_counter() - started
        plain.rmdir()
        return took

    async def write_image() -> float:
        return await _in_image(workspaces, _write)

    async def files_image() -> float:
        return await _in_image(workspaces, _make_files)

    cases: dict[str, Case] = {"floor": floor, "life": life}
    seconds = await interleave(cases, rounds, WARM_UP)
    writes: dict[str, Case] = {"disk": lambda: _in_folder(plain, _write), "image": write_image}
    seconds |= {
        f"write_{name}": seconds_taken
        for name, seconds_taken in (await interleave(writes, max(3, rounds // 3), 1)).items()
    }
    files: dict[str, Case] = {"disk": lambda: _in_folder(plain, _make_files), "image": files_image}
    seconds |= {
        f"files_{name}": seconds_taken
        for name, seconds_taken in (await interleave(files, max(3, rounds // 3), 1)).items()
    }
    report.add_ms("floor_mkdir", seconds["floor"], "floor: mkdir")
    report.add_ms("image", seconds["life"], "image: make + mount + unmount")
    report.add("image_mkdir_ratio", median(seconds["life"]) / median(seconds["floor"]), "image / mkdir")
    report.add_ms("disk_write", seconds["write_disk"], f"disk: write {WRITTEN_BYTES // MIB} MiB and fdatasync")
    report.add_ms("image_write", seconds["write_image"], "image: the same")
    report.add(
        "image_write_ratio",
        median(seconds["write_image"]) / median(seconds["write_disk"]),
        "image / disk, written",
        at_most=2.5,
    )
    report.add_ms("disk_files", seconds["files_disk"], f"disk: make and delete {FILES} files of 4 KiB")
    report.add_ms("image_files", seconds["files_image"], "image: the same")
    report.add(
        "image_files_ratio",
        median(seconds["files_image"]) / median(seconds["files_disk"]),
        "image / disk, files",
        at_most=2.0,
    )


async def _in_image(workspaces: ImageWorkspaces, work: Callable[[Path], float]) -> float:
    workspace: Workspace = await workspaces.make("work", SIZE)
    try:
        async with workspace.mounted() as mount:
            return work(_path_of(mount))
    finally:
        await workspace.remove()


def _path_of(mount: WorkspaceMount) -> Path:
    assert mount.bind is not None
    return Path(mount.bind)


def _in_folder(folder: Path, work: Callable[[Path], float]) -> float:
    folder.mkdir()
    try:
        return work(folder)
    finally:
        shutil.rmtree(folder)


def _write(folder: Path) -> float:
    started = time.perf_counter()
    with (folder / "file").open("wb", buffering=0) as file:
        for _ in range(WRITTEN_BYTES // len(CHUNK)):
            file.write(CHUNK)
        os.fdatasync(file.fileno())
    return time.perf_counter() - started


def _make_files(folder: Path) -> float:
    started = time.perf_counter()
    for number in range(FILES):
        (folder / str(number)).write_bytes(CHUNK[:4096])
    for number in range(FILES):
        (folder / str(number)).unlink()
    return time.perf_counter() - started
