"""Attacks that break the session for later calls, through its shell state, its folders or its descriptors."""

from collections.abc import Iterator

import pytest

from tests.support.guest.guest_harness import Done, Guest, needs_namespace, running_guest

pytestmark = needs_namespace


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest("ulimit -u 100;", idle_s=0.05) as running:
        yield running


def command(guest: Guest, script: str, **fields: object) -> Done:
    caps = {"stdout": 8192, "stderr": 8192, "merged": 8192}
    return guest.run(
        script,
        **{
            "cwd": None,
            "state": "keep",
            "timeout_s": 5,
            "capture": caps,
            "spill": {"bytes": 8192, "lines": 100},
            **fields,
        },
    )


def is_usable(guest: Guest) -> bool:
    done = command(guest, "echo well")
    return (done.bytes_of("merged"), done["state"]["outcome"], done["kill"]) == (b"well\n", "kept", None)


BREAKERS = {
    "closing its streams": "exec 0<&- 1>&- 2>&-; cd /tmp",
    "a huge environment": (
        "export A=$(head -c 100000 /dev/zero | tr '\\0' x) B=$(head -c 100000 /dev/zero | tr '\\0' y)"
    ),
    "unsetting PATH": "unset PATH",
    "an empty PATH": "export PATH=",
    "functions with the names of our builtins": (
        "trap() { exit 9; }; exec() { exit 9; }; shopt() { exit 9; }; read() { exit 9; }; eval() { exit 9; }"
    ),
    "an exported function with a shellshock": "export -f 2>/dev/null; x='() { :; }; exit 9'; export x",
    "readonly variables of the shell": "export PATH HOME; readonly PATH HOME IFS OLDPWD; export OLDPWD",
    "invalid bytes": "export X=$'\\377\\376'; f() { echo $'\\200'; }; cd \"$(mktemp -d /tmp/$'\\377'XXXX)\"; cd /",
    "strict options": "set -euo pipefail; shopt -s extdebug failglob; set -f; set -o noclobber; set -k",
    "a restricted shell": "set -r",
    "file size limit of zero": "ulimit -f 0; ulimit -n 3; cd /tmp",
    "aliases": "shopt -s expand_aliases; alias builtin='exit 9' printf='exit 9'",
    "a debug trap that exits": "trap 'exit 9' DEBUG; true",
    "a deleted folder": "d=$(mktemp -d /tmp/xxxx); cd $d; rmdir $d",
    "a killed parent": "kill -9 $PPID",
    "readonly variables and namerefs with internal names": (
        "readonly __toolcrew=1 BASH_ENV; declare -nx __toolcrew=PATH; declare -nx save=PATH"
    ),
    "names with new lines": "mkdir -p $'/tmp/a\\nb'; cd $'/tmp/a\\nb'; cd /",
}


@pytest.mark.parametrize("script", BREAKERS.values(), ids=BREAKERS.keys())
def test_a_later_command_still_works_after(guest: Guest, script: str) -> None:
    """Aim: leave a state in which no later command runs."""
    command(guest, script)
    assert is_usable(guest), command(guest, "declare -p; declare -f; pwd").bytes_of("merged")
    assert command(guest, "echo again; pwd", state="fresh")["exit_code"] == 0


def test_a_forged_shell_state_does_not_break_the_session(guest: Guest) -> None:
    """Aim: run code in every later command, or prevent all later commands."""
    state = guest.output / ".state" / "shell"
    command(guest, "true")
    for content in (b"exit 9\n\0\0end", b"kill -9 $$\n\0\0end"):
        state.write_bytes(content)
        command(guest, "echo works")
        # The file belongs to the session; a fresh start recovers the session.
        assert command(guest, "echo works", state="fresh").bytes_of("merged") == b"works\n"
    assert is_usable(guest)


@pytest.mark.parametrize(
    "attack", ["chmod 0 {0}", "rm -r {0}; echo > {0}", "rm -r {0}; mkfifo {0}", "rm -r {0}; ln -s / {0}"]
)
def test_a_session_recovers_its_state_folder_after(guest: Guest, attack: str) -> None:
    """Aim: leave no folder for the state."""
    command(guest, attack.format(guest.output / ".state"))
    command(guest, "cd /tmp")
    assert is_usable(guest)


def test_guest_memory_does_not_grow_with_the_output(guest: Guest) -> None:
    """Aim: fill the memory of PID 1."""
    command(guest, "true")
    before = guest.resident_bytes()
    done = command(
        guest,
        "head -c 30000000 /dev/zero | tr '\\0' '\\n'; head -c 30000000 /dev/zero | tr '\\0' 'x' >&2",
        timeout_s=20,
    )
    assert done["streams"]["merged"]["total"] == 60_000_000
    assert guest.resident_bytes() - before < 2 << 20


def test_a_daemonised_child_inherits_no_state_descriptor(guest: Guest) -> None:
    """Aim: read or write the next state through a descriptor that was left open."""
    files = "for fd in /proc/self/fd/*; do readlink $fd; done"
    done = command(guest, f"(setsid sh -c '{files}') | grep -c -e memfd -e state")
    assert done.bytes_of("merged") == b"0\n"
