"""Parser that finds the programs that a bash command line would run. It runs nothing and does not rate dangers.

The parser is not a complete bash. A text that the parser cannot understand makes the script opaque (it may run
anything), never harmless. In doubt the parser also reports commands that would not run.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolcrew.contract.shell.shell_reader import CommandDraft, Word, read_script

MAX_COMMAND_CHARS = 256 * 1024
"""Limit of the characters of a command line. A longer text is not parsed and counts as opaque."""
MAX_DEPTH = 12
"""Limit of nested commands, such as `bash -c` in `sudo` in `eval`. Deeper commands are opaque."""
MAX_PIECES = 256
"""Limit of nested scripts that are parsed in one text. Further ones are opaque, so that the time is linear in the
length of the text.
"""
MAX_SOURCES = 8

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]]*\])?\+?=")
_COPY_OF_DESCRIPTOR = re.compile(r"\d*-?")

Words = tuple[Word, ...]

SHELLS = frozenset({"sh", "bash", "dash", "ash", "rbash", "zsh", "ksh", "mksh", "fish"})
_SHELL_VALUED = frozenset({"--rcfile", "--init-file", "-o", "+o", "-O", "+O"})
_STANDARD_INPUT = frozenset({"-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"})
_NAMED_SCRIPTS = frozenset({"su", "runuser", "script", "flock", "sg"})
FEEDING = frozenset({"find", "xargs", "parallel"})
"""Programs, such as xargs, that append arguments to the command that they start."""
_FIND_ACTIONS = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_STATE_CHANGES = {
    "alias": "it defines an alias",
    "source": "it reads commands from a file",
    ".": "it reads commands from a file",
    "enable": "it changes what names mean",
    "hash": "it changes what names mean",
}


@dataclass(frozen=True)
class Wrapper:
    """Syntax of a program that starts a command: short and long options with a value, and operands before the
    command.
    """

    valued: str = ""
    valued_long: frozenset[str] = frozenset()
    operands: int = 0
    takes_assignments: bool = False
    is_transparent: bool = True
    """True if the program gives the command no additional rights."""


_SUDO_LONG = "user group host prompt close-from chdir chroot role type command-timeout other-user login-class auth-type"
WRAPPERS: dict[str, Wrapper] = {
    "sudo": Wrapper("aCDghpRrTtUu", frozenset(_SUDO_LONG.split()), takes_assignments=True, is_transparent=False),
    "doas": Wrapper("aCu", is_transparent=False),
    "pkexec": Wrapper(valued_long=frozenset({"user"}), is_transparent=False),
    "gosu": Wrapper(operands=1, is_transparent=False),
    "su-exec": Wrapper(operands=1, is_transparent=False),
    "chroot": Wrapper(operands=1, is_transparent=False),
    "unshare": Wrapper("RSGwl", frozenset({"root", "wd", "setuid", "setgid"}), is_transparent=False),
    "nsenter": Wrapper("tSGrwW", frozenset({"target", "setuid", "setgid"}), is_transparent=False),
    "xargs": Wrapper(
        "aEdILnPs",
        frozenset({"arg-file", "delimiter", "max-args", "max-procs", "max-chars", "process-slot-var"}),
        is_transparent=False,
    ),
    "parallel": Wrapper(
        "jaIdnNLPsS", frozenset({"jobs", "arg-file", "delimiter", "max-args", "sshlogin"}), is_transparent=False
    ),
    "env": Wrapper("uC", frozenset({"unset", "chdir"}), takes_assignments=True),
    "exec": Wrapper("a"),
    "command": Wrapper(),
    "builtin": Wrapper(),
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "time": Wrapper("fo", frozenset({"format", "output"})),
    "timeout": Wrapper("ks", frozenset({"kill-after", "signal"}), operands=1),
    "nice": Wrapper("n", frozenset({"adjustment"})),
    "ionice": Wrapper("cnpPu", frozenset({"class", "classdata", "pid", "pgid", "uid"})),
    "chrt": Wrapper("TPD", operands=1),
    "taskset": Wrapper(operands=1),
    "stdbuf": Wrapper("ioe", frozenset({"input", "output", "error"})),
    "flock": Wrapper("wE", frozenset({"wait", "timeout", "conflict-exit-code"}), operands=1),
    "strace": Wrapper("eoaspPuEISXbO"),
    "ltrace": Wrapper("eoaspPunxlFDAw"),
    "busybox": Wrapper(),
    "toybox": Wrapper(),
    "fakeroot": Wrapper("lsib"),
    "unbuffer": Wrapper(),
    "tini": Wrapper("pe"),
    "dumb-init": Wrapper("r"),
}


@dataclass(frozen=True)
class NestedCommands:
    """Commands that another command starts: some as lists of words, some as texts that a shell will read. `opaque`: the
    reason why there may be more.
    """

    commands: tuple[Words, ...] = ()
    scripts: tuple[str, ...] = ()
    opaque: str = ""
    is_transparent: bool = False


@dataclass(frozen=True)
class Command:
    """Simple command.

    `assignments`: assignments before the command. `outputs`: files that its redirections write. `stdin`: its
    here-document or here-string. `fed_by`: programs before it in its pipeline, the nearest first. `reads_pipe`: True
    if there are any. `function`: the function whose body contains the command. `is_concurrent`: the command runs at
    the same time as the next command (`|`, `&`). `is_fed`: the command gets more or other words when it runs
    (`xargs`, `find -exec`).
    """

    words: tuple[Word, ...]
    assignments: tuple[str, ...] = ()
    outputs: tuple[Word, ...] = ()
    stdin: str | None = None
    fed_by: tuple[str, ...] = ()
    reads_pipe: bool = False
    function: str = ""
    is_concurrent: bool = False
    is_fed: bool = False
    is_wrapper: bool = False
    """True if it only starts another command of the script, without additional rights, such as timeout or nohup."""

    @property
    def argv(self) -> tuple[str, ...]:
        """Words without quotes. A word that is known only at run time has its source text (`$x`)."""
        return tuple(word.text for word in self.words)

    @property
    def program(self) -> str:
        """First word without its folder; "" if there are no words."""
        return self.words[0].text.rpartition("/")[2] if self.words else ""


@dataclass(frozen=True)
class ShellScript:
    """All commands that `text` may run, including nested commands (`sudo`, `bash -c`, `$(...)`).

    `opaque`: the reason why there may be more commands; "" if the list is complete.
    """

    text: str
    commands: tuple[Command, ...] = ()
    opaque: str = ""

    @property
    def is_opaque(self) -> bool:
        return bool(self.opaque)


def parse_commands(text: str) -> ShellScript:
    """Return the commands of any text. Never raises; the time is linear in the length of the text."""
    parsed: list[Command] = []
    opaque = ""
    pending = [(text, 0, False)]
    pieces, characters = 0, 0
    while pending and pieces < MAX_PIECES:
        piece, depth, is_fed = pending.pop()
        pieces, characters = pieces + 1, characters + len(piece)
        if depth > MAX_DEPTH or len(piece) > MAX_COMMAND_CHARS or characters > 2 * MAX_COMMAND_CHARS:
            opaque = opaque or ("it is nested too deep" if depth else "it is too long to be read")
            continue
        commands, scripts, reason = _parse_piece(piece, depth, is_fed)
        parsed.extend(commands)
        # Pushed in reverse, so that the stack returns them in the order of the text.
        pending.extend(reversed(scripts))
        opaque = opaque or reason
    return ShellScript(text, tuple(parsed), opaque or ("it is too long to be read" if pending else ""))


def _parse_piece(text: str, depth: int, is_fed: bool) -> tuple[list[Command], list[tuple[str, int, bool]], str]:
    """Return the commands of one text, the nested texts as (text, depth, is_fed), and the reason why there may be more
    commands. `is_fed`: see Command.
    """
    content = read_script(text)
    commands: list[Command] = []
    scripts = [(piece, depth + 1, is_fed) for piece in content.texts]
    opaque = content.opaque
    for draft in content.drafts:
        for command, nested, level in _unwrap(_build_command(draft, is_fed), depth):
            commands.append(command)
            is_fed_inside = command.is_fed or command.program in FEEDING
            scripts.extend((script, level + 1, is_fed_inside) for script in nested.scripts)
            opaque = opaque or nested.opaque or _explain_unknown_program(command)
    return commands, scripts, opaque


def _unwrap(command: Command, depth: int) -> Iterator[tuple[Command, NestedCommands, int]]:
    """Yield the command and all commands that it would start."""
    pending = [(command, depth)]
    while pending:
        outer, level = pending.pop()
        if level > MAX_DEPTH:
            yield outer, NestedCommands(opaque="it is nested too deep"), level
            continue
        nested = _find_nested(outer.words, outer.stdin)
        yield dataclasses.replace(outer, is_wrapper=True) if nested.is_transparent else outer, nested, level
        inner = dataclasses.replace(outer, outputs=(), assignments=(), is_fed=outer.is_fed or outer.program in FEEDING)
        pending.extend((dataclasses.replace(inner, words=words), level + 1) for words in nested.commands)


def _explain_unknown_program(command: Command) -> str:
    if not command.words or command.words[0].text in ("[", "[["):
        return ""
    first = command.words[0]
    return "which program it runs is known only when it runs" if first.is_expanded or first.is_pattern else ""


def _build_command(draft: CommandDraft, is_fed: bool) -> Command:
    words = draft.words
    start = 0
    while start < len(words) and _ASSIGNMENT.match(words[start].text):
        start += 1
    return Command(
        words=tuple(words[start:]),
        assignments=tuple(word.text for word in words[:start]),
        outputs=tuple(target for operator, target in draft.redirects if _writes_file(operator, target)),
        stdin=draft.stdin(),
        fed_by=tuple(_iter_pipeline_sources(draft)),
        reads_pipe=draft.source is not None,
        function=draft.function,
        is_concurrent=draft.source is not None or draft.operator in ("|", "|&", "&"),
        is_fed=is_fed,
    )


def _writes_file(operator: str, target: Word) -> bool:
    if operator == ">&":
        return _COPY_OF_DESCRIPTOR.fullmatch(target.text) is None
    return ">" in operator


def _iter_pipeline_sources(draft: CommandDraft) -> Iterator[str]:
    source = draft.source
    for _ in range(MAX_SOURCES):
        if source is None:
            return
        name = next((word.text for word in source.words if not _ASSIGNMENT.match(word.text)), "")
        yield name.rpartition("/")[2]
        source = source.source


def _find_nested(words: Words, stdin: str | None) -> NestedCommands:
    """Return the commands that a command with these words starts. `stdin`: its here-document, if there is one."""
    if not words:
        return NestedCommands()
    name = words[0].text.rpartition("/")[2]
    if name in SHELLS:
        return _find_in_shell(words, stdin)
    if name == "eval":
        return NestedCommands(
            scripts=(" ".join(word.text for word in words[1:]),), opaque="it evaluates text as commands"
        )
    if name in _STATE_CHANGES and len(words) > 1:
        return NestedCommands(opaque=_STATE_CHANGES[name])
    if name in ("trap", "watch", "ssh", "parallel"):
        return _find_in_arguments(name, words)
    if name == "find":
        return NestedCommands(commands=tuple(_find_exec_commands(words)))
    script = _find_command_option(words) if name in _NAMED_SCRIPTS else None
    if script is not None:
        return script
    return _find_in_wrapper(WRAPPERS[name], words) if name in WRAPPERS else NestedCommands()


def _find_in_shell(words: Words, stdin: str | None) -> NestedCommands:
    """Return the commands of `bash -c TEXT`, or of a shell that reads its standard input. A shell that runs a file is
    treated like any other program.
    """
    index, has_script, reads_stdin = 1, False, False
    while index < len(words) and words[index].text[:1] in ("-", "+") and words[index].text not in ("-", "--"):
        text = words[index].text
        if text in _SHELL_VALUED:
            index += 1
        elif not text.startswith("--"):
            has_script = has_script or "c" in text
            reads_stdin = reads_stdin or "s" in text
        index += 1
    if index < len(words) and words[index].text in ("-", "--"):
        index += 1
    if has_script and index < len(words):
        word = words[index]
        return NestedCommands(
            scripts=(word.text,), opaque="a shell is given text known only when it runs" if word.is_expanded else ""
        )
    if index < len(words) and not reads_stdin and words[index].text not in _STANDARD_INPUT:
        return NestedCommands(
            opaque="a shell is given text known only when it runs" if words[index].is_expanded else ""
        )
    if stdin is not None:
        return NestedCommands(scripts=(stdin,))
    return NestedCommands(opaque="a shell runs any text that it receives")


def _find_in_arguments(name: str, words: Words) -> NestedCommands:
    if name == "trap":
        script_words = words[1:2]
    elif name == "parallel":
        # parallel joins its words and passes them to a shell.
        script_words = tuple(
            itertools.takewhile(
                lambda word: not word.text.startswith(":::"), words[_skip_options(words, WRAPPERS[name]) :]
            )
        )
    elif name == "watch":
        script_words = words[_skip_options(words, Wrapper("nq", frozenset({"interval", "equexit"}))) :]
    else:
        # Only the words after the host are the script.
        start = _skip_options(words, Wrapper("BbcDEeFIiJLlmOoPpQRSWw"))
        script_words = words[start + 1 :]
    return NestedCommands(scripts=(" ".join(word.text for word in script_words),)) if script_words else NestedCommands()


def _find_exec_commands(words: Words) -> list[Words]:
    commands: list[Words] = []
    index = 1
    while index < len(words):
        if words[index].text not in _FIND_ACTIONS:
            index += 1
            continue
        end = index + 1
        while end < len(words) and words[end].text not in (";", "+"):
            end += 1
        if end > index + 1:
            commands.append(words[index + 1 : end])
        index = end
    return commands


def _find_command_option(words: Words) -> NestedCommands | None:
    for index, word in enumerate(words[1:], start=1):
        text = word.text
        if text.startswith("--command="):
            return NestedCommands(scripts=(text.partition("=")[2],))
        is_option = text == "--command" or (text.startswith("-") and not text.startswith("--") and text.endswith("c"))
        if is_option and index + 1 < len(words):
            return NestedCommands(scripts=(words[index + 1].text,))
    return None


def _find_in_wrapper(wrapper: Wrapper, words: Words) -> NestedCommands:
    start = _skip_options(words, wrapper)
    options = words[1:start]
    if (
        any(word.text == "--split-string" or word.text.startswith(("-S", "--split-string=")) for word in options)
        and wrapper.takes_assignments
    ):
        text = " ".join(word.text.removeprefix("--split-string=").removeprefix("-S") for word in words[1:])
        return NestedCommands(scripts=(text,), opaque="it splits text into a command")
    first_operand = start
    while wrapper.takes_assignments and start < len(words) and (words[start].text == "-" or "=" in words[start].text):
        start += 1
    is_plain = start == first_operand
    start += wrapper.operands
    has_unknown_words = any(word.is_expanded or word.is_pattern for word in words[1:start])
    command = words[start:]
    opaque = "the words before the command are known only when it runs" if has_unknown_words and command else ""
    return NestedCommands(
        (command,) if command else (),
        opaque=opaque,
        is_transparent=wrapper.is_transparent and is_plain and bool(command),
    )


def _skip_options(words: Sequence[Word], wrapper: Wrapper) -> int:
    """Return the index of the first word that is neither an option nor the value of an option."""
    index = 1
    while index < len(words):
        text = words[index].text
        if text == "--":
            return index + 1
        if len(text) < 2 or not text.startswith("-"):
            return index
        index += 2 if _takes_value(text, wrapper) else 1
    return min(index, len(words))


def _takes_value(option: str, wrapper: Wrapper) -> bool:
    """Return whether the next word is the value of this option. This holds for a letter with a value at the end of its
    group, and for a long name with a value and without `=`.
    """
    if option.startswith("--"):
        return option[2:] in wrapper.valued_long
    for position, letter in enumerate(option[1:], start=1):
        if letter in wrapper.valued:
            return position == len(option) - 1
    return False
