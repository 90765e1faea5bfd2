"""Table of the guarantees of a host's sandboxes (for `--check` and `toolcrew doctor`), derived only from evidence.

Invariant: a guarantee that is shown as kept was observed. A fact that cannot be read makes a row `unknown`, never
`holds`, so a row can only be too pessimistic. The functions do no I/O; program.py collects the `Evidence`. No row
raises an exception, whatever the state of the engine and the host.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from toolcrew.contract.image_names import advise_missing
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.workers.sandboxd.disks.base import Kind
from toolcrew.workers.sandboxd.plans import DEFAULT_RUNTIME, Plans
from toolcrew.workers.sandboxd.runtime.apparmor import NO_PROFILE, ProfileChoice
from toolcrew.workers.sandboxd.runtime.engine import EngineFacts

RUNC_FIXED: Final = ((1, 2, 8), (1, 3, 3), (1, 4, 0))
"""First version of each series with the fixes of November 2025. In series 1.4.0 the third release
candidate has them.
"""
_RUNC_FIRST_CANDIDATE: Final = 3
_SECOND_KERNEL: Final = re.compile("runsc|gvisor|kata|firecracker")
_OPENAT2: Final = (5, 6)
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class HostFacts:
    """Facts about the host. `memory_bytes`: the total memory. None means that a fact is unknown."""

    kernel: str | None = None
    swaps: tuple[str, ...] | None = None
    """Devices and files that are used as swap."""
    overcommit: int | None = None
    """vm.overcommit_memory. 0: the kernel decides by a heuristic. 1: always. 2: never."""
    memory_bytes: int | None = None
    inotify_instances: int | None = None
    smt_active: bool | None = None
    ksm_running: bool | None = None


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """Read the facts from small files of the kernel. This function does not raise."""
    smt = _read_number(root / "sys/devices/system/cpu/smt/active")
    ksm = _read_number(root / "sys/kernel/mm/ksm/run")
    return HostFacts(
        kernel=_read(root / "proc/sys/kernel/osrelease"),
        swaps=_parse_swaps(_read(root / "proc/swaps")),
        overcommit=_read_number(root / "proc/sys/vm/overcommit_memory"),
        memory_bytes=_parse_total(_read(root / "proc/meminfo") or ""),
        inotify_instances=_read_number(root / "proc/sys/fs/inotify/max_user_instances"),
        smt_active=None if smt is None else bool(smt),
        ksm_running=None if ksm is None else ksm == 1,
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_number(path: Path) -> int | None:
    text = _read(path) or ""
    # Check the characters first: `int` alone also accepts signs, underscores and digits of other scripts.
    return int(text) if text.isascii() and text.isdigit() else None


def _parse_swaps(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(line.split()[0] for line in text.splitlines()[1:] if line.strip())


def _parse_total(meminfo: str) -> int | None:
    """Return the bytes of the line `MemTotal: 16303044 kB`."""
    match = re.search(r"^MemTotal:\s*([0-9]{1,15}) kB$", meminfo, re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


State = Literal["holds", "broken", "unknown"]


@dataclass(frozen=True)
class HostGuarantee:
    """A guarantee of this host. `remedy`: what the operator must do when the guarantee does not hold. `is_needed`:
    sandboxd cannot start without the guarantee.
    """

    name: str
    state: State
    why: str
    remedy: str = ""
    is_needed: bool = False


@dataclass(frozen=True)
class WorkspaceFacts:
    """The kind of workspaces that was chosen. `note`: why it is weaker than the best kind."""

    kind: Kind
    is_hard: bool
    note: str | None = None


@dataclass(frozen=True)
class Evidence:
    """Facts about a host and its settings. None means that a fact is unknown; `problem` gives the reason.

    `images`: name -> content id; the id is None if the engine does not have the image. `egress_problem`: why the proxy
    cannot be used; None if the proxy answers or is not used. `own_runtime`: the program and version with which sandboxd
    starts sandboxes itself, such as `crun 1.8.1`; None if the engine starts them. `engine_start`: why the engine does.
    `unmapped`: why the owners of images are not mapped (oci.py). `apparmor`: the profile of sandboxes that sandboxd
    starts itself.
    """

    settings: SandboxdSettings
    host: HostFacts
    plans: Plans
    facts: EngineFacts | None = None
    images: Mapping[str, str | None] = field(default_factory=dict)
    workspaces: WorkspaceFacts | None = None
    own_runtime: str | None = None
    engine_start: str | None = None
    unmapped: str | None = None
    apparmor: ProfileChoice = NO_PROFILE
    egress_problem: str | None = None
    problem: str | None = None


def build_rows(evidence: Evidence) -> tuple[HostGuarantee, ...]:
    """Return one row for each guarantee, judged by the evidence. The rows without which sandboxd cannot start come
    first.
    """
    return tuple(row(evidence) for row in _ROWS)


def _judge_engine(evidence: Evidence) -> HostGuarantee:
    name, facts = "engine answers", evidence.facts
    if facts is None:
        return HostGuarantee(
            name,
            "broken",
            evidence.problem or "it was not queried",
            "start the engine, or check DOCKER_HOST or TOOLCREW_CONTAINERD_SOCKET and your rights",
            is_needed=True,
        )
    return HostGuarantee(name, "holds", f"{facts.product} {facts.version}", is_needed=True)


def _judge_profile(evidence: Evidence) -> HostGuarantee:
    name = "profile holds"
    # Judge by the test with a real sandbox: an engine may ignore an option of the profile and still start the
    # container, so the request proves nothing.
    if evidence.problem is not None:
        return HostGuarantee(
            name,
            "broken",
            evidence.problem,
            "fix this problem and check again; until then sandboxd does not start",
            is_needed=True,
        )
    # sandboxd itself starts only the sandboxes of the default runtime.
    own = {DEFAULT_RUNTIME: evidence.own_runtime} if evidence.own_runtime is not None else {}
    runtimes = dict.fromkeys(own.get(plan.runtime, plan.runtime) for plan in evidence.plans.proofs())
    return HostGuarantee(
        name, "holds", f"a sandbox was started, inspected and removed, under {_list(runtimes)}", is_needed=True
    )


def _judge_start(evidence: Evidence) -> HostGuarantee:
    name = "sandboxes start without the engine"
    if evidence.own_runtime is not None:
        note = f"; but {evidence.unmapped}: forks copy files, and no class can have user root"
        return HostGuarantee(
            name,
            "holds",
            f"sandboxd starts those of the runtime {DEFAULT_RUNTIME} with {evidence.own_runtime}"
            f"{note if evidence.unmapped is not None else ''}",
        )
    if evidence.engine_start is None:
        return HostGuarantee(name, "unknown", "no sandbox was started", "fix the rows above, then check again")
    reason = (
        f"the engine starts them, because {evidence.engine_start}; starts and forks are slower, and no class can have "
        "user root"
    )
    return HostGuarantee(name, "broken", reason, "change that, or accept it (docs/images.md)")


def _judge_filter(evidence: Evidence) -> HostGuarantee:
    name = "system calls are filtered"
    if evidence.facts is None:
        return _engine_unknown(name)
    if not evidence.facts.seccomp:
        return HostGuarantee(
            name, "broken", "the engine has no seccomp", "use an engine and a kernel built with seccomp", is_needed=True
        )
    return HostGuarantee(name, "holds", "seccomp, with toolcrew's own profile", is_needed=True)


def _judge_runtimes(evidence: Evidence) -> HostGuarantee:
    name = "runtimes are installed"
    if evidence.facts is None:
        return _engine_unknown(name)
    missing = sorted(evidence.plans.runtimes() - set(evidence.facts.runtimes))
    if missing:
        reason = f"the engine has no {_list(missing)} (it has {_list(sorted(evidence.facts.runtimes))})"
        return HostGuarantee(
            name,
            "broken",
            reason,
            "install it, or change TOOLCREW_SANDBOX_RUNTIME or the tenant class's runtime",
            is_needed=True,
        )
    return HostGuarantee(name, "holds", _list(sorted(evidence.plans.runtimes())), is_needed=True)


def _judge_images(evidence: Evidence) -> HostGuarantee:
    name = "images are present"
    if evidence.facts is None:
        return _engine_unknown(name)
    missing = sorted(image for image in evidence.plans.local_images() if evidence.images.get(image) is None)
    if missing:
        # Without the default image no session opens. Other images concern only the tenants that ask for them.
        is_needed = evidence.settings.sandbox_image in missing
        return HostGuarantee(
            name,
            "broken",
            f"the engine has no {_list(missing)}",
            f"{'; '.join(sorted({advise_missing(image) for image in missing}))}; sandboxd pulls images whose entry "
            "begins with a registry",
            is_needed=is_needed,
        )
    image_ids = sorted(
        f"{image} = {str(identity).removeprefix('sha256:')[:12]}" for image, identity in evidence.images.items()
    )
    return HostGuarantee(name, "holds", _list(image_ids))


def _judge_runc(evidence: Evidence) -> HostGuarantee:
    name = "no known escape"
    if evidence.facts is None:
        return _engine_unknown(name)
    if not any("runc" in runtime for runtime in evidence.plans.runtimes()):
        return HostGuarantee(
            name,
            "unknown",
            "no class uses runc; the fixes of other runtimes are not known here",
            "read the security advisories of the runtime",
        )
    program, _, own = (evidence.own_runtime or "").partition(" ")
    # For runc, the version says which faults it has. For crun there is no such list here, so the row must not say
    # `holds`.
    if program == "crun":
        return HostGuarantee(
            name,
            "unknown",
            f"crun {own} starts sandboxes, each in a user namespace; which faults it has is not known here",
            "compare the version with the security advisories of crun and your distribution",
        )
    # The engine may use another runc than the one that sandboxd runs itself.
    version = own or evidence.facts.components.get("runc", "")
    is_fixed = is_runc_fixed(version)
    if is_fixed is None:
        return HostGuarantee(
            name,
            "unknown",
            f"the engine reports '{version[:60]}' as runc's version",
            "check `runc --version`: it must be 1.2.8, 1.3.3 or later",
        )
    if is_fixed:
        return HostGuarantee(
            name,
            "holds",
            f"runc {version} has the fixes of November 2025; unknown faults of the kernel are not covered",
        )
    remedy = (
        "install runc 1.2.8, 1.3.3 or later; or check in your distribution's changelog that CVE-2025-31133, "
        "-52565 and -52881 are fixed"
    )
    return HostGuarantee(
        name,
        "broken",
        f"runc {version} lacks the fixes of November 2025, unless your distribution backported them",
        remedy,
    )


def is_runc_fixed(version: str) -> bool | None:
    """Return whether upstream's runc of that version has the fixes of November 2025; None if the text is not a
    version.
    """
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:[-~]rc\.?(\d{1,4}))?", version)
    if match is None:
        return None
    number = (int(match[1]), int(match[2]), int(match[3]))
    if number == RUNC_FIXED[-1] and match[4] is not None:
        return int(match[4]) >= _RUNC_FIRST_CANDIDATE
    # Each series (1.2, 1.3) got the fixes in its own release: 1.2.9 has them, and the higher 1.3.2 does not. A series
    # without an entry is either older than all entries and never got the fixes, or newer and had them from its first
    # release.
    series = [fixed for fixed in RUNC_FIXED if fixed[:2] == number[:2]]
    is_final = match[4] is None or number not in RUNC_FIXED
    return (number >= series[0] and is_final) if series else number > RUNC_FIXED[-1]


def _judge_tenants(evidence: Evidence) -> HostGuarantee:
    name = "hostile tenants are isolated"
    sharing = _classes_on_shared_kernel(evidence)
    if not sharing:
        runtimes = _list(sorted(evidence.plans.runtimes()))
        return HostGuarantee(
            name, "holds", f"the runtime of every class has a kernel of its own, by its name: {runtimes}"
        )
    reason = (
        f"class {_list(sharing)}: sandboxes share this host's kernel, so a fault of the kernel affects every tenant"
    )
    return HostGuarantee(
        name, "broken", reason, "use gVisor or Kata for the tenant class, or a host for each such tenant"
    )


def _judge_access_control(evidence: Evidence) -> HostGuarantee:
    name = "mandatory access control on files"
    if evidence.facts is None:
        return _engine_unknown(name)
    modules = sorted(evidence.facts.security & {"apparmor", "selinux"})
    own, obstacle = evidence.apparmor.profile, evidence.apparmor.obstacle
    if evidence.own_runtime is not None and own is not None:
        return HostGuarantee(name, "holds", f"apparmor, with the engine's profile {own}")
    # The host has a security module, but its policy applies only to containers that the engine starts.
    if modules and evidence.own_runtime is not None:
        reason = f"sandboxes that sandboxd starts itself have no profile of {_list(modules)}"
        if obstacle is not None:
            remedy = "restart the engine, then sandboxd; in a container, sandboxd needs `apparmor:unconfined`"
            return HostGuarantee(name, "broken", f"{reason}: {obstacle}", remedy)
        # With TOOLCREW_SANDBOX_START=engine they would have a policy, but no user namespace.
        return HostGuarantee(name, "broken", reason, "accept it: each sandbox has a user namespace instead")
    if modules:
        return HostGuarantee(name, "holds", f"{_list(modules)}, with the engine's default policy")
    return HostGuarantee(
        name,
        "broken",
        "the engine uses neither AppArmor nor SELinux",
        "enable one of them in the kernel and the engine",
    )


def _judge_user_namespace(evidence: Evidence) -> HostGuarantee:
    name = "root in a sandbox is not root on the host"
    if evidence.facts is None:
        return _engine_unknown(name)
    if evidence.own_runtime is not None:
        return HostGuarantee(name, "holds", "each sandbox has a user namespace with ids of its own")
    features = sorted(evidence.facts.security & {"userns", "rootless"})
    if features:
        return HostGuarantee(name, "holds", f"the engine has {_list(features)}")
    reason = "no user namespace: uid 1000, and root after a fault of the runtime, have the rights of the host's users"
    # Not `userns-remap`: with it, sandboxd can never start sandboxes itself, each in a user namespace of its own.
    return HostGuarantee(
        name, "broken", reason, "let sandboxd start the sandboxes: see the row 'sandboxes start without the engine'"
    )


def _judge_resource_limits(evidence: Evidence) -> HostGuarantee:
    name = "memory and processes are limited"
    facts = evidence.facts
    if facts is None:
        return _engine_unknown(name)
    missing = [
        resource
        for resource, is_limited in (("memory", facts.has_memory_limit), ("processes", facts.has_pids_limit))
        if not is_limited
    ]
    # Without swap no memory can be written to disk. If the swap devices are unknown (None), assume that there are some.
    if not facts.has_swap_limit and evidence.host.swaps != ():
        missing.append("swap")
    if missing:
        return HostGuarantee(
            name,
            "broken",
            f"the kernel does not limit {_list(missing)} by control group",
            "boot with cgroup_enable=memory swapaccount=1",
        )
    return HostGuarantee(name, "holds", f"by cgroup v{facts.cgroup_version}")


def _judge_memory(evidence: Evidence) -> HostGuarantee:
    name = "memory suffices for all sandboxes"
    host_bytes = evidence.host.memory_bytes
    if host_bytes is None:
        return HostGuarantee(name, "unknown", "the size of this host's memory cannot be read", "mount /proc")
    # Files of a tmpfs are memory of the host, in addition to that of the programs. An unknown kind counts as tmpfs.
    is_tmpfs = evidence.workspaces is None or evidence.workspaces.kind == "tmpfs"
    sandbox_bytes = evidence.plans.largest_bytes(has_tmpfs_workspace=is_tmpfs)
    max_sandboxes = evidence.settings.max_sandboxes
    sum_text = f"{max_sandboxes} sandboxes of up to {sandbox_bytes // _MIB} MiB on {host_bytes // _MIB} MiB"
    if max_sandboxes * sandbox_bytes <= host_bytes:
        return HostGuarantee(name, "holds", sum_text)
    reason = f"{sum_text}: if all sandboxes use their limit, the kernel kills some of them and the host is slow"
    return HostGuarantee(
        name,
        "broken",
        reason,
        f"set TOOLCREW_MAX_SANDBOXES to {max(1, host_bytes // sandbox_bytes)}, or accept the risk",
    )


def _judge_overcommit(evidence: Evidence) -> HostGuarantee:
    name = "large programs start"
    mode = evidence.host.overcommit
    if mode is None:
        return HostGuarantee(name, "unknown", "vm.overcommit_memory cannot be read", "mount /proc")
    if mode == 2:
        return HostGuarantee(
            name,
            "broken",
            "vm.overcommit_memory is 2, but Node.js and other programs reserve more memory than they use",
            "set vm.overcommit_memory to 0 or 1",
        )
    return HostGuarantee(name, "holds", f"vm.overcommit_memory is {mode}")


def _judge_swap(evidence: Evidence) -> HostGuarantee:
    name = "secrets are not written to disk"
    swaps = evidence.host.swaps
    if swaps is None:
        return HostGuarantee(name, "unknown", "/proc/swaps cannot be read", "mount /proc")
    # zram is compressed memory. A mapped device may be encrypted, which its name does not show.
    on_disk = [device for device in swaps if not device.startswith("/dev/zram")]
    if not on_disk:
        return HostGuarantee(name, "holds", "no swap on a disk")
    if all(device.startswith(("/dev/dm-", "/dev/mapper/")) for device in on_disk):
        return HostGuarantee(
            name, "unknown", f"swap on {_list(on_disk)}, which may be encrypted", "check it with `dmsetup table`"
        )
    return HostGuarantee(
        name,
        "broken",
        f"memory of sandboxd and workers may be written to {_list(on_disk)}",
        "run swapoff, or encrypt the swap",
    )


def _judge_quota(evidence: Evidence) -> HostGuarantee:
    name = "workspaces are limited"
    workspaces = evidence.workspaces
    if workspaces is None:
        return HostGuarantee(name, "unknown", "no workspace was created", "fix the rows above, then check again")
    if not workspaces.is_hard:
        reason = (
            f"{workspaces.kind}: the size is only measured, so a fast program can exceed the limit{_note(workspaces)}"
        )
        return HostGuarantee(
            name,
            "broken",
            reason,
            "run sandboxd as root with e2fsprogs and loop devices; workspaces are then disk images",
        )
    return HostGuarantee(name, "holds", f"{workspaces.kind}: the kernel enforces bytes and number of files")


def _judge_persistence(evidence: Evidence) -> HostGuarantee:
    name = "files outlive their sandbox"
    workspaces = evidence.workspaces
    if workspaces is None:
        return HostGuarantee(name, "unknown", "no workspace was created", "fix the rows above, then check again")
    if workspaces.kind == "tmpfs":
        reason = f"tmpfs: the files of a session are lost with its sandbox{_note(workspaces)}"
        return HostGuarantee(
            name,
            "broken",
            reason,
            "run sandboxd as root with TOOLCREW_SANDBOX_WORKSPACE=auto or image, or as uid 1000 with folder",
        )
    return HostGuarantee(name, "holds", f"{workspaces.kind}: kept below {evidence.settings.state()}")


def _judge_inotify(evidence: Evidence) -> HostGuarantee:
    name = "per-user limits are separate"
    sharing, instances = _classes_on_shared_kernel(evidence), evidence.host.inotify_instances
    # The kernel counts some resources per user, and all sandboxes of the engine have the uid 1000 of the host.
    if not sharing:
        return HostGuarantee(name, "holds", "each sandbox has a kernel with counters of its own")
    if evidence.own_runtime is not None:
        return HostGuarantee(name, "holds", "each sandbox has users of its own")
    shown = "an unknown number of" if instances is None else str(instances)
    reason = (
        f"the kernel sees all sandboxes as one user: they share {shown} inotify instances, and one sandbox can use all"
    )
    return HostGuarantee(name, "broken", reason, "raise fs.inotify.max_user_instances, or use gVisor or Kata")


def _judge_side_channels(evidence: Evidence) -> HostGuarantee:
    name = "no shared core or memory page"
    host = evidence.host
    # One known risk is enough for `broken`, even if the other fact cannot be read.
    risks = [risk for risk, is_on in (("hyper-threads", host.smt_active), ("KSM", host.ksm_running)) if is_on]
    if risks:
        return HostGuarantee(
            name,
            "broken",
            f"{_list(risks)} on: one sandbox can infer data of another",
            "disable them where tenants are hostile",
        )
    if host.smt_active is None or host.ksm_running is None:
        return HostGuarantee(
            name,
            "unknown",
            "/sys does not show whether hyper-threads and KSM are on",
            "check `lscpu` and /sys/kernel/mm/ksm/run",
        )
    return HostGuarantee(name, "holds", "hyper-threads and KSM are off; caches are still shared")


def _judge_kernel(evidence: Evidence) -> HostGuarantee:
    name = "paths are resolved by the kernel"
    if evidence.facts is None:
        return _engine_unknown(name)
    kernel = evidence.facts.kernel
    match = re.match(r"(\d{1,4})\.(\d{1,4})", kernel)
    if match is None:
        return HostGuarantee(
            name, "unknown", f"the engine reports '{kernel[:60]}' as its kernel", "check that it is 5.6 or later"
        )
    if (int(match[1]), int(match[2])) < _OPENAT2:
        reason = (
            f"kernel {kernel} has no openat2: file tools open each part of a path, which is slower and equally safe"
        )
        return HostGuarantee(name, "broken", reason, "use a kernel of 5.6 or later")
    return HostGuarantee(name, "holds", f"kernel {kernel} has openat2")


def _judge_engine_host(evidence: Evidence) -> HostGuarantee:
    name = "the engine is on this host"
    if evidence.facts is None:
        return _engine_unknown(name)
    ours, theirs = evidence.host.kernel, evidence.facts.kernel
    if ours is None:
        return HostGuarantee(name, "unknown", "this host's kernel version cannot be read", "mount /proc")
    # The engine's socket may lead to another machine. Compare the kernel versions: on two machines they are equal only
    # by chance, and then the rows about this host would mostly be right.
    if ours != theirs:
        reason = (
            f"the engine's kernel is {theirs}, this host's kernel is {ours}: the rows about memory, swap and "
            "workspaces do not describe the engine's host"
        )
        return HostGuarantee(name, "broken", reason, "run sandboxd where the engine runs")
    return HostGuarantee(name, "holds", f"kernel {ours}")


def _judge_egress(evidence: Evidence) -> HostGuarantee:
    name = "network follows the class"
    classes = sorted(
        label for label, tenant_class in evidence.plans.classes.items() if tenant_class.network == "egress"
    )
    if not classes:
        return HostGuarantee(name, "holds", "no class has network")
    if evidence.egress_problem is not None:
        reason = f"class {_list(classes)} has no network: {evidence.egress_problem}"
        remedy = (
            "start `python -m toolcrew.workers.egress` with the same TOOLCREW_EGRESS_SOCKET, under a uid that "
            "TOOLCREW_EGRESS_UIDS allows"
        )
        return HostGuarantee(name, "broken", reason, remedy)
    return HostGuarantee(
        name, "holds", f"class {_list(classes)} through the egress proxy, all other classes have no network"
    )


# Sort by importance, not by name: an operator reads the table from the top, and the rows without which sandboxd does
# not start explain many of the others.
_ROWS: Final[tuple[Callable[[Evidence], HostGuarantee], ...]] = (
    _judge_engine,
    _judge_profile,
    _judge_start,
    _judge_filter,
    _judge_runtimes,
    _judge_images,
    _judge_runc,
    _judge_tenants,
    _judge_access_control,
    _judge_user_namespace,
    _judge_resource_limits,
    _judge_memory,
    _judge_overcommit,
    _judge_quota,
    _judge_persistence,
    _judge_egress,
    _judge_swap,
    _judge_inotify,
    _judge_side_channels,
    _judge_kernel,
    _judge_engine_host,
)


def _classes_on_shared_kernel(evidence: Evidence) -> list[str]:
    # Judge by the name of the runtime, because the engine reports nothing else. The row says so.
    default = evidence.settings.sandbox_runtime
    return sorted(
        name
        for name, tenant_class in evidence.plans.classes.items()
        if not _SECOND_KERNEL.search(tenant_class.runtime or default)
    )


def _engine_unknown(name: str) -> HostGuarantee:
    return HostGuarantee(name, "unknown", "the engine does not answer", "fix the engine first")


def _note(workspaces: WorkspaceFacts) -> str:
    return f" ({workspaces.note})" if workspaces.note else ""


def _list(items: Iterable[str]) -> str:
    return ", ".join(items)
