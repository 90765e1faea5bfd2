"""Loads and checks the system call filter of every sandbox (`seccomp.json` in this folder).

How the profile was made. It started from the list of upstream's default profile (github.com/moby/profiles,
`seccomp/default.json`, June 2026, 426 names), rewritten and sorted by purpose. Then:

- every rule that depends on a capability was removed, because a sandbox has none;
- ptrace, process_vm_*, name_to_handle_at, memfd_secret, modify_ldt, vmsplice, listmount, statmount, adjtimex,
  clock_adjtime* and fanotify_mark were removed, which upstream allows to all containers;
- the io_setup family was removed: its slots (fs.aio-max-nr) are one number for the whole host, and one sandbox could
  use them all;
- `socket` is allowed for AF_UNIX, AF_INET and AF_INET6 by equality, so that neither a new family nor one with high bits
  set passes, and `socketpair` for AF_UNIX only;
- of AF_NETLINK, only the protocol NETLINK_ROUTE is allowed, with which programs list network interfaces and addresses.
  A sandbox has no CAP_NET_ADMIN, so it cannot change them;
- `socketcall`, the 32-bit way to `socket` whose family no filter can read, answers ENOSYS. libseccomp silently adds a
  permission for it to every `socket` rule, and runc skips a denial that equals the default action. Therefore it has its
  own errno and comes first;
- `clone3` answers ENOSYS so that the C library falls back to `clone`, which is allowed without the namespace flags;
- the calls that change the scheduling, the limits or the priorities of a process are allowed for every process but
  PID 1, which has the same user. No filter can compare a number without its high bits, so there is a rule for each bit;
- `personality` is allowed with ADDR_NO_RANDOMIZE, without which debuggers and ThreadSanitizer do not start a program;
- rules of architectures other than x86-64 and aarch64 (with their 32-bit variants) were removed.

A call that is not listed gets EPERM; no process is ever killed for a call. An engine or libseccomp that does not know a
name skips it, which denies that call. `tests/integration/test_container_profile.py` checks each of these against a real
kernel.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final, cast

ALLOW: Final = "SCMP_ACT_ALLOW"
ERRNO: Final = "SCMP_ACT_ERRNO"
EPERM: Final = 1
ENOSYS: Final = 38
SOCKET_FAMILIES: Final = frozenset({1, 2, 10})  # AF_UNIX, AF_INET, AF_INET6
NETLINK: Final = {(0, 16), (2, 0)}  # AF_NETLINK with NETLINK_ROUTE, as index and value of arguments
NAMESPACE_FLAGS: Final = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

TRACING: Final = ("ptrace", "process_vm_readv", "process_vm_writev")
"""Calls that a tenant class may allow."""
FIRST_SAFE_KERNEL: Final = "4.8"
"""Before this release of Linux, a tracer could replace a call that the filter had already allowed."""

NEVER_ALLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "io_uring": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "asynchronous io of the whole host": (
        "io_setup", "io_submit", "io_cancel", "io_destroy", "io_getevents", "io_pgetevents", "io_pgetevents_time64",
    ),
    "other processes' memory and descriptors": (
        "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp",
    ),
    "page faults in user space": ("userfaultfd",),
    "kernel keyrings": ("keyctl", "add_key", "request_key"),
    "programs in the kernel and its counters": ("bpf", "perf_event_open", "lookup_dcookie"),
    "mounts": (
        "mount", "umount", "umount2", "pivot_root", "mount_setattr", "move_mount", "open_tree", "open_tree_attr",
        "fsopen", "fsconfig", "fsmount", "fspick", "listmount", "statmount",
    ),
    "namespaces and roots": ("setns", "unshare", "chroot", "sethostname", "setdomainname"),
    "files by handle": ("name_to_handle_at", "open_by_handle_at", "file_getattr", "file_setattr"),
    "quota": ("quotactl", "quotactl_fd"),
    "segments and io ports": ("modify_ldt", "iopl", "ioperm"),
    "odd memory": ("vmsplice", "memfd_secret"),
    "placement on memory nodes": (
        "mbind", "get_mempolicy", "set_mempolicy", "set_mempolicy_home_node", "migrate_pages", "move_pages",
    ),
    "setting clocks": (
        "settimeofday", "clock_settime", "clock_settime64", "stime", "adjtimex", "clock_adjtime", "clock_adjtime64",
    ),
    "the machine": (
        "swapon", "swapoff", "acct", "reboot", "init_module", "finit_module", "delete_module", "create_module",
        "kexec_load", "kexec_file_load", "syslog", "vhangup", "nfsservctl", "uselib", "fanotify_init", "fanotify_mark",
    ),
    "what hides its arguments from a filter": ("socketcall", "clone3"),
}  # fmt: skip


@dataclass(frozen=True)
class _Rule:
    names: tuple[str, ...]
    action: str
    errno: int | None
    args: tuple[Mapping[str, object], ...]
    conditions: frozenset[str]


def load_seccomp_profile() -> str:
    """Return the profile as one line of JSON for `HostConfig.SecurityOpt`. Raises ValueError when the shipped file
    breaks a rule of this module.
    """
    text = resources.files("toolcrew.workers.sandboxd.runtime").joinpath("seccomp.json").read_text(encoding="utf-8")
    faults = find_profile_faults(text)
    if faults:
        raise ValueError("the shipped seccomp profile is damaged: " + "; ".join(faults))
    return json.dumps(json.loads(text), separators=(",", ":"))


@functools.cache
def allow_tracing(profile: str) -> str:
    """Return the profile with TRACING allowed. PID 1 and its supervisors refuse tracers: they are not dumpable."""
    content = json.loads(profile)
    rule = {"names": list(TRACING), "action": ALLOW, "includes": {"minKernel": FIRST_SAFE_KERNEL}}
    return json.dumps({**content, "syscalls": [*content["syscalls"], rule]}, separators=(",", ":"))


def find_profile_faults(text: str) -> list[str]:
    """Return a sentence for every violation of the rules in the module's docstring, or for invalid JSON."""
    try:
        profile = json.loads(text)
        rules = list(_read_rules(profile))
        default = (profile["defaultAction"], profile["defaultErrnoRet"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"it cannot be read as a profile ({type(error).__name__}: {error})"]
    faults = [] if default == (ERRNO, EPERM) else [f"the default is {default}, not EPERM"]
    faults += _find_odd_rules(rules)
    faults += _find_forbidden_names(rules)
    faults += _find_loose_sockets(rules)
    faults += _find_loose_clones(rules)
    return faults


def _read_rules(profile: Mapping[str, object]) -> Iterator[_Rule]:
    for raw in cast(list[Mapping[str, object]], profile["syscalls"]):
        includes = cast(Mapping[str, object], raw.get("includes") or {})
        excludes = cast(Mapping[str, object], raw.get("excludes") or {})
        yield _Rule(
            names=tuple(cast(list[str], raw["names"])),
            action=cast(str, raw["action"]),
            errno=cast("int | None", raw.get("errnoRet")),
            args=tuple(cast(list[Mapping[str, object]], raw.get("args") or [])),
            conditions=frozenset(includes) | frozenset(f"not {name}" for name in excludes),
        )


def _find_odd_rules(rules: list[_Rule]) -> Iterator[str]:
    for rule in rules:
        if rule.action not in (ALLOW, ERRNO):
            yield f"{rule.names[:3]} is answered with {rule.action}"
        if not rule.conditions <= {"arches"}:
            yield f"{rule.names[:3]} depends on {sorted(rule.conditions)}"


def _find_forbidden_names(rules: list[_Rule]) -> Iterator[str]:
    forbidden = {name: family for family, names in NEVER_ALLOWED.items() for name in names}
    for rule in rules:
        for name in rule.names:
            if rule.action == ALLOW and name in forbidden:
                yield f"{name} is allowed ({forbidden[name]})"


def _find_loose_sockets(rules: list[_Rule]) -> Iterator[str]:
    has_socketcall = False
    for rule in rules:
        if "socketcall" in rule.names and rule.action == ERRNO and rule.errno == ENOSYS:
            has_socketcall = True
        if not {"socket", "socketpair"} & set(rule.names):
            continue
        if not has_socketcall:
            yield "socketcall is not refused with ENOSYS before the first socket rule"
        if not _is_one_family(rule.args):
            yield f"a rule opens sockets by {list(rule.args)}, not by one known family"


def _is_one_family(args: tuple[Mapping[str, object], ...]) -> bool:
    if any(arg.get("op") != "SCMP_CMP_EQ" for arg in args):
        return False
    values = {(arg.get("index"), arg.get("value")) for arg in args}
    return values == NETLINK or (len(args) == 1 and values <= {(0, family) for family in SOCKET_FAMILIES})


def _find_loose_clones(rules: list[_Rule]) -> Iterator[str]:
    expected = {"index": 0, "value": NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    for rule in rules:
        if "clone" in rule.names and list(rule.args) != [expected]:
            yield f"a rule allows clone by {list(rule.args)}, which may make a namespace"
    if not any("clone3" in rule.names and rule.errno == ENOSYS for rule in rules):
        yield "clone3 is not refused with ENOSYS"
