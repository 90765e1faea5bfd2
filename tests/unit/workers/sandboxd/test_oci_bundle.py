"""The configuration that an OCI runtime gets: the same rules as the engine's, and what root inside changes."""

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from toolcrew.workers.sandboxd.disks.base import WorkspaceMount
from toolcrew.workers.sandboxd.runtime.bundle import build_bundle, build_environment, build_seccomp, make_skeleton
from toolcrew.workers.sandboxd.runtime.hardening import (
    MASKED_PATHS,
    READONLY_PATHS,
    ImageFacts,
    SandboxLimits,
    SandboxSpec,
    build_container_config,
)
from toolcrew.workers.sandboxd.runtime.seccomp import load_seccomp_profile

BASE = 0x4000_0000
SECCOMP = load_seccomp_profile()
DISK = WorkspaceMount("/state/w1/mount")


def build_spec(**changes: Any) -> SandboxSpec:
    fields: dict[str, Any] = {
        "image": "i",
        "runtime": "runc",
        "limits": SandboxLimits(),
        "labels": {},
        "seccomp": SECCOMP,
        "cgroup_version": 1,
        "workspace": DISK,
    }
    return SandboxSpec(**{**fields, **changes})


def bundle(**changes: Any) -> dict[str, Any]:
    return build_bundle(build_spec(**changes), root=Path("/mnt/x"), cgroup="/toolcrew/x", base=BASE, seccomp_bpf=None)


def mounts_of(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["destination"]: mount for mount in config["mounts"]}


def test_bundle_has_the_same_limits_as_the_engine_config() -> None:
    spec = build_spec(limits=SandboxLimits(cpus=1.5, pids=77))
    config, engine = bundle(limits=spec.limits), build_container_config(spec)
    host: Any = engine["HostConfig"]
    resources = config["linux"]["resources"]

    assert resources["memory"]["limit"] == resources["memory"]["swap"] == host["Memory"]
    assert resources["pids"]["limit"] == host["PidsLimit"] == 77
    assert resources["cpu"]["quota"] / resources["cpu"]["period"] == host["NanoCpus"] / 1e9 == 1.5
    assert {row["type"]: (row["soft"], row["hard"]) for row in config["process"]["rlimits"]} == {
        f"RLIMIT_{row['Name'].upper()}": (row["Soft"], row["Hard"]) for row in host["Ulimits"]
    }
    assert config["process"]["args"] == engine["Entrypoint"]
    mounts = mounts_of(config)
    assert {
        path_in_skeleton: ",".join(mounts[path_in_skeleton]["options"]) for path_in_skeleton in host["Tmpfs"]
    } == host["Tmpfs"]


def test_bundle_has_every_namespace_and_no_capabilities() -> None:
    config = bundle()
    process, linux = config["process"], config["linux"]

    assert {row["type"] for row in linux["namespaces"]} == {"user", "pid", "mount", "network", "ipc", "uts", "cgroup"}
    assert all("path" not in row for row in linux["namespaces"])
    assert linux["uidMappings"] == linux["gidMappings"] == [{"containerID": 0, "hostID": BASE, "size": 65_536}]
    assert process["user"] == {"uid": 1000, "gid": 1000}
    assert {kind: list(names) for kind, names in process["capabilities"].items() if names} == {}
    assert process["noNewPrivileges"] is True
    assert process["terminal"] is False
    assert config["root"] == {"path": "/mnt/x", "readonly": True}
    assert set(linux["maskedPaths"]) == MASKED_PATHS
    assert set(linux["readonlyPaths"]) == READONLY_PATHS
    assert linux["resources"]["devices"] == [{"allow": False, "access": "rwm"}]


def test_mounts_are_nosuid_and_tmpfs_mounts_have_a_size() -> None:
    for path_in_skeleton, mount in mounts_of(bundle()).items():
        assert "nosuid" in mount["options"], path_in_skeleton
        if mount["type"] == "tmpfs":
            options = {option.partition("=")[0] for option in mount["options"]}
            assert {"size", "nr_inodes"} <= options, path_in_skeleton


def test_guest_sees_only_its_own_cgroup_read_only() -> None:
    first = mounts_of(bundle())
    assert first["/sys/fs/cgroup/memory"]["source"] == "/sys/fs/cgroup/memory/toolcrew/x"
    assert {"ro", "bind"} <= set(first["/sys/fs/cgroup/memory"]["options"])
    second = mounts_of(bundle(cgroup_version=2))
    assert second["/sys/fs/cgroup"]["source"] == "/sys/fs/cgroup/toolcrew/x"
    assert {"ro", "bind"} <= set(second["/sys/fs/cgroup"]["options"])


def test_root_class_has_a_writable_root_and_few_capabilities() -> None:
    config = bundle(is_root=True)
    capabilities = config["process"]["capabilities"]

    assert config["process"]["user"] == {"uid": 0, "gid": 0}
    assert config["root"]["readonly"] is False
    assert "/tmp" not in mounts_of(config)  # on the disk of the session
    assert capabilities["bounding"] == capabilities["effective"] == capabilities["permitted"]
    assert (capabilities["ambient"], capabilities["inheritable"]) == ([], [])
    assert not {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_MKNOD"} & set(
        capabilities["bounding"]
    )
    assert "HOME=/root" in config["process"]["env"]
    assert config["linux"]["uidMappings"] == bundle()["linux"]["uidMappings"]


def test_the_environment_of_pid_1_excludes_the_home_and_variables_that_load_code() -> None:
    variables = ("PATH=/opt/conda/bin", "HOME=/evil", "LD_PRELOAD=/evil.so", "LD_AUDIT=/evil.so", "A=b=c", "broken")
    spec = build_spec(image_facts=ImageFacts(variables=variables))

    assert build_environment(spec) == [
        "PATH=/opt/conda/bin",
        "HOME=/home/sandbox",
        "A=b=c",
        "TOOLCREW_IMAGE_LD_PRELOAD=/evil.so",
        "TOOLCREW_IMAGE_LD_AUDIT=/evil.so",
        "LANG=C.UTF-8",
        "LC_ALL=C",
        "TERM=dumb",
    ]
    assert build_environment(build_spec())[0].startswith("PATH=/usr/local/sbin:")


@pytest.mark.parametrize("is_root", [False, True])
def test_seccomp_filter_is_the_profile_of_this_processor(is_root: bool) -> None:
    profile, built = json.loads(SECCOMP), build_seccomp(SECCOMP, is_root=is_root)

    assert (built["defaultAction"], built["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", errno.EPERM)
    assert built["architectures"][0] in {row["architecture"] for row in profile["archMap"]}
    own = [rule for rule in built["syscalls"] if rule.get("errnoRet") == errno.EAFNOSUPPORT]
    netlink = [(0, socket.AF_NETLINK, "SCMP_CMP_EQ"), (2, 0, "SCMP_CMP_NE")]
    arguments = [[(arg["index"], arg["value"], arg["op"]) for arg in rule["args"]] for rule in own]
    assert arguments == ([netlink] if is_root else [])
    everywhere = [rule["names"] for rule in profile["syscalls"] if "includes" not in rule]
    names = [rule["names"] for rule in built["syscalls"] if rule not in own]
    assert [row for row in names if row in everywhere] == everywhere
    assert not any({"includes", "excludes", "comment"} & set(rule) for rule in built["syscalls"])


def test_compiled_filter_replaces_the_rules_and_refuses_all_without_it() -> None:
    config = build_bundle(build_spec(), root=Path("/mnt/x"), cgroup="/toolcrew/x", base=BASE, seccomp_bpf="AAAA")

    assert config["annotations"] == {"run.oci.seccomp_bpf_data": "AAAA"}
    assert config["linux"]["seccomp"] == {"defaultAction": "SCMP_ACT_ERRNO"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
def test_skeleton_has_every_mount_point_of_root_inside_and_is_created_once(tmp_path: Path) -> None:
    skeleton = tmp_path / "skeleton"
    (tmp_path / "skeleton.new/left by a killed process").mkdir(parents=True)
    make_skeleton(skeleton, BASE)
    before = skeleton.stat().st_ino
    make_skeleton(skeleton, BASE)

    assert skeleton.stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["skeleton"]
    for folder in ("workspace", "output", "tmp", "home/sandbox", "opt/toolcrew", "skills", "proc", "sys", "dev"):
        assert (skeleton / folder).is_dir()
    attributes = {path.stat() for path in (skeleton, *skeleton.rglob("*"))}
    assert {(row.st_uid, row.st_gid) for row in attributes} == {(BASE, BASE)}
    assert len({row.st_mtime_ns for row in attributes}) == 1
    modes = {name: (skeleton / name).stat().st_mode & 0o7777 for name in (".", "tmp", "root", "etc", "etc/hosts")}
    assert modes == {".": 0o755, "tmp": 0o1777, "root": 0o700, "etc": 0o755, "etc/hosts": 0o644}
    assert "localhost" in (skeleton / "etc/hosts").read_text()
