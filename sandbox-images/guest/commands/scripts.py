"""How a script reaches bash: through a memory file, and not as an argument.

A script in the arguments would match its own patterns: `pkill -f NAME` would end the shell that runs it. So bash gets a
short command, which runs the text of a variable. Bash first runs the preamble, another memory file (BASH_ENV), which
reads the script into this variable. A variable that is not exported is visible to no other process.
"""

from __future__ import annotations

import os
import re

from guest.failures import INVALID_ARGUMENTS, RequestFailure
from guest.processes import BASH

PREAMBLE_FD, SCRIPT_FD = 3, 4
_RUN = b'builtin eval -- "$BASH_EXECUTION_STRING"'
# The end of a script that runs in eval. It keeps PIPESTATUS, which the end of eval replaces. Scripts that could show it
# or take it for their own text do not get it: those that print their lines or have a DEBUG trap, and those that end
# within a document (<<) or a line that goes on.
_END = b"\n\nbuiltin exit"
_PIPELINE = re.compile(rb"[^|]\|[^|]")
_SHOWS_END = re.compile(rb"\bDEBUG\b|verbose|\bset\s+[-+]\w*v|\\\s*\Z")
# The trace of this end goes to /dev/null. So would the errors of an EXIT trap, and not traces to another descriptor.
_TRACES = re.compile(rb"xtrace|\bset\s+[-+]\w*x")
_TRACED_END = b"\n\n{ builtin exit; } 2>/dev/null"
_SHOWS_TRACED_END = re.compile(rb"\btrap\b|\bBASH_XTRACEFD\b")
_DOCUMENT = re.compile(rb"(?<!<)<<(-?)(?!<)(?:[ \t]*(?:\\?(\w+)|'([^'\n]+)'|\"([^\"\n]+)\")(?=[\s|&;()<>]|\Z))?")
# Options of bash that change nothing before the script begins. With others, bash would not read BASH_ENV, or would
# trace or export what the memory file does.
_LETTERS = frozenset(b"-celouE")
_LONG_OPTIONS = (b"--norc", b"--noprofile", b"--login")
_OPTION_NAMES = (b"errexit", b"nounset", b"pipefail")
# Bash reads no BASH_ENV if it starts with one of these. So the preamble sets them.
_OF_POSIX_MODE = (b"POSIXLY_CORRECT", b"POSIX_PEDANTIC")


def build_script_start(
    script: bytes,
    environment: dict[bytes, bytes],
    setup: bytes = b"",
    *,
    runs_file: bool = True,
    keeps_statuses: bool = False,
) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
    """Return the arguments, the environment and the descriptors from 3 on of a bash that runs `script`.

    `setup`: bash source text that runs before the script. `runs_file`: run the file of the environment's own BASH_ENV
    first, as bash does. `keeps_statuses`: an EXIT trap finds the statuses of the last pipeline in PIPESTATUS, except
    after scripts that could show how. Raises RequestFailure when the script has a NUL byte, and OSError.
    """
    if keeps_statuses and _PIPELINE.search(script):
        script += _choose_end(script)
    # The last argument is the script's own name, $0. Bash prints this name in front of its error messages.
    return [*BASH, _RUN, b"bash"], *_pass_script(script, environment, setup, runs_file)


def _choose_end(script: bytes) -> bytes:
    """Return the text that keeps the statuses of the script's last pipeline, or b"" if the script could show it."""
    if _SHOWS_END.search(script) or _ends_in_document(script):
        return b""
    if not _TRACES.search(script):
        return _END
    return b"" if _SHOWS_TRACED_END.search(script) else _TRACED_END


def _ends_in_document(script: bytes) -> bool:
    """Return whether the script may end before the last line of a document (<<). Also True for a `<<` that is none."""
    lines = iter(script.split(b"\n"))
    for line in lines:
        for document in _DOCUMENT.finditer(line):
            word = document[2] or document[3] or document[4]
            tabs = b"\t" if document[1] else b""
            # `in` reads the document's lines, so that the outer loop continues after them.
            if word is None or word not in (text.lstrip(tabs) if tabs else text for text in lines):
                return True
    return False


def hide_script(
    argv: list[bytes], environment: dict[bytes, bytes]
) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
    """Return arguments with the same effect, the environment, and the descriptors from 3 on.

    If the program is `bash -c SCRIPT`, the script is not in the arguments. Raises OSError.
    """
    at = _find_script(argv)
    if at is None:
        return argv, environment, []
    return [*argv[:at], _RUN, *argv[at + 1 :]], *_pass_script(argv[at], environment)


def open_in_memory(text: bytes) -> int:
    """Return the descriptor of a memory file with this content, at its start. Raises OSError."""
    fd = os.memfd_create("shell", os.MFD_CLOEXEC)
    view = memoryview(text)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def quote(text: bytes) -> bytes:
    """Return the text as one word of bash."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _pass_script(
    script: bytes, environment: dict[bytes, bytes], setup: bytes = b"", runs_file: bool = True
) -> tuple[dict[bytes, bytes], list[int]]:
    if b"\0" in script:
        raise RequestFailure(INVALID_ARGUMENTS, "the script has a NUL byte")
    file = environment.get(b"BASH_ENV")
    lines = [
        b"IFS= builtin read -r -d '' -u %d BASH_EXECUTION_STRING" % SCRIPT_FD,
        b"exec %d<&- %d<&-" % (PREAMBLE_FD, SCRIPT_FD),
        b"builtin unset -v BASH_ENV" if file is None else b"BASH_ENV=" + quote(file),
        setup,
    ]
    posix = {name: environment[name] for name in _OF_POSIX_MODE if name in environment}
    if file is not None and runs_file and not posix:
        lines.append(b'if [[ -r $BASH_ENV ]]; then builtin . "$BASH_ENV"; fi')
    lines += [b"builtin export %s=%s" % (name, quote(value)) for name, value in posix.items()]
    others = {name: value for name, value in environment.items() if name not in posix}
    environment = {**others, b"BASH_ENV": b"/proc/self/fd/%d" % PREAMBLE_FD}
    return environment, [open_in_memory(b"\n".join(lines) + b"\n"), open_in_memory(script)]


def _find_script(argv: list[bytes]) -> int | None:
    """Return the index of the script in the arguments of `bash -c SCRIPT`, or None for other programs and options."""
    if os.path.basename(argv[0]) != b"bash":
        return None
    has_script, names = False, 0
    for at, argument in enumerate(argv[1:], 1):
        if names and argument in _OPTION_NAMES:
            names -= 1
        elif argument[:1] == b"-" and _LETTERS.issuperset(argument) and argument[1:].isalpha():
            has_script = has_script or b"c" in argument
            names += argument.count(b"o")
        elif argument not in _LONG_OPTIONS:
            return at if has_script and not names and argument[:1] not in (b"-", b"+") else None
    return None
