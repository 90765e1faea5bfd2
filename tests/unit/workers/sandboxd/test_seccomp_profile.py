"""The shipped system call filter: required calls, forbidden calls, and the check that detects damage."""

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from toolcrew.workers.sandboxd.runtime.seccomp import find_profile_faults, load_seccomp_profile

TEXT = resources.files("toolcrew.workers.sandboxd.runtime").joinpath("seccomp.json").read_text(encoding="utf-8")
PROFILE = json.loads(TEXT)
REQUIRED_CALLS = (
    # file tools and confined opening
    "openat2", "openat", "statx", "newfstatat", "faccessat2", "renameat2", "unlinkat", "getdents64",
    "copy_file_range", "fallocate", "utimensat", "fchmodat2",
    # the guest and the C library: memory, threads, posix_spawn, events
    "memfd_create", "mmap", "mprotect", "brk", "clone", "vfork", "fork", "execve", "execveat", "wait4", "waitid",
    "exit_group", "rseq", "set_robust_list", "futex", "futex_waitv",
    "close_range", "pidfd_open", "pidfd_send_signal", "prctl", "rt_sigaction", "kill", "tgkill", "epoll_pwait2",
    "ppoll", "eventfd2", "signalfd4", "timerfd_create",
    # watchers, tests with servers on loopback, random numbers, self-confinement
    "inotify_init1", "inotify_add_watch", "bind", "listen", "accept4", "connect", "sendmsg", "recvmsg", "getrandom",
    "seccomp", "landlock_restrict_self",
)  # fmt: skip


def allowed_names() -> set[str]:
    return {name for rule in PROFILE["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}


def test_shipped_profile_has_no_faults() -> None:
    assert find_profile_faults(TEXT) == []


def test_profile_is_loaded_as_one_line_with_the_same_content() -> None:
    loaded = load_seccomp_profile()

    assert "\n" not in loaded
    assert json.loads(loaded) == PROFILE


def test_system_calls_of_tools_and_libc_are_allowed() -> None:
    assert set(REQUIRED_CALLS) - allowed_names() == set()


def test_both_architectures_include_their_32_bit_variants() -> None:
    assert {entry["architecture"]: entry["subArchitectures"] for entry in PROFILE["archMap"]} == {
        "SCMP_ARCH_X86_64": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "SCMP_ARCH_AARCH64": ["SCMP_ARCH_ARM"],
    }


def test_number_of_allowed_system_calls_is_fixed() -> None:
    """A change of this number is a change of what every sandbox may ask the kernel."""
    assert len(allowed_names()) == 353


def allow(profile: dict[str, Any], name: str, **rule: Any) -> None:
    profile["syscalls"].append({"names": [name], "action": "SCMP_ACT_ALLOW", **rule})


def drop_rule(profile: dict[str, Any], name: str) -> None:
    profile["syscalls"] = [rule for rule in profile["syscalls"] if name not in rule["names"]]


def rule_of(profile: dict[str, Any], name: str) -> dict[str, Any]:
    return next(rule for rule in profile["syscalls"] if name in rule["names"])


ABOVE_40 = [{"index": 0, "value": 40, "op": "SCMP_CMP_GT"}]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda profile: profile.update(defaultAction="SCMP_ACT_ALLOW"), "the default is"),
        (lambda profile: allow(profile, "ptrace"), "ptrace is allowed"),
        (lambda profile: allow(profile, "sethostname", includes={"caps": ["CAP_SYS_ADMIN"]}), "depends on ['caps']"),
        (lambda profile: allow(profile, "sync", excludes={"minKernel": "4.8"}), "depends on ['not minKernel']"),
        (lambda profile: allow(profile, "nosuchcall", action="SCMP_ACT_KILL"), "SCMP_ACT_KILL"),
        (lambda profile: allow(profile, "socket"), "not by one known family"),
        (lambda profile: allow(profile, "socket", args=ABOVE_40), "not by one known family"),
        (lambda profile: drop_rule(profile, "socketcall"), "socketcall is not refused"),
        (lambda profile: profile["syscalls"].sort(key=lambda rule: "socketcall" in rule["names"]), "socketcall is not"),
        (lambda profile: rule_of(profile, "socketcall").update(errnoRet=1), "socketcall is not refused"),
        (lambda profile: rule_of(profile, "clone").pop("args"), "may make a namespace"),
        (lambda profile: drop_rule(profile, "clone3"), "clone3 is not refused"),
    ],
)
def test_damaged_profile_is_detected(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    profile = json.loads(TEXT)
    damage(profile)

    assert any(message in fault for fault in find_profile_faults(json.dumps(profile)))


@pytest.mark.parametrize(
    "text", ["", "unconfined", "[]", "{}", "null", '{"defaultAction": "SCMP_ACT_ERRNO"}', '{"syscalls": 3}']
)
def test_invalid_profile_is_a_fault(text: str) -> None:
    assert len(find_profile_faults(text)) == 1
