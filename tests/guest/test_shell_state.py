"""State that lasts from one command of a session to the next, and the damage that no command can do to this state."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.guest.guest_harness import Done, Guest, needs_namespace, running_guest

pytestmark = needs_namespace


@pytest.fixture
def guest(shared_guest: Guest) -> Guest:
    """A guest with a new session."""
    command(shared_guest, "true", state="fresh")
    return shared_guest


def command(guest: Guest, script: str | bytes, **fields: object) -> Done:
    return guest.run(script, **{"cwd": None, "state": "keep", **fields})


def stdout_of(guest: Guest, script: str | bytes, **fields: object) -> str:
    return command(guest, script, **fields).bytes_of("stdout").decode()


def test_unexported_variables_and_shell_options_are_not_kept(guest: Guest) -> None:
    command(guest, "B=1; set -euf; shopt -s extdebug nullglob; umask 077; exec 2>/dev/null")
    assert stdout_of(
        guest, 'echo "${B-none} $-"; umask; shopt nullglob extdebug; ls nowhere 2>&1 >/dev/null | wc -l'
    ) == ("none hBc\n0022\nnullglob       \toff\nextdebug       \toff\n1\n")


def test_relative_file_requests_start_in_the_session_folder(guest: Guest) -> None:
    command(guest, "mkdir -p sub; echo there > sub/f; cd sub")
    assert guest.request("read_file", path="f", max_bytes=100, timeout_s=5).bytes_of("file") == b"there\n"


@pytest.mark.parametrize("descriptor", [1, 2, 3, 4, 9])
def test_the_descriptor_of_a_trace_ends_with_its_command(guest: Guest, descriptor: int) -> None:
    """Bash closes the descriptor when a script unsets the variable."""
    opened = "" if descriptor < 3 else f"exec {descriptor}>trace; "
    command(guest, f"{opened}export BASH_XTRACEFD={descriptor} KEPT=1; set -x")
    done = command(guest, "unset BASH_XTRACEFD; echo $KEPT; echo error >&2")
    assert (done["exit_code"], done.bytes_of("stdout")) == (0, b"1\n")
    assert b"error\n" in done.bytes_of("stderr")
    assert b"builtin" not in done.bytes_of("stderr")


def test_a_trace_reaches_no_descriptor_of_the_guest(guest: Guest) -> None:
    script = "for fd in {3..255}; do BASH_XTRACEFD=$fd; set -x; : forged; set +x; done; BASH_XTRACEFD=; export KEPT=1"
    done = command(guest, script)
    assert done.bytes_of("stderr").count(b"invalid value for trace file descriptor") == 253
    assert done["state"]["outcome"] == "kept"
    assert stdout_of(guest, "echo $KEPT") == "1\n"


SHELL_EXITS = {
    "exit": ("exit 3", 3),
    "errexit": ("set -e; false; echo never", 1),
    "nounset": ("set -u; echo $nothing", 127),
    "syntax error": ("echo '", 2),
    "return": ("return 4", 2),
}


@pytest.mark.parametrize(("script", "code"), SHELL_EXITS.values(), ids=SHELL_EXITS.keys())
def test_the_state_is_kept_after_every_kind_of_shell_exit(guest: Guest, script: str, code: int) -> None:
    command(guest, "mkdir -p x; cd x; export KEPT=1")
    done = command(guest, script)
    assert done["exit_code"] == code
    assert done["state"]["outcome"] == "kept"
    assert stdout_of(guest, "pwd; echo $KEPT") == f"{guest.workspace}/x\n1\n"


LOST_STATES = {
    "sigkill": ("cd /tmp; export BAD=1; kill -9 $$", "none"),
    "sigterm": ("cd /tmp; export BAD=1; kill $$; sleep 5", "none"),
    "sigsegv": ("cd /tmp; export BAD=1; kill -SEGV $$", "none"),
    "exec": ("cd /tmp; export BAD=1; exec true", "replaced"),
    "own exit trap": ("export BAD=1; trap 'echo bye' EXIT", "replaced"),
    "function named builtin": ("export BAD=1; builtin() { :; }", "replaced"),
    "state too large": ("export BAD=1; export LOT=$(head -c 300000 /dev/zero | tr '\\0' x)", "too_large"),
    "debug trap that skips commands": ("export BAD=1; shopt -s extdebug; trap false DEBUG", "replaced"),
    "file size limit": ("export BAD=1; ulimit -f 0", "replaced"),
    "state folder removed": ("export BAD=1; rm -rf $(dirname $PWD)/output/.state", "replaced"),
}


@pytest.mark.parametrize(("script", "outcome"), LOST_STATES.values(), ids=LOST_STATES.keys())
def test_a_state_that_cannot_be_kept_leaves_the_session_unchanged(guest: Guest, script: str, outcome: str) -> None:
    command(guest, "export KEPT=1")
    state = command(guest, script)["state"]
    assert state["outcome"] == outcome
    after = command(guest, "echo ${KEPT-none} ${BAD-none}; pwd")
    assert after["state"]["outcome"] == "kept"
    expected = "none" if "rm -rf" in script else "1"
    assert after.bytes_of("stdout").decode() == f"{expected} none\n{guest.workspace}\n"


def test_a_timeout_or_a_cancel_keeps_no_state(guest: Guest) -> None:
    assert command(guest, "export BAD=1; cd /tmp; sleep 100", timeout_s=0.2)["state"]["outcome"] == "none"
    call = guest.start_script("export BAD=1; echo > gone; sleep 100", cwd=None, state="keep", timeout_s=20)
    guest.wait_for_file("gone")
    guest.send({"id": call, "op": "cancel"})
    assert guest.finish(call)["state"]["outcome"] == "none"
    assert stdout_of(guest, "echo ${BAD-none}") == "none\n"


def test_an_exit_trap_of_a_command_runs(guest: Guest) -> None:
    assert stdout_of(guest, "trap 'echo bye' EXIT; echo hi") == "hi\nbye\n"
    assert stdout_of(guest, "(trap 'echo inner' EXIT); cd /") == "inner\n"


def test_a_session_folder_outside_the_roots_is_reported_and_not_kept(guest: Guest) -> None:
    state = command(guest, "cd /usr")["state"]
    assert (state["stray"], state["moved"], state["folder"]) == ("/usr", False, str(guest.workspace))
    assert command(guest, "ln -sfn /usr out; cd out")["state"]["stray"] == "/usr"
    assert stdout_of(guest, "pwd") == f"{guest.workspace}\n"
    for cwd, code in (
        ("nowhere", "FILE_NOT_FOUND"),
        ("/etc", "PATH_NOT_ALLOWED"),
        ("out", "PATH_NOT_ALLOWED"),
        ("/etc/passwd", "NOT_A_DIRECTORY"),
    ):
        done = command(guest, "true", cwd=cwd)
        assert (done.code, cwd in done["error"]["message"]) == (code, True)


def test_a_removed_session_folder_is_replaced_by_the_workspace(guest: Guest) -> None:
    assert command(guest, "mkdir -p away; cd away")["state"]["moved"] is True
    assert command(guest, "rmdir ../away")["state"]["stray"] == ""
    after = command(guest, "pwd")
    assert after.bytes_of("stdout").decode() == f"{guest.workspace}\n"
    assert after["state"]["lost"] == f"{guest.workspace}/away"
    assert command(guest, "true")["state"]["lost"] is None


def test_commands_run_in_the_root_folder_while_the_workspace_cannot_be_entered(guest: Guest) -> None:
    command(guest, "mkdir -p inner; cd inner")
    command(guest, f"chmod 000 {guest.workspace}")
    try:
        denied = command(guest, "pwd")
        assert (denied.bytes_of("stdout"), denied["state"]["lost"]) == (b"/\n", str(guest.workspace))
    finally:
        command(guest, f"chmod 755 {guest.workspace}")
    after = command(guest, "pwd")
    assert (after.bytes_of("stdout").decode(), after["state"]["lost"]) == (f"{guest.workspace}\n", None)


def test_the_cwd_of_a_command_applies_to_that_command_only(guest: Guest) -> None:
    command(guest, "mkdir -p a b/c")
    assert stdout_of(guest, "pwd", cwd="b") == f"{guest.workspace}/b\n"
    assert stdout_of(guest, "pwd") == f"{guest.workspace}\n"
    command(guest, "cd a")
    command(guest, "cd ../b")
    assert stdout_of(guest, "cd -") == f"{guest.workspace}/a\n"
    command(guest, "cd ..")
    assert command(guest, "cd c", cwd="b")["state"]["moved"] is True
    assert stdout_of(guest, "pwd") == f"{guest.workspace}/b/c\n"


def test_a_fresh_state_resets_folder_variables_and_functions(guest: Guest) -> None:
    command(guest, "mkdir -p sub; cd sub; export A=1; f() { :; }; unset PATH PAGER")
    assert stdout_of(guest, "pwd; echo ${A-none} $PAGER; type f 2>&1", state="fresh").startswith(
        f"{guest.workspace}\nnone cat\nbash: line 1: type: f"
    )


def test_special_shell_variables_are_restored_safely(guest: Guest) -> None:
    command(guest, "unset PATH HOME NO_COLOR")
    values = stdout_of(
        guest, 'echo "${PATH-none} ${HOME-none} ${NO_COLOR-none}"; /usr/bin/env | /usr/bin/grep -c ^PATH='
    )
    assert values == "none none none\n0\n"
    command(guest, "export PATH=/usr/bin:/bin", state="fresh")
    command(
        guest,
        "export IFS=: UID SHELLOPTS BASHOPTS BASH_ENV=/nowhere ENV=/x PS4=p POSIXLY_CORRECT=1; readonly R=1; export R; "
        "export -f",
    )
    done = command(guest, 'echo "$IFS|$BASH_ENV|$R|$SHLVL"')
    assert (done.bytes_of("stdout"), done.bytes_of("stderr")) == (b":|/nowhere|1|1\n", b"")
    assert done["state"]["outcome"] == "kept"


def test_functions_of_any_name_are_kept(guest: Guest) -> None:
    script = (
        "shopt -s extglob\nfunction if { echo if; }\na-b.c() { echo abc; }\n[x() { echo x; }\n"
        "ext() { [[ $1 == @(a|b) ]] && echo ext; }\nhere() { cat <<EOF\n$1 '\"\nEOF\n}\nexport -f a-b.c"
    )
    command(guest, script)
    assert stdout_of(guest, "\\if; a-b.c; [x; ext a; here it; bash -c a-b.c") == "if\nabc\nx\next\nit '\"\nabc\n"


def test_tracing_and_traps_show_no_internal_commands(guest: Guest) -> None:
    done = command(
        guest,
        "trap 'echo dbg' DEBUG; trap 'echo err' ERR; set -xE; true",
        capture={"stdout": 9999, "stderr": 9999, "merged": 0},
    )
    assert done.bytes_of("stdout") == b"dbg\ndbg\ndbg\n"
    assert b"toolcrew" not in done.bytes_of("stderr")
    assert done["state"]["outcome"] == "kept"


def test_programs_get_no_internal_variables_functions_or_descriptors(guest: Guest) -> None:
    assert (
        stdout_of(
            guest,
            "ls /proc/self/fd | wc -l; env | grep -v -e PWD -e ^GIT_CONFIG_SYSTEM= | grep -c -i -e bash_env -e toolcrew; compgen -v | grep -i "
            "toolcrew; declare -F",
        )
        == "4\n0\n"
    )


def test_shell_errors_show_the_original_name_and_line(guest: Guest) -> None:
    assert command(guest, "\n\nnosuch").bytes_of("stderr") == b"bash: line 3: nosuch: command not found\n"
    assert stdout_of(guest, "echo $0 $LINENO !!") == "bash 1 !!\n"


@pytest.mark.parametrize(
    ("script", "statuses"),
    [
        ("true", [0]),
        ("false | true", [1, 0]),
        ("true | (exit 3) | false; ", [0, 3, 1]),
        ("set -eo pipefail; false | true", [1, 0]),
        ("set -eo pipefail; true | false\necho no", [0, 1]),
        ("false | true; exit", [1, 0]),
        ("false | true # a comment", [1, 0]),
        ("true <<E | false\ndocument\nE", [0, 1]),
        ("true <<-'E x' | false\n\tdocument\n\tE x", [0, 1]),
        ("cat <<A - <<B >f\na\nA\nb\nB\nfalse | cat <<<there", [1, 0]),
        ("set -x; true | false", [0, 1]),
        ("set -o xtrace\nfalse | true\nset +x", [0]),
        # Here the end of the script could be seen, so that only the status of the whole is reported.
        ("true <<E | false\ndocument", [1]),
        ("cat <<E >f\ncat <<F\nE\ntrue | false", [0, 1]),
        ("true <<E | false\ncat <<F\nF", [1]),
        ("set -v; true | false", [1]),
        ("set -x; trap 'echo end >&2' EXIT; true | false", None),
    ],
)
def test_the_exit_codes_of_the_last_pipeline_are_reported(
    guest: Guest, script: str, statuses: list[int] | None
) -> None:
    assert command(guest, script)["pipe_status"] == statuses


@pytest.mark.parametrize(
    ("script", "stream", "text"),
    [
        ("cat <<E | cat\na\nE", "stdout", "a\n"),
        ("cat <<E | cat\na\nE ", "stdout", "a\nE \n"),
        ("cat <<E | cat\na\n E\n", "stdout", "a\n E\n"),
        ("cat <<E | cat\ncat <<F\nF", "stdout", "cat <<F\nF\n"),
        ("set -x; true | true", "stderr", "++ true\n++ true\n"),
        (
            "set -x; trap 'echo end >&2' EXIT; true | true",
            "stderr",
            "++ trap 'echo end >&2' EXIT\n++ true\n++ true\n+ echo end\nend\n",
        ),
    ],
)
def test_a_script_shows_nothing_of_how_its_exit_codes_are_read(
    guest: Guest, script: str, stream: str, text: str
) -> None:
    assert sorted(command(guest, script).bytes_of(stream).decode().splitlines()) == sorted(text.splitlines())


@pytest.mark.parametrize("size", [131_071, 131_072, 700_000])
def test_a_command_of_any_length_runs_and_keeps_its_state(guest: Guest, size: int) -> None:
    script = b"export LONG=1; false | true\n#" + b"'" * size
    done = command(guest, script)
    assert (done["exit_code"], done["state"]["outcome"]) == (0, "kept")
    assert stdout_of(guest, "echo $LONG; ls /proc/self/fd | wc -l") == "1\n4\n"


@settings(max_examples=20, deadline=None)
@given(value=st.binary(min_size=0, max_size=40).filter(lambda raw: b"\0" not in raw))
@example(b"\n'\"$`\\x\xff\xc3")
def test_any_value_of_an_exported_variable_is_kept(shared_guest: Guest, value: bytes) -> None:
    escaped = "".join(f"\\x{byte:02x}" for byte in value)
    command(shared_guest, f"export VALUE=$'{escaped}'" if value else "export VALUE=")
    assert command(shared_guest, 'printf %s "$VALUE"').bytes_of("stdout") == value


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"x" * 300_000, b"fi (\0fi (\0end", b"\0\0end", b"declare -x PATH=\0\0end"]
)
def test_a_corrupted_state_file_does_not_break_the_next_command(guest: Guest, content: bytes) -> None:
    command(guest, "true")
    (guest.output / ".state" / "shell").write_bytes(content)
    done = command(guest, "echo works")
    assert (done.bytes_of("stdout"), done.bytes_of("stderr"), done["state"]["outcome"]) == (b"works\n", b"", "kept")


def test_files_of_authorities_are_kept_only_in_a_session_that_has_them() -> None:
    with running_guest() as guest:
        file = "/skills/authority/bundle.pem"
        for shown in ("", file):
            command(guest, f"export CA={file} KEPT=tcs")
            assert stdout_of(guest, 'echo "$CA|$KEPT"') == f"{shown}|tcs\n"
            assert guest.request("set_variables", variables={"SSL_CERT_FILE": file}).code is None


PLACEHOLDERS = [f"tcs_placeholder_{number:032x}" for number in (1, 2, 3)]


def test_copies_of_a_placeholder_are_those_of_the_session_that_uses_the_state() -> None:
    """A fork or a restored checkpoint has the state of another session."""
    show = 'echo "$TOKEN|$X|$AUTH|$OTHER|$(say)"'
    with running_guest() as guest, running_guest() as other:
        first, second, other_token = PLACEHOLDERS
        assert guest.request("set_variables", variables={"TOKEN": first, "OTHER": other_token}).code is None
        command(guest, 'export X="$TOKEN" AUTH="Bearer $TOKEN for \'$OTHER\'"; eval "say() { echo $TOKEN; }"')
        expected = "{0}|{0}|Bearer {0} for '{1}'|{1}|{0}\n"
        assert stdout_of(guest, show) == expected.format(first, other_token)
        assert stdout_of(guest, show) == expected.format(first, other_token)
        state = (guest.output / ".state" / "shell").read_bytes()
        assert not [placeholder for placeholder in PLACEHOLDERS if placeholder.encode() in state]
        # The other session has one of the two secrets.
        command(other, "true")
        assert other.request("set_variables", variables={"TOKEN": second}).code is None
        (other.output / ".state" / "shell").write_bytes(state)
        assert stdout_of(other, show) == expected.format(second, "")


def test_set_variables_applies_to_later_programs() -> None:
    with running_guest() as guest:
        placeholder = PLACEHOLDERS[0]
        command(guest, "export KEPT=1")
        assert "error" not in guest.request("set_variables", variables={"TOKEN": placeholder, "PAGER": "more"})
        assert stdout_of(guest, 'echo "$TOKEN $PAGER $KEPT"', state="use") == f"{placeholder} cat 1\n"
        assert guest.run('echo "$TOKEN $PAGER"').bytes_of("stdout").decode() == f"{placeholder} more\n"


@pytest.mark.parametrize("name", ["shell", "folder"])
def test_a_fifo_in_place_of_a_state_file_does_not_block_a_command(guest: Guest, name: str) -> None:
    script = f"cd $(dirname $PWD)/output/.state; rm -f {name}; mkfifo {name}; cd - >/dev/null"
    command(guest, script, state="use")
    assert command(guest, "echo works", timeout_s=2).bytes_of("stdout") == b"works\n"
    command(guest, f"rm -f $(dirname {guest.workspace})/output/.state/{name}", state="none", cwd="/")


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("set_variables", {"variables": {"A=B": ""}}),
        ("set_variables", {"variables": {"A": 1}}),
        ("set_variables", {"variables": {}, "foo": 1}),
        ("exec", {"env": {"A": "1"}}),
        ("exec", {"argv": ["true"], "script_bytes": 0}),
        ("exec", {"state": "some"}),
    ],
)
def test_invalid_variables_and_states_are_refused(guest: Guest, op: str, fields: dict[str, object]) -> None:
    done = command(guest, "true", **fields) if op == "exec" else guest.request(op, **fields)
    assert done.code == "INVALID_ARGUMENTS"
