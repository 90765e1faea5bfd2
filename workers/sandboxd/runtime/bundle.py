"""The configuration of a sandbox for an OCI runtime (`config.json` of the runtime specification), and its root folder.
The rules of hardening.py apply, in the format of the specification. Two rules are stronger than with the engine: each
sandbox has its own user namespace, and sandboxd makes the mount points, so that a link in an image cannot redirect a
mount.
"""

import errno
import hashlib
import json
import os
import platform
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from toolcrew.contract.session_spec import DEFAULT_HOSTNAME
from toolcrew.workers.sandboxd.disks.base import HOME
from toolcrew.workers.sandboxd.disks.mounts import ID_RANGE
from toolcrew.workers.sandboxd.runtime.hardening import (
    MASKED_PATHS,
    READONLY_PATHS,
    SYSCTLS,
    SandboxSpec,
    guest_command,
    image_variables,
    is_for_programs,
    own_variables,
    tmpfs_options,
    ulimits,
)

NAMESPACES: Final = ("user", "pid", "mount", "network", "ipc", "uts", "cgroup")
CPU_PERIOD_US: Final = 100_000
NETLINK_ROUTE: Final = 0
SHOWN_CONTROLLERS: Final = ("memory", "cpu", "cpuacct", "cpuset", "pids")
"""Controllers of version 1 whose files a sandbox sees."""
ROOT_CAPABILITIES: Final[Mapping[str, int]] = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_SETPCAP": 8, "CAP_NET_BIND_SERVICE": 10, "CAP_SYS_CHROOT": 18, "CAP_SETFCAP": 31,
}  # fmt: skip
"""Capabilities of the sandbox's root user, with their numbers: what package managers and services need. They apply only
to objects that belong to the user namespace of the sandbox.
"""
_CAPABILITY_SETS: Final = ("bounding", "effective", "inheritable", "permitted", "ambient")
_FILES_OF_PID_1: Final = ("/proc/1/oom_score_adj", "/proc/1/task/1/oom_score_adj", "/proc/1/autogroup")
"""Files with which root of a sandbox could let the kernel kill PID 1, or run it last."""
_SEALED: Final = ["nosuid", "noexec", "nodev"]
_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES: Final = {"x86_64": ("SCMP_ARCH_X86_64", "amd64"), "aarch64": ("SCMP_ARCH_AARCH64", "arm64")}
_OPEN_FOLDERS: Final = ("dev", "proc", "sys", "etc", "opt", "opt/toolcrew", "skills", "workspace", "output")
_HOME_FOLDERS: Final = ("home", HOME.lstrip("/"))
IMAGE_FOLDERS: Final[Mapping[str, int]] = {"etc": 0, "home": 0o111, "opt": 0o111, "root": 0, "tmp": 0}
"""Folders of the skeleton that are no mount points, or not always. Those that the image has keep its owners and modes,
with these bits: two of them lead to mount points.
"""
_FOLDERS: Final[Mapping[str, int]] = {
    **dict.fromkeys((*_OPEN_FOLDERS, *_HOME_FOLDERS), 0o755),
    "tmp": 0o1777,
    "root": 0o700,
}

_TIME: Final = 1_577_836_800
"""2020-01-01. For 1970 tar would print a warning."""


def host_files(hostname: str) -> dict[str, str]:
    """Return the files of /etc that contain the name of the sandbox. Programs look up the address of their own name."""
    return {"hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost\n", "hostname": f"{hostname}\n"}


_FILES: Final[Mapping[str, str]] = {
    **{f"etc/{name}": text for name, text in host_files(DEFAULT_HOSTNAME).items()},
    "etc/resolv.conf": "",
}


def skeleton_name(base: int) -> str:
    """Return the folder name of the skeleton of an id range (`make_skeleton`). Releases with different content have
    different names.
    """
    content = json.dumps([dict(_FOLDERS), dict(_FILES), _TIME])
    return f"skeleton-{hashlib.sha256(content.encode()).hexdigest()[:12]}-{base}"


def make_skeleton(place: Path, base: int) -> None:
    """Make the skeleton of an id range: the folder that is stacked on the layers of an image. It has the mount points,
    and files such as /etc/hosts. `base`: the first id of the range, which owns all of it.

    An id map on one skeleton for all ranges would not do: Linux before 6.3 has none for a tmpfs, such as /run. Only the
    process that holds the range may call this. Raises OSError.
    """
    if place.exists():
        return
    unfinished = place.with_name(f"{place.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)  # Remove what a killed process may have left.
    unfinished.mkdir()
    unfinished.chmod(0o755)
    for folder, mode in _FOLDERS.items():
        (unfinished / folder).mkdir()
        (unfinished / folder).chmod(mode)
    for file, text in _FILES.items():
        (unfinished / file).write_text(text, encoding="ascii")
        (unfinished / file).chmod(0o644)
    give_tree(unfinished, base)
    unfinished.rename(place)


def give_tree(top: Path, owner: int) -> None:
    """Give a folder of sandboxd, with its content, to a user and its group, and a fixed time of change: a session that
    moves to another range or host must not see other times. Raises OSError.
    """
    for path in (top, *top.rglob("*")):
        os.chown(path, owner, owner)
        os.utime(path, (_TIME, _TIME))


def build_bundle(
    spec: SandboxSpec, *, root: Path, cgroup: str, base: int, seccomp_bpf: str | None, apparmor: str | None = None
) -> dict[str, Any]:
    """Return the content of config.json. `root`: its root folder. `cgroup`: the path of its control group. `base`: the
    host id of the sandbox's root user. `seccomp_bpf`: the compiled filter in base64, which crun loads instead of
    compiling the profile again. `apparmor`: the name of its AppArmor profile.
    """
    ids = [{"containerID": 0, "hostID": base, "size": ID_RANGE}]
    linux: dict[str, Any] = {
        "uidMappings": ids,
        "gidMappings": ids,
        "namespaces": [{"type": kind} for kind in NAMESPACES],
        "cgroupsPath": cgroup,
        "resources": _build_resources(spec),
        "seccomp": build_seccomp(spec.seccomp, is_root=spec.is_root)
        if seccomp_bpf is None
        else {"defaultAction": "SCMP_ACT_ERRNO"},
        "sysctl": dict(SYSCTLS),
        "maskedPaths": sorted(MASKED_PATHS),
        "readonlyPaths": [*sorted(READONLY_PATHS), *(_FILES_OF_PID_1 if spec.is_root else ())],
    }
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": spec.uid, "gid": spec.uid},
            "args": guest_command(spec),
            "env": build_environment(spec),
            "cwd": "/workspace",
            "capabilities": {
                kind: sorted(ROOT_CAPABILITIES) if spec.is_root and kind not in ("ambient", "inheritable") else []
                for kind in _CAPABILITY_SETS
            },
            "rlimits": [
                {"type": f"RLIMIT_{name.upper()}", "soft": value, "hard": value}
                for name, value in ulimits(spec.limits).items()
            ],
            "noNewPrivileges": True,
            **({} if apparmor is None else {"apparmorProfile": apparmor}),
        },
        "root": {"path": str(root), "readonly": not spec.is_root},
        "hostname": spec.hostname,
        "mounts": _build_mounts(spec, cgroup),
        "linux": linux,
        "annotations": {} if seccomp_bpf is None else {"run.oci.seccomp_bpf_data": seccomp_bpf},
    }


def build_environment(spec: SandboxSpec) -> list[str]:
    """Return the environment of PID 1: the variables of the image, and the variables of sandboxd, which replace
    variables with the same name.
    """
    image = {name: value for name, value in image_variables(spec).items() if not is_for_programs(name)}
    variables = {"PATH": _DEFAULT_PATH, **image, **own_variables(spec)}
    return [f"{name}={value}" for name, value in variables.items()]


def build_seccomp(profile: str, *, is_root: bool) -> dict[str, Any]:
    """Return the filter of the specification, from a profile of the engine (seccomp.json). For root of the sandbox,
    all netlink protocols but NETLINK_ROUTE are refused with the error of a kernel without netlink. With EPERM `useradd`
    would fail: it takes EPERM for a broken audit log of the kernel.
    """
    content = json.loads(profile)
    architecture, name = _ARCHITECTURES[platform.machine()]
    more = next(entry for entry in content["archMap"] if entry["architecture"] == architecture)["subArchitectures"]
    rules = [rule for rule in content["syscalls"] if name in (rule.get("includes") or {}).get("arches", [name])]
    if is_root:
        family = {"index": 0, "value": socket.AF_NETLINK, "op": "SCMP_CMP_EQ"}
        protocol = {"index": 2, "value": NETLINK_ROUTE, "op": "SCMP_CMP_NE"}
        rules.append(
            {
                "names": ["socket"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": errno.EAFNOSUPPORT,
                "args": [family, protocol],
            }
        )
    return {
        "defaultAction": content["defaultAction"],
        "defaultErrnoRet": content["defaultErrnoRet"],
        "architectures": [architecture, *more],
        "syscalls": [
            {key: rule[key] for key in ("names", "action", "errnoRet", "args") if key in rule} for rule in rules
        ],
    }


def _build_resources(spec: SandboxSpec) -> dict[str, Any]:
    memory: dict[str, int] = {"limit": spec.memory_bytes, "swap": spec.memory_bytes}
    if spec.cgroup_version == 1:
        memory["swappiness"] = 0
    return {
        "devices": [{"allow": False, "access": "rwm"}],
        "memory": memory,
        "cpu": {"quota": round(spec.limits.cpus * CPU_PERIOD_US), "period": CPU_PERIOD_US},
        "pids": {"limit": spec.limits.pids},
    }


def _build_mounts(spec: SandboxSpec, cgroup: str) -> list[dict[str, Any]]:
    mounts = [
        ("/proc", "proc", _SEALED),
        ("/dev", "tmpfs", ["nosuid", "noexec", "strictatime", "mode=755", "size=64k", "nr_inodes=64"]),
        ("/dev/pts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
        ("/dev/mqueue", "mqueue", _SEALED),
        ("/sys", "sysfs", [*_SEALED, "ro"]),
        *_build_cgroup_mounts(spec, cgroup),
        *((folder, "tmpfs", options) for folder, options in tmpfs_options(spec).items()),
    ]
    return [
        {
            "destination": place,
            "type": "bind" if source.startswith("/") else source,
            "source": source,
            "options": options,
        }
        for place, source, options in mounts
    ]


def _build_cgroup_mounts(spec: SandboxSpec, cgroup: str) -> list[tuple[str, str, list[str]]]:
    """Return the mounts of the sandbox's own control group, read-only. The guest reads there how often the memory ran
    out, and runtimes of languages read their limits. Java reads them only if it finds all SHOWN_CONTROLLERS.
    """
    bound = ["bind", *_SEALED, "ro"]
    if spec.cgroup_version == 2:
        return [("/sys/fs/cgroup", f"/sys/fs/cgroup{cgroup}", bound)]
    # The tmpfs has space for these folders only, because root of the sandbox may write to the tmpfs.
    folder = ["mode=755", "size=4k", f"nr_inodes={len(SHOWN_CONTROLLERS) + 1}", *_SEALED]
    return [
        ("/sys/fs/cgroup", "tmpfs", folder),
        *((f"/sys/fs/cgroup/{name}", f"/sys/fs/cgroup/{name}{cgroup}", bound) for name in SHOWN_CONTROLLERS),
    ]
