"""Compares a running sandbox with its specification. The actual values come from what the kernel says about its PID
1.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from toolcrew.workers.sandboxd.cgroups import Cgroups
from toolcrew.workers.sandboxd.disks.base import find_folders
from toolcrew.workers.sandboxd.disks.mounts import ID_RANGE
from toolcrew.workers.sandboxd.runtime.apparmor import read_label
from toolcrew.workers.sandboxd.runtime.bundle import CPU_PERIOD_US, NAMESPACES, ROOT_CAPABILITIES, build_environment
from toolcrew.workers.sandboxd.runtime.hardening import (
    GUEST_FOLDER,
    SKILLS_FOLDER,
    SandboxSpec,
    guest_command,
    guest_title,
    tmpfs_options,
    ulimits,
)

_LINKS: Final = {"mount": "mnt", "network": "net"}
"""Names of namespaces in /proc that differ from those of the OCI specification."""
_LIMITS: Final = {"nofile": "Max open files", "core": "Max core file size", "fsize": "Max file size"}
_KERNEL_MOUNTS: Final = ("/proc", "/sys", "/dev")


def find_kernel_drift(
    process: int, spec: SandboxSpec, base: int, cgroups: Cgroups, sandbox: str, apparmor: str | None = None
) -> list[str]:
    """Return a sentence for every property of a sandbox that the kernel does not confirm. `process`: its PID 1.
    `base`: the host id of the sandbox's root user. `apparmor`: its AppArmor profile, if it has one. A process that has
    ended confirms nothing.
    """
    place = Path(f"/proc/{process}")
    try:
        compared = list(_compare(place, spec, base, cgroups, sandbox))
        if apparmor is not None:
            compared.append(("AppArmor label", f"{apparmor} (enforce)", read_label(place)))
        return [
            f"{property_name} is {actual!r:.200}, not {expected!r:.200}."
            for property_name, expected, actual in compared
            if expected != actual
        ]
    except OSError as error:
        return [f"PID 1 of the sandbox cannot be examined: {error}."]


def _compare(
    place: Path, spec: SandboxSpec, base: int, cgroups: Cgroups, sandbox: str
) -> Iterator[tuple[str, object, object]]:
    """Yield the name of each property, its expected and its actual value."""
    status = dict(line.split(":\t", 1) for line in _read(place / "status").splitlines() if ":\t" in line)
    for name in ("Uid", "Gid"):
        yield name, [str(base + spec.uid)] * 4, status[name].split()
    capabilities = sum(1 << number for number in ROOT_CAPABILITIES.values()) if spec.is_root else 0
    for name in ("CapPrm", "CapEff", "CapBnd"):
        yield name, capabilities, int(status[name], 16)
    yield "CapAmb", 0, int(status["CapAmb"], 16)
    yield "NoNewPrivs", "1", status["NoNewPrivs"]
    yield "Seccomp", "2", status["Seccomp"]
    for name in ("uid_map", "gid_map"):
        yield name, ["0", str(base), str(ID_RANGE)], _read(place / name).split()
    for kind in NAMESPACES:
        link = f"ns/{_LINKS.get(kind, kind)}"
        yield f"namespace {kind}", True, os.readlink(place / link) != os.readlink(f"/proc/self/{link}")
    # The guest replaces its command line by a title soon after its start. Zeros follow the title.
    command = _read_list(place / "cmdline")
    title = "".join(command) if not any(command[1:]) else ""
    yield "command", guest_command(spec), guest_command(spec) if title == guest_title(spec) else command
    yield "environment", sorted(build_environment(spec)), sorted(_read_list(place / "environ"))
    yield "network interfaces", ["lo"], _list_interfaces(_read(place / "net/dev"))
    shown = _read(place / "limits")
    for name, value in ulimits(spec.limits).items():
        row = next(line for line in shown.splitlines() if line.startswith(_LIMITS[name]))
        yield _LIMITS[name], [str(value)] * 2, row.removeprefix(_LIMITS[name]).split()[:2]
    yield from _compare_limits(spec, cgroups, sandbox)
    yield from _compare_mounts(spec, _parse_mounts(_read(place / "mountinfo")))


def _compare_limits(spec: SandboxSpec, cgroups: Cgroups, sandbox: str) -> Iterator[tuple[str, object, object]]:
    quota = str(round(spec.limits.cpus * CPU_PERIOD_US))
    expected = (
        [
            ("memory", "memory.limit_in_bytes", str(spec.memory_bytes)),
            ("memory", "memory.memsw.limit_in_bytes", str(spec.memory_bytes)),
            ("cpu", "cpu.cfs_quota_us", quota),
        ]
        if cgroups.version == 1
        else [
            ("memory", "memory.max", str(spec.memory_bytes)),
            ("memory", "memory.swap.max", "0"),
            ("cpu", "cpu.max", f"{quota} {CPU_PERIOD_US}"),
        ]
    )
    for controller, name, value in [*expected, ("pids", "pids.max", str(spec.limits.pids))]:
        yield name, value, _read(cgroups.file(sandbox, controller, name)).strip()


def _compare_mounts(spec: SandboxSpec, mounts: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, object, object]]:
    """Yield the properties of mounts. `mounts`: mount point -> expected options, including those of the file system."""
    yield "options of /", [], _find_missing(["rw" if spec.is_root else "ro", "nosuid", "nodev"], mounts.get("/", ()))
    folders = tmpfs_options(spec)
    for folder, options in folders.items():
        expected = [option for option in options if option in ("rw", "nosuid", "nodev", "noexec")]
        yield f"options of {folder}", [], _find_missing(expected, mounts.get(folder, ()))
        sizes = {option for option in options if option.startswith("nr_inodes=")}
        yield f"inodes of {folder}", [], _find_missing(sorted(sizes), mounts.get(folder, ()))
    on_disk = find_folders(is_root=spec.is_root).values() if spec.workspace.bind is not None else ()
    for folder in on_disk:
        yield f"options of {folder}", [], _find_missing(["rw", "nosuid", "nodev"], mounts.get(folder, ()))
    read_only = [
        folder
        for folder, volume in ((GUEST_FOLDER, spec.guest_volume), (SKILLS_FOLDER, spec.skills_volume))
        if volume is not None
    ]
    for folder in read_only:
        yield f"options of {folder}", [], _find_missing(["ro", "nosuid", "nodev"], mounts.get(folder, ()))
    own = {"/", *on_disk, *folders, *read_only}
    others = [place for place in mounts if place not in own and not place.startswith(_KERNEL_MOUNTS)]
    yield "other mounts", [], others


def _find_missing(expected: Sequence[str], options: Sequence[str]) -> list[str]:
    return [option for option in expected if option not in options]


def _parse_mounts(text: str) -> dict[str, Sequence[str]]:
    mounts: dict[str, Sequence[str]] = {}
    for line in text.splitlines():
        fields = line.split(" ")
        mounts[fields[4]] = [*fields[5].split(","), *fields[-1].split(",")]
    return mounts


def _list_interfaces(text: str) -> list[str]:
    return [line.partition(":")[0].strip() for line in text.splitlines() if ":" in line]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _read_list(path: Path) -> list[str]:
    return _read(path).split("\0")[:-1]
