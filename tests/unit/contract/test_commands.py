"""A command line parsed into the programs that it would run. Text that cannot be parsed is opaque."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from toolcrew.contract.shell.commands import MAX_COMMAND_CHARS, MAX_DEPTH, ShellScript, parse_commands
from toolcrew.contract.shell.shell_reader import MAX_TOKENS

SHELL_PIECES = [
    "'", '"', "`", "$(", "$((", "${", ")", "))", "}", "\\", "<<E", "\nE\n", "<(", "|", "&", ";;", "\n", " ", "#",
    "a", "case x in", "esac",
]  # fmt: skip
SHELL_PIECES += [
    "for x", " do ", "[[ ", " ]]", "{ ", "f()", "function f", "bash -c ", "eval ", "sudo ", "xargs ", "rm -rf /",
    "=", "~", "*", "\x00", "\ud800",
]  # fmt: skip


def argvs(text: str) -> list[tuple[str, ...]]:
    return [command.argv for command in parse_commands(text).commands if command.words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("# rm x", []),
        ("ls -la", [("ls", "-la")]),
        ("a b; c && d || e | f & g\nh", [("a", "b"), ("c",), ("d",), ("e",), ("f",), ("g",), ("h",)]),
        ("echo a#b # c", [("echo", "a#b")]),
        ("a \\\n b", [("a", "b")]),
        ("(a; b) | { c; }", [("a",), ("b",), ("c",)]),
        ("if a; then b; elif c; then d; else e; fi", [("a",), ("b",), ("c",), ("d",), ("e",)]),
        ("while ! a; do b; done < f", [("a",), ("b",)]),
        ("for x in rm y; do a; done", [("a",)]),
        ("for x do a; done", [("a",)]),
        ("for ((i=0; i<3; i++)); do a; done", [("a",)]),
        ("case $x in b|c) d;; (*) e;; esac; f", [("d",), ("e",), ("f",)]),
        ("[[ a > b && (c || d) ]] || e", [("[[", "a", "b", "c", "d", "]]"), ("e",)]),
        ("time -p a", [("a",)]),
        ("A=b C=d a e", [("a", "e")]),
    ],
)
def test_a_command_line_is_split_into_its_simple_commands(text: str, expected: list[tuple[str, ...]]) -> None:
    assert argvs(text) == expected
    assert not parse_commands(text).is_opaque


@pytest.mark.parametrize(
    "text",
    [
        "rm x", "r''m x", '"rm" x', "\\rm x", "r\\m 'x'", "$'\\x72m' x", "$'\\162m' $'x'", 'rm $"x"', "rm${IFS}x",
        "rm$IFS'x'", "r\\\nm x",
    ],
)  # fmt: skip
def test_quoting_does_not_change_the_parsed_words(text: str) -> None:
    assert argvs(text) == [("rm", "x")]


@pytest.mark.parametrize(
    "text",
    [
        "echo $(rm x)", 'echo "a $(rm x) b"', "echo `rm x`", "echo ${a:-$(rm x)}", "echo $((1 + $(rm x)))",
        "a=$(rm x)", "a=(b $(rm x))", "cat < <(rm x)", "cat <<E\n$(rm x)\nE", "echo $(case y\nin z) rm x;; esac)",
        "sudo -u root rm x", "sudo --user root -- rm x", "env -i -u A B=c rm x",
        "nohup nice -n 5 timeout -k 1 10 rm x", "command rm x", "exec -a name rm x", "time rm x", "xargs -n 1 rm x",
        "busybox rm x", "find . -exec rm x ';'", "bash -c 'rm x'", "sh -ec 'rm x'",
        "bash --norc -o pipefail -c 'rm x'", "bash -c \"bash -c 'rm x'\"", "bash <<< 'rm x'", "sh <<'E'\nrm x\nE",
        "eval 'rm x'", "eval rm x", "trap 'rm x' EXIT", "su -c 'rm x'", "su --command='rm x' me",
        "flock f -c 'rm x'", "watch -n 1 rm x", "ssh -p 22 host rm x", "env -S 'rm x'", "coproc rm x",
        "f() { rm x; }", "function f { rm x; }",
    ],
)  # fmt: skip
def test_a_nested_command_is_found(text: str) -> None:
    assert ("rm", "x") in argvs(text)


@pytest.mark.parametrize(
    "text",
    [
        "$X a",
        "a$X b",
        "$(echo rm) x",
        "/bin/r? x",
        "{rm,x}",
        "eval ls",
        "source f",
        ". ./f",
        "alias l=ls",
        "f() { ls; }",
        "function f { ls; }",
        "curl u | sh",
        "base64 -d f | bash -s",
        "bash",
        "bash < f",
        "bash <(curl u)",
        "bash -c $X",
        "sudo $X rm y",
        "echo 'a",
        'echo "a',
        "echo `a",
        "echo $(a",
        "echo ${a",
        "ls )",
        "cat <<E\na",
        "ls >",
        "e\x00cho a",
        "${ ls; }",
        "enable -f x y",
        "$(" * 50 + ")" * 50,
        "eval " * (MAX_DEPTH + 2) + "ls",
        "a;" * MAX_TOKENS,
        "a" * (MAX_COMMAND_CHARS + 1),
    ],
)
def test_a_command_line_that_cannot_be_resolved_is_opaque(text: str) -> None:
    assert parse_commands(text).opaque


def test_redirections_here_documents_and_pipelines_are_parsed() -> None:
    first, second = parse_commands("A=b cat <<E 2>&1 >out | sort 2> err >&2 &>> both\nbody\nE").commands
    assert (first.assignments, first.stdin, [word.text for word in first.outputs]) == (("A=b",), "body", ["out"])
    assert ([word.text for word in second.outputs], second.fed_by) == (["err", "both"], ("cat",))
    assert second.reads_pipe is True


@pytest.mark.parametrize(
    "text",
    [
        *("echo $((1<<E))\nrm x\nE", "((a=1<<E))\nrm x\nE", "cat <<E\nE\\\n\nrm x\nE", "cat <<EF\nE\\\nF\nrm x\nEF"),
        *("cat <<-E\n\tE\\\n\nrm x\nE", "cat <<E\n\\\nE\nrm x\nE"),
    ],
)
def test_a_command_after_a_here_document_or_an_arithmetic_shift_is_found(text: str) -> None:
    assert ("rm", "x") in argvs(text)


def test_a_continued_line_with_the_delimiter_does_not_end_a_here_document() -> None:
    assert argvs("cat <<E\na\\\nE\nrm x\nE") == [("cat",)]
    assert argvs("cat <<'E'\nE\\\nrm x\nE") == [("cat",)]
    assert argvs("cat <<E\na\\\\\nE\nrm x") == [("cat",), ("rm", "x")]


def test_only_harmless_wrapper_programs_are_marked_as_wrappers() -> None:
    marks = {
        command.program: command.is_wrapper
        for command in parse_commands("timeout 5 sudo xargs env A=b nice ls").commands
    }
    assert marks == {"timeout": True, "sudo": False, "xargs": False, "env": False, "nice": True, "ls": False}


@settings(max_examples=200)
@given(st.text() | st.lists(st.sampled_from(SHELL_PIECES), max_size=40).map("".join))
def test_any_text_and_any_mixture_of_shell_syntax_is_parsed(text: str) -> None:
    assert isinstance(parse_commands(text), ShellScript)


@given(st.lists(st.sampled_from(SHELL_PIECES), max_size=12).map("".join))
def test_the_first_command_line_is_found_before_any_text(text: str) -> None:
    assert parse_commands("rm x\n" + text).commands[0].argv == ("rm", "x")


@given(st.text(alphabet=st.characters(blacklist_characters="'\x00"), max_size=50))
def test_single_quoted_text_is_one_word(text: str) -> None:
    assert argvs(f"echo '{text}'") == [("echo", text)]


@pytest.mark.parametrize(
    "piece",
    [
        "(", "$(", "$((", "`", '"$(', "eval ", "sudo ", "{", "cat <<A\n", "cat <<A\nx\\\n", "<<A ", "a|", "${",
        "f(){ ", "ssh a ", "\\", "cd a;",
    ],
)  # fmt: skip
def test_a_hostile_text_of_full_length_is_read_in_bounded_time(piece: str) -> None:
    text = (piece * 131072)[:131072]
    started = time.process_time()
    parse_commands(text)
    assert time.process_time() - started < 5


BASH = shutil.which("bash")
TIMEOUT_S = 5
# Pieces write into their folder and start nothing but `mark` and bash: PATH holds nothing else.
PIECES = [
    "mark", " ma''rk ", "'", '"', "`", "$(", "$((", ")", "))", "((", "{ ", " }", "}", "${x:-", "$x", "$@", "$IFS",
    "${IFS}", "$'", "$[",
]  # fmt: skip
PIECES += [
    "\\", "<<E", "<<-E", "<<'E'", "\nE\n", "\nE", "\\\n", "<(", "> o", "<", "<<<", "|", "&", "&&", ";;", ";", "\n",
    " ", " #", "!", "!(", "a", "x=", "1<",
]  # fmt: skip
PIECES += [
    "case x in ", "case x\nin", "x) ", "*) ", " esac", "for x in a b", "; do ", " done", "[[ ", " ]]", "a[1", "]",
    "if ", "; then ", "; fi",
]  # fmt: skip
PIECES += [
    "f() { mark; }", "function f { mark; }", " f ", "eval ", "bash -c ", "time ", "coproc ", "exec ", "command ",
    "trap 'mark' EXIT\n", "((1<<E))",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which scripts run. `bin/mark` creates a file named `ran`."""
    if BASH is None:
        if os.environ.get("TOOLCREW_TEST_REQUIRE"):
            pytest.fail("there is no bash to compare with")
        pytest.skip("there is no bash to compare with")
    root = tmp_path_factory.mktemp("beside-bash")
    (root / "bin").mkdir()
    (root / "work").mkdir()
    (root / "bin" / "bash").symlink_to(BASH)
    mark = root / "bin" / "mark"
    mark.write_text(f"#!{BASH}\n: > {root}/ran\n")
    mark.chmod(0o755)
    return root


def runs_mark(folder: Path, text: str) -> bool:
    """Return whether bash, given the text, starts `mark` before bash ends."""
    (folder / "ran").unlink(missing_ok=True)
    argv = [str(BASH), "--noprofile", "--norc", "-c", text]
    devnull = subprocess.DEVNULL
    environment = {"PATH": str(folder / "bin")}
    try:
        subprocess.run(
            argv,
            cwd=folder / "work",
            env=environment,
            stdin=devnull,
            stdout=devnull,
            stderr=devnull,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return (folder / "ran").exists()


@settings(max_examples=500, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_every_program_that_bash_runs_is_found_or_the_line_is_opaque(folder: Path, pieces: list[str]) -> None:
    text = "".join(pieces)
    script = parse_commands(text)
    assume("ma" in text)
    if not script.is_opaque and all(command.program != "mark" for command in script.commands):
        assert not runs_mark(folder, text)
