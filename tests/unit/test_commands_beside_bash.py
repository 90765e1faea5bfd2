"""The command parser compared with a real bash: for any mixture of syntax, the parser names each program that bash
runs or reports opaque.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from contract.shell.commands import parse_commands

BASH = shutil.which("bash")
TIMEOUT_S = 5
# Pieces write into their folder and start nothing but `mark` and bash: PATH holds nothing else.
PIECES = [
    "mark",
    " ma''rk ",
    "'",
    '"',
    "`",
    "$(",
    "$((",
    ")",
    "))",
    "((",
    "{ ",
    " }",
    "}",
    "${x:-",
    "$x",
    "$@",
    "$IFS",
    "${IFS}",
    "$'",
    "$[",
]
PIECES += [
    "\\",
    "<<E",
    "<<-E",
    "<<'E'",
    "\nE\n",
    "\nE",
    "\\\n",
    "<(",
    "> o",
    "<",
    "<<<",
    "|",
    "&",
    "&&",
    ";;",
    ";",
    "\n",
    " ",
    " #",
    "!",
    "!(",
    "a",
    "x=",
    "1<",
]
PIECES += [
    "case x in ",
    "case x\nin",
    "x) ",
    "*) ",
    " esac",
    "for x in a b",
    "; do ",
    " done",
    "[[ ",
    " ]]",
    "a[1",
    "]",
    "if ",
    "; then ",
    "; fi",
]
PIECES += [
    "f() { mark; }",
    "function f { mark; }",
    " f ",
    "eval ",
    "bash -c ",
    "time ",
    "coproc ",
    "exec ",
    "command ",
    "trap 'mark' EXIT\n",
    "((1<<E))",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which scripts run. `bin/mark` creates a file named `ran`."""
    if BASH is None:
        if os.environ.get("TOOLCREW_TEST_REQUIRE"):
            pytest.fail("there is no bash to compare with")
        pytest.skip("there is no bash to compare with")
    place = tmp_path_factory.mktemp("beside-bash")
    (place / "bin").mkdir()
    (place / "work").mkdir()
    (place / "bin" / "bash").symlink_to(BASH)
    mark = place / "bin" / "mark"
    mark.write_text(f"#!{BASH}\n: > {place}/ran\n")
    mark.chmod(0o755)
    return place


def runs_mark(folder: Path, text: str) -> bool:
    """Return whether bash, given the text, starts `mark` before bash ends."""
    (folder / "ran").unlink(missing_ok=True)
    argv = [str(BASH), "--noprofile", "--norc", "-c", text]
    quiet = subprocess.DEVNULL
    environment = {"PATH": str(folder / "bin")}
    try:
        subprocess.run(
            argv,
            cwd=folder / "work",
            env=environment,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return (folder / "ran").exists()


@settings(max_examples=500, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_what_bash_runs_is_named_or_opaque(folder: Path, pieces: list[str]) -> None:
    text = "".join(pieces)
    script = parse_commands(text)
    assume("ma" in text)
    if not script.is_opaque and all(command.program != "mark" for command in script.commands):
        assert not runs_mark(folder, text)
