"""The container profile as data: every row, the arithmetic of limits, and the detection of a lost row."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.workers.sandboxd.disks.base import FOLDERS, WorkspaceMount
from toolcrew.workers.sandboxd.runtime.hardening import (
    MASKED_PATHS,
    MOUNTS_BYTES,
    READONLY_PATHS,
    ImageFacts,
    SandboxLimits,
    SandboxSpec,
    build_container_config,
    find_drift,
)

SECCOMP = '{"defaultAction":"SCMP_ACT_ERRNO"}'


def build(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "image": "toolcrew-sandbox@sha256:0",
        "runtime": "runc",
        "limits": SandboxLimits(nofile=65_536),
        "labels": {"toolcrew.session": "s1"},
        "seccomp": SECCOMP,
        "cgroup_version": 1,
    }
    return build_container_config(SandboxSpec(**{**arguments, **changes}))


def inspected_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of an engine that follows every rule: with its own defaults added, and empty lists and maps
    as null.
    """
    inspected = copy.deepcopy(dict(config))
    host = {name: None if value in ([], {}) else value for name, value in inspected.pop("HostConfig").items()}
    host |= {
        "MaskedPaths": [*MASKED_PATHS, "/proc/interrupts"],
        "ReadonlyPaths": [*READONLY_PATHS],
        "CgroupnsMode": "private",
    }
    inspected["Labels"] = {**inspected["Labels"], "org.opencontainers.image.title": "the image's own"}
    return {"Config": inspected, "HostConfig": host, "Mounts": [], "NetworkSettings": {"Networks": {"none": {}}}}


GOLDEN: dict[str, Any] = {
    "Image": "toolcrew-sandbox@sha256:0",
    "User": "1000:1000",
    "Entrypoint": ["/opt/toolcrew/bin/python3", "-I", "-S", "-u", "/opt/toolcrew", "--life", "86400", "--cpus", "1"],
    "Cmd": [],
    "WorkingDir": "/workspace",
    "Env": ["HOME=/home/sandbox", "LANG=C.UTF-8", "LC_ALL=C", "TERM=dumb"],
    "Hostname": "sandbox",
    "Domainname": "",
    "Labels": {"toolcrew.session": "s1"},
    "Volumes": {},
    "Healthcheck": {"Test": ["NONE"]},
    "Tty": False,
    "OpenStdin": True,
    "StdinOnce": True,
    "AttachStdin": True,
    "AttachStdout": True,
    "AttachStderr": True,
    "NetworkDisabled": True,
    "HostConfig": {
        "NetworkMode": "none",
        "PortBindings": {},
        "PublishAllPorts": False,
        "Links": [],
        "ExtraHosts": [],
        "Runtime": "runc",
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": [],
        "GroupAdd": [],
        "SecurityOpt": ["no-new-privileges", f"seccomp={SECCOMP}"],
        "UsernsMode": "",
        "PidMode": "",
        "IpcMode": "private",
        "UTSMode": "",
        "CgroupParent": "",
        "ReadonlyRootfs": True,
        "Binds": [],
        "VolumesFrom": [],
        "Devices": [],
        "DeviceRequests": [],
        "DeviceCgroupRules": [],
        "Tmpfs": {
            "/workspace": "rw,nosuid,nodev,exec,size=268435456,nr_inodes=65536,uid=1000,gid=1000,mode=0755",
            "/tmp": "rw,nosuid,nodev,exec,size=218103808,nr_inodes=16384,mode=1777",
            "/home/sandbox": "rw,nosuid,nodev,exec,size=218103808,nr_inodes=16384,uid=1000,gid=1000,mode=0700",
            "/output": "rw,nosuid,nodev,noexec,size=83886080,nr_inodes=8192,uid=1000,gid=1000,mode=0700",
            "/dev/shm": "rw,nosuid,nodev,noexec,size=218103808,nr_inodes=4096,mode=1777",
        },
        "ShmSize": 218103808,
        "Sysctls": {
            "kernel.shm_rmid_forced": "1",
            "kernel.msgmni": "64",
            "kernel.sem": "250 2048 32 64",
            "net.ipv4.ip_unprivileged_port_start": "0",
            "net.ipv4.ping_group_range": "0 65535",
        },
        "Memory": 1241513984,
        "MemorySwap": 1241513984,
        "MemorySwappiness": 0,
        "OomKillDisable": False,
        "NanoCpus": 1000000000,
        "PidsLimit": 256,
        "Ulimits": [
            {"Name": "nofile", "Soft": 65536, "Hard": 65536},
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": 268435456, "Hard": 268435456},
        ],
        "Init": False,
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": True,
        "LogConfig": {"Type": "none", "Config": {}},
    },
}
ROWS = [name for name in GOLDEN if name != "HostConfig"] + [f"HostConfig.{name}" for name in GOLDEN["HostConfig"]]


def test_the_container_profile_equals_the_golden_profile() -> None:
    first = build()
    assert first == GOLDEN
    first["HostConfig"]["Sysctls"]["kernel.msgmni"] = "32000"
    assert build() == GOLDEN, "two configurations share nothing"


def test_a_disk_adds_its_folders_and_uses_no_memory() -> None:
    without_option, config = build(), build(workspace=WorkspaceMount("/state/w1/mount"))
    host = config["HostConfig"]
    options = {"Propagation": "rprivate", "NonRecursive": True}
    assert host.pop("Mounts") == [
        {"Type": "bind", "Source": f"/state/w1/mount/files/{name}", "Target": target, "BindOptions": options}
        for name, target in FOLDERS.items()
    ]
    assert host["Memory"] == 416 * 1024 * 1024
    assert set(without_option["HostConfig"]["Tmpfs"]) - set(host["Tmpfs"]) == set(FOLDERS.values())
    unchanged = {name: value for name, value in host.items() if name not in ("Memory", "MemorySwap", "Tmpfs")}
    assert unchanged == {name: value for name, value in without_option["HostConfig"].items() if name in unchanged}


def test_a_sandbox_with_egress_has_no_network_and_gets_the_proxy_variables() -> None:
    without_option, config = build(), build(network="egress")
    assert config["Entrypoint"] == [*without_option["Entrypoint"], "--proxy", "3128"]
    assert {"http_proxy=http://127.0.0.1:3128", "HTTPS_PROXY=http://127.0.0.1:3128"} < set(config["Env"])
    assert config["HostConfig"] == without_option["HostConfig"]
    assert config["NetworkDisabled"] is True


def test_an_image_without_a_guest_mounts_it_read_only() -> None:
    config = build(guest_volume="toolcrew-guest-1")
    assert config["Entrypoint"] == build()["Entrypoint"]
    assert [(mount["Type"], mount["Target"], mount["ReadOnly"]) for mount in config["HostConfig"]["Mounts"]] == [
        ("volume", "/opt/toolcrew", True)
    ]


def test_a_mount_that_differs_from_the_request_is_a_drift() -> None:
    config = build(workspace=WorkspaceMount("/state/w1/mount"))
    inspected = inspected_of(config)
    inspected["Mounts"] = [{"Destination": "/workspace", "Type": "bind"}]
    assert find_drift(config, inspected) == []
    inspected["HostConfig"]["Mounts"][0]["Source"] = "/"
    assert len(find_drift(config, inspected)) == 1


def test_cgroup_version_2_omits_only_the_swappiness() -> None:
    config = build(cgroup_version=2)
    expected = {name: value for name, value in GOLDEN["HostConfig"].items() if name != "MemorySwappiness"}
    assert config["HostConfig"] == expected
    assert find_drift(config, inspected_of(config)) == []


@given(
    reserve=st.integers(1, 2**40),
    workspace=st.integers(1, 2**40),
    output=st.integers(1, 2**40),
    cpus=st.floats(0.01, 256),
    pids=st.integers(1, 2**22),
    nofile=st.integers(1, 2**20),
)
def test_every_limit_is_set_in_the_container_configuration(
    reserve: int, workspace: int, output: int, cpus: float, pids: int, nofile: int
) -> None:
    limits = SandboxLimits(
        memory_reserve_bytes=reserve,
        workspace_bytes=workspace,
        output_bytes=output,
        cpus=cpus,
        pids=pids,
        nofile=nofile,
    )
    host = build(limits=limits)["HostConfig"]

    own, half = reserve + MOUNTS_BYTES, (reserve + MOUNTS_BYTES) // 2
    assert limits.memory_bytes(has_tmpfs_workspace=False) == own
    assert limits.memory_bytes() >= own + workspace + 2 * half
    assert host["Memory"] == host["MemorySwap"] == limits.memory_bytes()
    assert (host["PidsLimit"], host["ShmSize"]) == (pids, half)
    assert abs(host["NanoCpus"] - cpus * 1e9) <= 1
    assert {item["Name"]: item["Hard"] for item in host["Ulimits"]} == {"nofile": nofile, "core": 0, "fsize": workspace}
    for row, size in (("/workspace", workspace), ("/tmp", half), ("/output", output), ("/dev/shm", half)):
        assert f"size={size}," in host["Tmpfs"][row]
    assert find_drift(build(limits=limits), inspected_of(build(limits=limits))) == []


@pytest.mark.parametrize(
    "name",
    [
        "memory_reserve_bytes", "pids", "workspace_bytes", "workspace_inodes", "tmp_inodes", "output_bytes", "output_inodes", "shm_inodes", "nofile",
        "cpus",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_that_means_unlimited_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SandboxLimits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"runtime": ""},
        {"image": ""},
        {"cgroup_version": 0},
        {"labels": {"com.example": "1"}},
        {"labels": {"": "1"}},
        {"seccomp": "unconfined"},
        {"seccomp": ""},
        {"seccomp": "{}"},
        {"seccomp": '{"defaultAction":"SCMP_ACT_ALLOW"}'},
    ],
)
def test_an_argument_that_weakens_the_profile_is_refused(arguments: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError):
        build(**arguments)


def find_row(inspected: dict[str, Any], row: str) -> tuple[dict[str, Any], str]:
    section, _, name = row.rpartition(".")
    return inspected[section or "Config"], name


@pytest.mark.parametrize("row", ROWS)
def test_a_lost_or_changed_setting_is_reported(row: str) -> None:
    config = build()
    for other in (True, ["x"], {"toolcrew.x": "x"}, "host", -1):
        inspected = inspected_of(config)
        section, name = find_row(inspected, row)
        is_same = section[name] == other and type(section[name]) is type(other)
        section[name] = False if is_same else other
        assert len(find_drift(config, inspected)) == 1
    del section[name]
    assert [sentence for sentence in find_drift(config, inspected) if f"{row} is" in sentence]


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        ("HostConfig.PidsLimit", None, "HostConfig.PidsLimit is null, not 256."),
        ("HostConfig.Init", 0, "HostConfig.Init is 0, not false."),
        ("HostConfig.SecurityOpt", ["no-new-privileges", "seccomp=unconfined"], "seccomp=unconfined"),
        ("HostConfig.CapAdd", ["SYS_ADMIN"], "HostConfig.CapAdd is"),
        ("HostConfig.Binds", ["/var/run/docker.sock:/run/docker.sock"], "docker.sock"),
        ("Env", [*GOLDEN["Env"], "SECRET=1"], "SECRET=1"),
        ("Labels", {}, "Config.Labels is {}"),
    ],
)
def test_the_drift_message_names_the_setting_and_its_value(row: str, value: object, message: str) -> None:
    config = build()
    inspected = inspected_of(config)
    section, name = find_row(inspected, row)
    section[name] = value

    assert len(drift := find_drift(config, inspected)) == 1
    assert message in drift[0]


def test_image_variables_are_not_a_drift() -> None:
    config = build()
    inspected = inspected_of(config)
    section, name = find_row(inspected, "Env")
    section[name] = ["PATH=/opt/conda/bin", *GOLDEN["Env"]]

    assert find_drift(config, inspected, ["HOME=/root", "PATH=/opt/conda/bin"]) == []
    assert len(find_drift(config, inspected, ["PATH=/usr/bin"])) == 1


def test_variables_that_load_code_are_passed_to_programs_only() -> None:
    config = build(image_facts=ImageFacts(variables=("LD_PRELOAD=/evil.so", "LC_ALL=x", "PATH=/usr/bin")))

    passed = ["TOOLCREW_IMAGE_LD_PRELOAD=/evil.so", "TOOLCREW_IMAGE_LC_ALL=x"]
    assert sorted(config["Env"]) == sorted([*GOLDEN["Env"], "LD_PRELOAD=", *passed])


def test_a_volume_of_the_image_is_reported_as_a_drift() -> None:
    config = build()
    inspected = inspected_of(config)
    inspected["Mounts"] = [{"Type": "volume", "Destination": "/data"}]

    assert find_drift(config, inspected) == ["Mounts has /data (volume), which was not requested."]


@pytest.mark.parametrize("row", ["MaskedPaths", "ReadonlyPaths"])
@pytest.mark.parametrize("remaining", [[], None, ["/proc/acpi"]])
def test_a_missing_engine_default_is_reported(row: str, remaining: list[str] | None) -> None:
    config = build()
    inspected = inspected_of(config)
    inspected["HostConfig"][row] = remaining

    assert [sentence for sentence in find_drift(config, inspected) if sentence.startswith(f"HostConfig.{row} lacks")]


@pytest.mark.parametrize("networks", [{"none": {}, "bridge": {}}, {"bridge": {}}, None])
def test_an_attached_network_is_reported_as_a_drift(networks: object) -> None:
    config = build()
    inspected = inspected_of(config)
    inspected["NetworkSettings"]["Networks"] = networks

    assert len(find_drift(config, inspected)) == 1


def test_an_empty_inspection_reports_every_setting() -> None:
    assert len(find_drift(build(), {})) == len(ROWS) + 4
