"""The complete security profile of a sandbox container as one table, and the check that the engine applied it.

This module has only data and functions. The owner of the engine socket sends `build_container_config` to `POST
/containers/create`, and passes the answer of `GET /containers/<id>/json` to `find_drift`. A caller cannot change a
rule: only image, runtime, sizes and labels vary. Every rule is compared with what the engine reports, because an engine
may ignore a request.
"""

import json
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, cast

from toolcrew.contract.own_programs import TOOLKIT
from toolcrew.contract.session_spec import DEFAULT_HOSTNAME, NetworkPolicy
from toolcrew.workers.sandboxd.disks.base import FILES, HOME, UID, WorkspaceMount, find_folders

MIB: Final = 1024 * 1024
LABEL_PREFIX: Final = "toolcrew."
GUEST_FOLDER: Final = TOOLKIT
SKILLS_FOLDER: Final = "/skills"
ACCOUNTS_FOLDER: Final = "/run/toolcrew-accounts"
GUEST_COMMAND: Final = (f"{GUEST_FOLDER}/bin/python3", "-I", "-S", "-u", GUEST_FOLDER)
"""Command of PID 1. The guest has its own Python, so it runs in any image."""
GUEST_TITLE: Final = "init"
"""Name of PID 1: TITLE in the guest's loop.py."""
PROXY_PORT: Final = 3128
"""Port of the proxy on the loopback interface of a sandbox with `egress`."""
ENVIRONMENT: Final[Mapping[str, str]] = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    # For PID 1 only: other locales are files of the image, which can name code to load.
    "LC_ALL": "C",
    "TERM": "dumb",
}
PASSED_PREFIX: Final = "TOOLCREW_IMAGE_"
"""Prefix under which PID 1 gets the variables of the image that only programs must see (`is_for_programs`). PASSED in
the guest's paths.py.
"""
_LIBRARY_VARIABLES: Final = frozenset({"GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "LOCPATH", "NLSPATH"})
_DEFAULT_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROXY: Final = f"http://127.0.0.1:{PROXY_PORT}"
EGRESS_ENVIRONMENT: Final[Mapping[str, str]] = {
    **{
        name: _PROXY for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    },  # programs differ in the names that they read
    **{name: "localhost,127.0.0.1,::1" for name in ("no_proxy", "NO_PROXY")},
}
AUTHORITIES: Final = f"{SKILLS_FOLDER}/authority/bundle.pem"
"""Path in the sandbox of the file with the certificate authorities that programs of a session with secrets trust."""
# The engine's own defaults since 20.10. They are not requested, because an explicit list would replace the longer list
# of a newer engine.
MASKED_PATHS: Final = frozenset({
    "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
    "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
})  # fmt: skip
READONLY_PATHS: Final = frozenset({"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"})


MOUNTS_BYTES: Final = 160 * MIB
"""Memory of a sandbox in addition to its reserve, for the files of /output and /dev/shm."""
_INODE_BYTES: Final = 1024
"""Memory of the kernel for an empty file of a tmpfs."""


_NOFILE: Final = 65_536


def _find_nofile() -> int:
    """Return the limit of open files of a sandbox, at most that of this process: in a user namespace, no process can
    raise a limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NOFILE if hard == resource.RLIM_INFINITY else min(_NOFILE, hard)


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one sandbox. Every number is above zero, because zero means "no limit" to the engine and
    to tmpfs.
    """

    memory_reserve_bytes: int = 256 * MIB  # for processes, and about _INODE_BYTES per inode of the mounts below
    cpus: float = 1.0
    pids: int = 256  # headless Chromium needs about 150
    workspace_bytes: int = 256 * MIB
    workspace_inodes: int = 65_536
    tmp_inodes: int = 16_384  # of /tmp and of the home, when they are in memory
    output_bytes: int = 80 * MIB  # long outputs, and the guest's state of the session
    output_inodes: int = 8_192
    shm_inodes: int = 4_096
    nofile: int = field(default_factory=_find_nofile)

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            least = 0.01 if limit.name == "cpus" else 1
            if not least <= value < float("inf"):
                raise ValueError(f"{limit.name} is {value}; it must be a number of at least {least}")

    def memory_bytes(self, has_tmpfs_workspace: bool = True) -> int:
        """Return the memory limit of the container: the reserve and MOUNTS_BYTES. The folders that are in memory when
        there is no disk are added, because their files count towards the limit.
        """
        own = self.memory_reserve_bytes + MOUNTS_BYTES
        if not has_tmpfs_workspace:
            return own
        inodes = self.workspace_inodes + 2 * self.tmp_inodes
        return own + self.workspace_bytes + 2 * self.half_bytes + inodes * _INODE_BYTES

    @property
    def half_bytes(self) -> int:
        """The size of /dev/shm, and of /tmp and the home when they are in memory: half of the session's memory, as on
        usual hosts.
        """
        return self.memory_bytes(has_tmpfs_workspace=False) // 2


_OWN_MEMORY: Final = WorkspaceMount()


@dataclass(frozen=True)
class AccountFiles:
    """Files of the user database that replace those of an image (accounts.py). None: the image's own file is used.
    `root_passwd`: of sandboxes with root inside, in which users keep the homes that the image names.
    """

    passwd: bytes | None = None
    group: bytes | None = None
    root_passwd: bytes | None = None

    def __bool__(self) -> bool:
        return self.passwd is not None or self.group is not None

    def items(self, *, is_root: bool = False) -> Iterator[tuple[str, bytes]]:
        """Yield the name in /etc and the content of each file. `is_root`: for a sandbox with root inside."""
        passwd = self.root_passwd if is_root else self.passwd
        for name, content in (("passwd", passwd), ("group", self.group)):
            if content is not None:
                yield name, content


@dataclass(frozen=True)
class AccountVolume:
    """A volume of the engine with AccountFiles. `folder`: its folder on the engine's host. `created_at`: its creation
    time, as the engine writes it.
    """

    name: str
    folder: str
    created_at: str


@dataclass(frozen=True)
class ImageFacts:
    """An image of the engine. `id`: its content id; empty when the engine does not have it. `variables`: its
    environment, each variable as NAME=VALUE. `layers`: the folders of its layers on this host, the top one first; empty
    when the engine does not keep them as folders. `accounts`: files that give each user of a sandbox an entry.
    """

    id: str = ""
    variables: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    accounts: AccountFiles = AccountFiles()


NO_IMAGE: Final = ImageFacts()


@dataclass(frozen=True)
class SandboxSpec:
    """The specification of one sandbox. `cgroup_version`: 1 or 2. `guest_volume`: the volume with the toolkit (guest
    programs); None: the image has its own toolkit. `skills_volume`: the volume with skills, or None. `image_facts`: the
    engine's description of the image.

    Raises ValueError when a field would silently weaken a rule: an empty runtime, a seccomp text that is not a profile,
    a label of another product.
    """

    image: str
    runtime: str
    limits: SandboxLimits
    labels: Mapping[str, str]
    seccomp: str
    cgroup_version: int
    workspace: WorkspaceMount = _OWN_MEMORY
    network: NetworkPolicy = "none"
    life_s: float = 86_400.0
    guest_volume: str | None = None
    skills_volume: str | None = None
    image_facts: ImageFacts = NO_IMAGE
    is_root: bool = False
    """True if programs run as root of the sandbox's user namespace, over a root file system that they may change."""
    hostname: str = DEFAULT_HOSTNAME

    def __post_init__(self) -> None:
        if not self.image or not self.runtime:
            raise ValueError("image and runtime must be named: left empty, the engine would choose")
        if self.cgroup_version not in (1, 2):
            raise ValueError(f"cgroup version {self.cgroup_version!r} is neither 1 nor 2")
        foreign = sorted(name for name in self.labels if not name.startswith(LABEL_PREFIX))
        if foreign:
            raise ValueError(f"labels must start with {LABEL_PREFIX}: {foreign}")
        try:
            profile = json.loads(self.seccomp)
        except ValueError:
            profile = None
        if not isinstance(profile, dict) or profile.get("defaultAction") != "SCMP_ACT_ERRNO":
            raise ValueError("seccomp must be the text of a profile that denies by default")

    @property
    def uid(self) -> int:
        """The user id of all programs inside."""
        return 0 if self.is_root else UID

    @property
    def memory_bytes(self) -> int:
        """The memory limit of the container."""
        return self.limits.memory_bytes(has_tmpfs_workspace=self.workspace.bind is None)


@dataclass(frozen=True)
class HardeningRule:
    """A rule for a container: its place in the create body, the requested value, and the reason."""

    place: str
    value: object
    why: str


def build_rules(spec: SandboxSpec, accounts: AccountVolume | None = None) -> tuple[HardeningRule, ...]:
    """Return all hardening rules of a container. `accounts`: the volume with the AccountFiles of the image."""
    limits, memory = spec.limits, spec.memory_bytes
    row = HardeningRule
    table = [
        row("Image", spec.image, "what runs; the caller has checked it against the list of allowed digests"),
        row("User", f"{UID}:{UID}", "never root, not even to set up"),
        row("Entrypoint", guest_command(spec), "the guest is PID 1: signals from inside cannot end it"),
        row("Cmd", [], "nothing of the image is appended to the guest's command"),
        row("WorkingDir", "/workspace", "relative paths start where files may be made"),
        row("Env", _environment(spec), "these, over the image's own: no secret of the host"),
        row("Hostname", spec.hostname, "reveals nothing about the host"),
        row("Domainname", "", "reveals nothing about the host"),
        row("Labels", dict(spec.labels), "how the reaper finds its containers; anyone with the socket can read them"),
        row("Volumes", {}, "an anonymous volume is host disk without a limit"),
        row("Healthcheck", {"Test": ["NONE"]}, "no process but the guest is started from outside"),
        row("Tty", False, "frames are binary, and TIOCSTI needs a terminal"),
        row("OpenStdin", True, "the channel"),
        row("StdinOnce", True, "the first owner's end of input ends the guest"),
        row("AttachStdin", True, "the channel"),
        row("AttachStdout", True, "the channel"),
        row("AttachStderr", True, "the guest's error output"),
        row("NetworkDisabled", True, "no TCP, UDP, DNS; loopback only"),
        row("HostConfig.NetworkMode", "none", "no TCP, UDP, DNS; loopback only"),
        row("HostConfig.PortBindings", {}, "nothing on the host listens for a sandbox"),
        row("HostConfig.PublishAllPorts", False, "nothing on the host listens for a sandbox"),
        row("HostConfig.Links", [], "no way to another container"),
        row("HostConfig.ExtraHosts", [], "no name of the host"),
        row("HostConfig.Runtime", spec.runtime, "the boundary itself: runc, or a stronger one the operator named"),
        row("HostConfig.Privileged", False, "would void every row"),
        row("HostConfig.CapDrop", ["ALL"], "no mount, mknod, chown, raw socket"),
        row("HostConfig.CapAdd", [], "no mount, mknod, chown, raw socket"),
        row("HostConfig.GroupAdd", [], "no group but the sandbox's own"),
        row(
            "HostConfig.SecurityOpt",
            ["no-new-privileges", f"seccomp={spec.seccomp}"],
            "setuid files are inert; calls are filtered",
        ),
        row("HostConfig.UsernsMode", "", "a remapping the operator set up is not switched off"),
        row("HostConfig.PidMode", "", "sees and signals its own processes only"),
        row("HostConfig.IpcMode", "private", "shared memory and queues are its own"),
        row("HostConfig.UTSMode", "", "a host name of its own"),
        row("HostConfig.CgroupParent", "", "no caller moves a sandbox out of the engine's group"),
        row("HostConfig.ReadonlyRootfs", True, "the image cannot be changed"),
        row("HostConfig.Binds", [], "no host path"),
        row("HostConfig.VolumesFrom", [], "no other container's files"),
        row("HostConfig.Devices", [], "no device"),
        row("HostConfig.DeviceRequests", [], "no device"),
        row("HostConfig.DeviceCgroupRules", [], "no device"),
        row("HostConfig.Tmpfs", _tmpfs_mounts(spec), "every writable place has a size and a number of files"),
        row("HostConfig.ShmSize", limits.half_bytes, "for a runtime that mounts /dev/shm by itself"),
        row(
            "HostConfig.Sysctls", dict(SYSCTLS), "bounds for System V memory; any port and ping, as usual in containers"
        ),
        row("HostConfig.Memory", memory, "a hog dies in its own sandbox"),
        row("HostConfig.MemorySwap", memory, "equal to memory: no swap on top"),
        row("HostConfig.OomKillDisable", False, "a hog is killed, not frozen"),
        row("HostConfig.NanoCpus", round(limits.cpus * 1_000_000_000), "other sandboxes keep their share"),
        row("HostConfig.PidsLimit", limits.pids, "a fork bomb stops here"),
        row("HostConfig.Ulimits", _ulimits(limits), "descriptors, core files, one huge file"),
        row("HostConfig.Init", False, "an init would be killable from inside, and ptraceable"),
        row("HostConfig.RestartPolicy", {"Name": "no", "MaximumRetryCount": 0}, "a dead sandbox stays dead"),
        row("HostConfig.AutoRemove", True, "the engine removes it even when sandboxd has died"),
        row("HostConfig.LogConfig", {"Type": "none", "Config": {}}, "output does not fill the host's disk"),
    ]
    if mounts := [
        *_mounts(spec),
        *_account_mounts(spec, accounts),
    ]:  # An engine reports no empty list of mounts. find_drift finds unrequested mounts.
        table.append(
            row(
                "HostConfig.Mounts",
                mounts,
                "the workspace where it is kept apart; the toolkit, skills and user database, all read-only",
            )
        )
    if spec.cgroup_version == 1:  # control groups of version 2 have no such setting, and engines refuse or ignore it
        table.append(row("HostConfig.MemorySwappiness", 0, "the limit is memory, never the host's swap"))
    return tuple(table)


# Message queues and semaphores outlive their process. These limits are enough for a small database and too small to
# fill the memory.
SYSCTLS: Final[Mapping[str, str]] = {
    "kernel.shm_rmid_forced": "1",  # a segment is freed with the last process that has it attached
    "kernel.msgmni": "64",
    "kernel.sem": "250 2048 32 64",
    # Only in the network namespace of the sandbox, which has nothing but the loopback interface.
    "net.ipv4.ip_unprivileged_port_start": "0",
    "net.ipv4.ping_group_range": "0 65535",
}
"""Settings of the namespaces of a sandbox."""


def guest_command(spec: SandboxSpec) -> list[str]:
    """Return the command of PID 1."""
    return [*GUEST_COMMAND, *_guest_options(spec)]


def guest_title(spec: SandboxSpec) -> str:
    """Return the command line that PID 1 shows soon after its start."""
    return " ".join([GUEST_TITLE, *_guest_options(spec)])


def _guest_options(spec: SandboxSpec) -> list[str]:
    proxy = ["--proxy", str(PROXY_PORT)] if spec.network == "egress" else []
    return ["--life", f"{spec.life_s:g}", "--cpus", f"{spec.limits.cpus:g}", *proxy]


def own_variables(spec: SandboxSpec) -> dict[str, str]:
    """Return the environment variables of PID 1 that sandboxd sets. They replace those of the image."""
    home = {"HOME": "/root"} if spec.is_root else {}
    egress = EGRESS_ENVIRONMENT if spec.network == "egress" else {}
    passed = {f"{PASSED_PREFIX}{name}": value for name, value in image_variables(spec).items() if is_for_programs(name)}
    return {**passed, **ENVIRONMENT, **home, **egress}


def image_variables(spec: SandboxSpec) -> dict[str, str]:
    """Return the environment variables of the image."""
    return dict(variable.partition("=")[::2] for variable in spec.image_facts.variables if "=" in variable)


def is_for_programs(name: str) -> bool:
    """Return whether a variable of the image must not be in the environment of PID 1, where the loader and the C
    library would read it: it could load code of the image into the guest, or print to the guest's channel. Exception:
    LD_LIBRARY_PATH, which the toolkit ignores (RPATH).
    """
    is_of_loader = name.startswith("LD_") and name != "LD_LIBRARY_PATH"
    return is_of_loader or name == "LC_ALL" or name in _LIBRARY_VARIABLES


def _environment(spec: SandboxSpec) -> list[str]:
    # The engine can set a variable to an empty text, but cannot remove it.
    unset = {name: "" for name in image_variables(spec) if is_for_programs(name)}
    return [f"{name}={value}" for name, value in {**unset, **own_variables(spec)}.items()]


def _mounts(spec: SandboxSpec) -> list[dict[str, object]]:
    mounts: list[dict[str, object]] = []
    if spec.workspace.bind is not None:
        options = {"Propagation": "rprivate", "NonRecursive": True}
        mounts += [
            {
                "Type": "bind",
                "Source": f"{spec.workspace.bind}/{FILES}/{name}",
                "Target": target,
                "BindOptions": options,
            }
            for name, target in find_folders(is_root=spec.is_root).items()
        ]
    for volume, folder in ((spec.guest_volume, GUEST_FOLDER), (spec.skills_volume, SKILLS_FOLDER)):
        if volume is not None:
            options = {"NoCopy": True}
            mounts.append(
                {"Type": "volume", "Source": volume, "Target": folder, "ReadOnly": True, "VolumeOptions": options}
            )
    return mounts


def _account_mounts(spec: SandboxSpec, accounts: AccountVolume | None) -> list[dict[str, object]]:
    """Return the mounts of single files of a volume. Older engines mount only whole volumes, so the files are mounted
    from the volume's folder. The volume is mounted, too: otherwise the engine could remove it.
    """
    if accounts is None:
        return []
    files = [
        {"Type": "bind", "Source": f"{accounts.folder}/{name}", "Target": f"/etc/{name}", "ReadOnly": True}
        for name, _ in spec.image_facts.accounts.items()
    ]
    volume = {"Type": "volume", "Source": accounts.name, "Target": ACCOUNTS_FOLDER, "ReadOnly": True}
    return [{**volume, "VolumeOptions": {"NoCopy": True}}, *files]


def _tmpfs_mounts(spec: SandboxSpec) -> dict[str, str]:
    return {folder: ",".join(options) for folder, options in tmpfs_options(spec).items()}


def tmpfs_options(spec: SandboxSpec) -> dict[str, list[str]]:
    """Return the mount options of each folder in memory."""
    limits, own = spec.limits, [f"uid={spec.uid}", f"gid={spec.uid}"]
    options = {
        "/output": _tmpfs("noexec", limits.output_bytes, limits.output_inodes, *own, "mode=0700"),
        # The engine's own mount has no limit of inodes: empty files in /dev/shm, which remain after a kill, could use
        # up the memory limit.
        "/dev/shm": _tmpfs("noexec", limits.half_bytes, limits.shm_inodes, "mode=1777"),
    }
    if spec.workspace.bind is not None:
        return options
    size = limits.workspace_bytes, limits.workspace_inodes
    small = limits.half_bytes, limits.tmp_inodes
    folders = {
        "/workspace": _tmpfs("exec", *size, *own, "mode=0755"),
        "/tmp": _tmpfs("exec", *small, "mode=1777"),
        HOME: _tmpfs("exec", *small, *own, "mode=0700"),
    }
    return {folder: folders[folder] for folder in find_folders(is_root=spec.is_root).values()} | options


def _tmpfs(exec_option: str, size: int, inodes: int, *more: str) -> list[str]:
    return ["rw", "nosuid", "nodev", exec_option, f"size={size}", f"nr_inodes={inodes}", *more]


def ulimits(limits: SandboxLimits) -> dict[str, int]:
    """Return the resource limits of every process, soft and hard, by the name of `ulimit`."""
    return {"nofile": limits.nofile, "core": 0, "fsize": limits.workspace_bytes}


def _ulimits(limits: SandboxLimits) -> list[dict[str, object]]:
    return [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits(limits).items()]


def build_container_config(spec: SandboxSpec, accounts: AccountVolume | None = None) -> dict[str, object]:
    """Return the body of `POST /containers/create`. `accounts`: as in `build_rules`."""
    host: dict[str, object] = {}
    config: dict[str, object] = {}
    for rule in build_rules(spec, accounts):
        section, _, name = rule.place.rpartition(".")
        (host if section == "HostConfig" else config)[name] = rule.value
    return {**config, "HostConfig": host}


def find_drift(
    config: Mapping[str, object], inspected: Mapping[str, object], image_variables: Sequence[str] = ()
) -> list[str]:
    """Return a sentence for every value in `config`, and every engine default, that the engine's description of the
    container (`inspected`) does not confirm. `image_variables`: the environment of the image, to which the engine adds
    ours.

    `inspected` may describe a created or a running container. The engine reports what it accepted; the attack tests
    show that the kernel enforces it.
    """
    host = cast(Mapping[str, object], config["HostConfig"])
    requested = {f"Config.{name}": value for name, value in config.items() if name != "HostConfig"}
    requested |= {f"HostConfig.{name}": value for name, value in host.items()}
    variables = [*image_variables, *cast(Sequence[str], config.get("Env", []))]
    requested["Config.Env"] = list({variable.partition("=")[0]: variable for variable in variables}.values())
    drift = []
    for field_path, value in requested.items():
        actual = _look_up(inspected, field_path)
        if not _COMPARISONS.get(field_path, _is_same)(value, actual):
            drift.append(f"{field_path} is {_shown(actual)}, not {_shown(value)}.")
    return drift + list(_find_engine_drift(host, inspected))


def _find_engine_drift(host: Mapping[str, object], inspected: Mapping[str, object]) -> Iterator[str]:
    for field_path, required in (
        ("HostConfig.MaskedPaths", MASKED_PATHS),
        ("HostConfig.ReadonlyPaths", READONLY_PATHS),
    ):
        actual = _look_up(inspected, field_path)
        missing = required - set(actual if isinstance(actual, list) else [])
        if missing:
            yield f"{field_path} lacks {', '.join(sorted(missing))}."
    networks = _look_up(inspected, "NetworkSettings.Networks")
    if not isinstance(networks, dict) or not set(networks) <= {"none"}:
        yield f"NetworkSettings.Networks is {_shown(networks)}, not none."
    requested = {mount["Target"] for mount in cast(list[Mapping[str, object]], host.get("Mounts") or [])}
    mounts = _look_up(inspected, "Mounts")
    if not isinstance(mounts, list):
        yield f"Mounts is {_shown(mounts)}, not a list."
        return
    for mount in mounts:
        if mount.get("Destination") not in requested:
            yield f"Mounts has {mount.get('Destination')} ({mount.get('Type')}), which was not requested."


_MISSING: Final = "missing"


def _look_up(inspected: Mapping[str, object], place: str) -> object:
    value: object = inspected
    for name in place.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _is_same(requested: object, actual: object) -> bool:
    if requested in ([], {}, ""):  # the engine writes null for an empty value
        return actual is None or (actual == requested and type(actual) is type(requested))
    return actual == requested and isinstance(actual, bool) == isinstance(requested, bool)


def _is_same_in_any_order(requested: object, actual: object) -> bool:
    if not isinstance(requested, list) or not isinstance(actual, list):
        return False
    return sorted(json.dumps(item, sort_keys=True) for item in requested) == sorted(
        json.dumps(item, sort_keys=True) for item in actual
    )


def _is_same_environment(requested: object, actual: object) -> bool:
    """Return whether the variables are the same. The engine adds its default PATH if nothing else sets one."""
    if isinstance(actual, list):
        actual = [
            variable for variable in actual if variable != _DEFAULT_PATH or variable in cast(list[str], requested)
        ]
    return _is_same_in_any_order(requested, actual)


def _are_our_labels(requested: object, actual: object) -> bool:
    """Return whether all labels of the profile are set. An image may add labels of its own."""
    return (
        isinstance(requested, Mapping) and requested.items() <= (actual if isinstance(actual, Mapping) else {}).items()
    )


def _is_left_enabled(requested: object, actual: object) -> bool:
    """Return whether the OOM killer is enabled. On cgroup version 2 the OOM killer cannot be disabled, and the engine
    reports null.
    """
    return requested is False and (actual is None or actual is False)


_COMPARISONS: Final[Mapping[str, Callable[[object, object], bool]]] = {
    "Config.Env": _is_same_environment,
    "Config.Labels": _are_our_labels,
    "HostConfig.Ulimits": _is_same_in_any_order,
    "HostConfig.OomKillDisable": _is_left_enabled,
}


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
