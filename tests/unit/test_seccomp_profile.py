"""The shipped system call filter: required calls, forbidden calls, and the check that detects damage."""

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from workers.sandboxd.runtime.seccomp import NEVER_ALLOWED, find_profile_faults, load_seccomp_profile

TEXT = resources.files("workers.sandboxd.runtime").joinpath("seccomp.json").read_text(encoding="utf-8")
PROFILE = json.loads(TEXT)
NEEDED = (
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


def rules_of(name: str) -> list[dict[str, Any]]:
    return [rule for rule in PROFILE["syscalls"] if name in rule["names"]]


def test_the_shipped_profile_has_no_fault() -> None:
    assert find_profile_faults(TEXT) == []


def test_it_is_loaded_as_one_line_with_the_same_meaning() -> None:
    loaded = load_seccomp_profile()

    assert "\n" not in loaded
    assert json.loads(loaded) == PROFILE


def test_unlisted_calls_get_an_error() -> None:
    assert (PROFILE["defaultAction"], PROFILE["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 1)
    assert {rule["action"] for rule in PROFILE["syscalls"]} == {"SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"}


@pytest.mark.parametrize("family", sorted(NEVER_ALLOWED))
def test_no_call_of_a_refused_family_is_allowed(family: str) -> None:
    assert allowed_names().isdisjoint(NEVER_ALLOWED[family])


@pytest.mark.parametrize("name", NEEDED)
def test_the_calls_of_tools_and_libc_are_allowed(name: str) -> None:
    assert name in allowed_names()


def test_no_rule_depends_on_a_capability_or_on_the_kernels_version() -> None:
    assert {key for rule in PROFILE["syscalls"] for key in rule.get("includes", {})} == {"arches"}
    assert not any("excludes" in rule for rule in PROFILE["syscalls"])


def test_sockets_are_opened_by_equality_with_one_of_three_families() -> None:
    opened = [(arg["op"], arg["value"]) for rule in rules_of("socket") for arg in rule["args"]]

    assert opened == [("SCMP_CMP_EQ", 1), ("SCMP_CMP_EQ", 2), ("SCMP_CMP_EQ", 10)]
    assert [arg["value"] for rule in rules_of("socketpair") for arg in rule["args"]] == [1]


@pytest.mark.parametrize("name", ["clone3", "socketcall"])
def test_calls_that_hide_their_arguments_do_not_exist_for_the_caller(name: str) -> None:
    assert [(rule["action"], rule["errnoRet"]) for rule in rules_of(name)] == [("SCMP_ACT_ERRNO", 38)]


def test_both_architectures_bring_their_32_bit_sides() -> None:
    assert {entry["architecture"]: entry["subArchitectures"] for entry in PROFILE["archMap"]} == {
        "SCMP_ARCH_X86_64": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "SCMP_ARCH_AARCH64": ["SCMP_ARCH_ARM"],
    }


def test_no_call_is_named_twice_but_for_its_arguments() -> None:
    without_arguments = [name for rule in PROFILE["syscalls"] if "args" not in rule for name in rule["names"]]

    assert len(without_arguments) == len(set(without_arguments))
    assert {name for rule in PROFILE["syscalls"] if "args" in rule for name in rule["names"]}.isdisjoint(
        without_arguments
    )


def test_the_size_of_the_profile_is_a_decision() -> None:
    """A change of this number is a change of what every sandbox may ask the kernel."""
    assert len(allowed_names()) == 353


def set_default(profile: dict[str, Any]) -> None:
    profile["defaultAction"] = "SCMP_ACT_ALLOW"


def allow_ptrace(profile: dict[str, Any]) -> None:
    profile["syscalls"].append({"names": ["ptrace"], "action": "SCMP_ACT_ALLOW"})


def allow_mount_by_capability(profile: dict[str, Any]) -> None:
    profile["syscalls"].append(
        {"names": ["sethostname"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}}
    )


def kill_for_a_call(profile: dict[str, Any]) -> None:
    profile["syscalls"].append({"names": ["nosuchcall"], "action": "SCMP_ACT_KILL"})


def open_every_socket(profile: dict[str, Any]) -> None:
    profile["syscalls"].append({"names": ["socket"], "action": "SCMP_ACT_ALLOW"})


def open_newer_families(profile: dict[str, Any]) -> None:
    above = [{"index": 0, "value": 40, "op": "SCMP_CMP_GT"}]
    profile["syscalls"].append({"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": above})


def forget_socketcall(profile: dict[str, Any]) -> None:
    profile["syscalls"] = [rule for rule in profile["syscalls"] if "socketcall" not in rule["names"]]


def move_socketcall_last(profile: dict[str, Any]) -> None:
    profile["syscalls"].sort(key=lambda rule: "socketcall" in rule["names"])


def refuse_socketcall_like_the_default(profile: dict[str, Any]) -> None:
    next(rule for rule in profile["syscalls"] if "socketcall" in rule["names"])["errnoRet"] = 1


def allow_any_clone(profile: dict[str, Any]) -> None:
    del next(rule for rule in profile["syscalls"] if "clone" in rule["names"])["args"]


def forget_clone3(profile: dict[str, Any]) -> None:
    profile["syscalls"] = [rule for rule in profile["syscalls"] if "clone3" not in rule["names"]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (set_default, "the default is"),
        (allow_ptrace, "ptrace is allowed"),
        (allow_mount_by_capability, "depends on ['caps']"),
        (kill_for_a_call, "SCMP_ACT_KILL"),
        (open_every_socket, "not by one known family"),
        (open_newer_families, "not by one known family"),
        (forget_socketcall, "socketcall is not refused"),
        (move_socketcall_last, "socketcall is not refused"),
        (refuse_socketcall_like_the_default, "socketcall is not refused"),
        (allow_any_clone, "may make a namespace"),
        (forget_clone3, "clone3 is not refused"),
    ],
)
def test_damage_is_found(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    profile = json.loads(TEXT)
    damage(profile)

    assert any(message in fault for fault in find_profile_faults(json.dumps(profile)))


@pytest.mark.parametrize(
    "text", ["", "unconfined", "[]", "{}", "null", '{"defaultAction": "SCMP_ACT_ERRNO"}', '{"syscalls": 3}']
)
def test_an_invalid_profile_is_a_fault(text: str) -> None:
    assert len(find_profile_faults(text)) == 1
