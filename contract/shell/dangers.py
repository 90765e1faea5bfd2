"""How dangerous a command is: nothing to say, dangerous (a person decides), catastrophic (refused whoever says yes).

A seat belt, not a wall: a program that is not in the tables, or a script in a file, may do anything its sandbox allows.
"""

import enum
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass

from contract.shell.commands import Command, Script
from contract.shell.danger_tables import (
    COPIERS,
    DANGEROUS_PROGRAMS,
    DANGEROUS_SUBCOMMANDS,
    DECODERS,
    DEVICE_TOOLS,
    FIND_EXECUTES,
    FIND_REMOVERS,
    FIND_TESTS_WITH_VALUE,
    HARMLESS_DEVICES,
    HOST_CONTROLS,
    HOSTILE_FLAGS,
    INTERPRETERS,
    OWN_FOLDERS,
    SYSTEM_FOLDERS,
    WHOLE_TREES,
    WRITERS,
)
from contract.shell.shell_reader import Word


class Level(enum.IntEnum):
    """Ordered: a script is as dangerous as its most dangerous command."""

    NONE = 0
    DANGEROUS = 1
    CATASTROPHIC = 2


@dataclass(frozen=True)
class Danger:
    """How bad, and why, in words that fit after "it"; "" when there is nothing to say."""

    level: Level = Level.NONE
    reason: str = ""


NO_DANGER = Danger()
MAX_MEMBERS = 64
MAX_PATH_CHARS = 4096
_ONE_BRACE_LIST = re.compile(r"([^{}]*)\{([^{}]*)\}([^{}]*)")
_GLOB_ONLY = re.compile(r"[*?.\[\]{},!^]+")
# What must occur is looked for ahead: two repetitions side by side would try every split of a long mode.
_BAD_MODE = re.compile(r"[0-7]?[0-7][0-7][2367]|(?:(?=[ug]*[ao])[augo]+)?[+=](?=[rxXst]*w)[rwxXst]*")
_SET_ID_MODE = re.compile(r"[2467][0-7]{3}|[augo]*[+=](?=[rwxXt]*s)[rwxXst]*")
_BRACKETS = re.compile(r"\[[^\]]*\]?")
_NAMED = re.compile(r"\w")
_FILTERS = (
    "-name",
    "-iname",
    "-path",
    "-ipath",
    "-wholename",
    "-regex",
    "-iregex",
    "-newer",
    "-mtime",
    "-mmin",
    "-atime",
    "-ctime",
    "-inum",
)


def classify(script: Script, folder: str = "") -> Danger:
    """The worst of all commands, what cannot be told included: it counts as dangerous. `folder`: where the script
    starts, "" if unknown.
    """
    worst = Danger(Level.DANGEROUS, f"cannot be read whole: {script.opaque}") if script.is_opaque else NO_DANGER
    # Of the whole script: loops and functions may run a later `cd` first, and one that fails leads nowhere.
    is_at_home = _is_own(folder) and not any(_may_leave(command) for command in script.commands)
    for command in script.commands:
        found = classify_command(command, folder, is_at_home=is_at_home)
        # The first of equals is told; a named danger says more than "cannot be read".
        if found.level > worst.level or (
            found.level == worst.level and found.reason and worst.reason.startswith("cannot be read")
        ):
            worst = found
        if command.program in ("cd", "pushd"):
            operands = split_flags(command)[1]
            folder = _resolve(folder, operands[0].text if operands else "$HOME")[:MAX_PATH_CHARS]
    return worst


def classify_command(command: Command, folder: str = "", *, is_at_home: bool = False) -> Danger:
    """One command. `folder`: where earlier `cd`s have led, "" when nowhere known; `is_at_home`: it runs below
    OWN_FOLDERS for certain.
    """
    worst = _removal(command, folder, is_at_home)
    for check in _CHECKS:
        found = check(command, folder)
        if found.level > worst.level:
            worst = found
    return worst


def _bad(reason: str) -> Danger:
    return Danger(Level.DANGEROUS, reason)


def _worst(reason: str) -> Danger:
    return Danger(Level.CATASTROPHIC, reason)


def _fork_bomb(command: Command, folder: str) -> Danger:
    if command.function and command.is_concurrent and command.argv[:1] == (command.function,):
        return _worst("is a fork bomb: a function that starts itself beside itself")
    return NO_DANGER


def _removal(command: Command, folder: str, is_at_home: bool) -> Danger:
    if command.program != "rm":
        return NO_DANGER
    flags, operands = split_flags(command)
    if _has_long(flags, "--no-preserve-root", 5):
        return _worst("removes the root of the file system")
    is_recursive = _has_short(flags, "rR") or _has_long(flags, "--recursive", 3)
    if is_recursive:
        for word in operands:
            if is_whole_tree(word, folder):
                return _worst(f"removes everything under {word.text}")
    is_named = bool(operands) and not command.is_fed and all(_is_own_name(word, is_at_home) for word in operands)
    if is_named:
        return NO_DANGER
    if is_recursive:
        return _bad("removes folders with all that is in them")
    if _has_short(flags, "f") or _has_long(flags, "--force", 3):
        return _bad("removes files without asking")
    system = next((path for word in operands if (path := _resolve(folder, word.text)).startswith(SYSTEM_FOLDERS)), "")
    return _bad(f"removes {system}") if system else NO_DANGER


def _finding(command: Command, folder: str) -> Danger:
    argv = command.argv
    if command.program != "find":
        return NO_DANGER
    if not _removes_what_it_finds(argv):
        return NO_DANGER
    starts = []
    for word in command.words[1:]:
        if word.text.startswith(("-", "(", "!")):
            break
        starts.append(word)
    if any(is_whole_tree(word, folder) for word in starts) and not any(word in argv for word in _FILTERS):
        return _worst("removes everything that it finds under a whole tree")
    return _bad("removes all that it finds")


def _removes_what_it_finds(argv: tuple[str, ...]) -> bool:
    """Whether an action of this `find` removes. A word that belongs to a test, such as `rm` of `-name rm`, is no
    action.
    """
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "-delete":
            return True
        if word in FIND_EXECUTES:
            end = next(
                (i for i in range(at + 1, len(argv)) if argv[i] == ";" or argv[i - 1 : i + 1] == ("{}", "+")), len(argv)
            )
            if any(part.rpartition("/")[2] in FIND_REMOVERS for part in argv[at + 1 : end]):
                return True
            at = end
        elif word in FIND_TESTS_WITH_VALUE or word.startswith("-newer"):
            at += 1
        elif word == "-fprintf":
            at += 2
        at += 1
    return False


def _moving(command: Command, folder: str) -> Danger:
    if command.program == "mv" and any(is_whole_tree(word, folder) for word in split_flags(command)[1][:-1]):
        return _worst("moves a whole tree away")
    return NO_DANGER


def _device(command: Command, folder: str) -> Danger:
    """Programs that format or wipe what they are pointed at."""
    name = command.program
    if not (name in DEVICE_TOOLS or name.startswith("mkfs.")):
        return NO_DANGER
    for target in command.argv[1:]:
        if is_device(target):
            return _worst(f"overwrites the device {target}")
    return _bad(f"formats or wipes what it is pointed at ({name})")


def _written(command: Command, folder: str) -> Danger:
    """Files that redirections, or programs that write where they are told, would write."""
    targets = [word.text for word in command.outputs]
    operands = [text.removeprefix("of=") for text in command.argv[1:] if not text.startswith("-")]
    if command.program in WRITERS:
        targets += operands
    elif command.program in COPIERS:
        targets += operands[-1:]
    worst = NO_DANGER
    for target in targets:
        path = _resolve(folder, target)
        if is_device(path):
            return _worst(f"overwrites the device {path}")
        if any(re.fullmatch(pattern, path) for pattern in HOST_CONTROLS):
            return _worst(f"writes to a control of the host's kernel ({path})")
        if path.startswith((*SYSTEM_FOLDERS, "/dev/")) and not _is_harmless_device(path):
            worst = _bad(f"writes to {path}")
    return worst


def _permissions(command: Command, folder: str) -> Danger:
    if command.program not in ("chmod", "chown", "chgrp"):
        return NO_DANGER
    flags, operands = split_flags(command)
    is_recursive = _has_short(flags, "R") or _has_long(flags, "--recursive", 3)
    if is_recursive and any(is_whole_tree(word, folder) for word in operands[1:]):
        return _bad(f"changes rights or owners of a whole tree ({command.program})")
    mode = operands[0].text if operands else ""
    if command.program == "chmod" and is_recursive and any(_BAD_MODE.fullmatch(part) for part in mode.split(",")):
        return _bad("lets everybody write to a folder and all that is in it")
    if command.program == "chmod" and any(_SET_ID_MODE.fullmatch(part) for part in mode.split(",")):
        return _bad("makes a program run with its owner's rights")
    return NO_DANGER


def _killing(command: Command, folder: str) -> Danger:
    if command.program == "kill" and "-1" in command.argv[2:] and "-l" not in command.argv:
        return _bad("signals every process")
    return NO_DANGER


def _tabled(command: Command, folder: str) -> Danger:
    reason = DANGEROUS_PROGRAMS.get(command.program)
    return _bad(reason) if reason else NO_DANGER


def _subcommand(command: Command, folder: str) -> Danger:
    """`git push --force`: a program, words in this order among its words, and, where there are some, one of the
    flags.
    """
    argv, own_program = command.argv, command.program
    for program, words, flags, reason in DANGEROUS_SUBCOMMANDS:
        if own_program != program or not _occur_in_order(words, argv[1:]):
            continue
        if not flags or any(_has_flag(argv[1:], flag) for flag in flags):
            return _bad(reason)
    if own_program == "git" and any("=!" in text or text.startswith("core.") for text in argv[1:]):
        return _bad("lets git run another program")
    return NO_DANGER


def _fed(command: Command, folder: str) -> Danger:
    """`curl ... | python`: an interpreter runs what was fetched or decoded. For shells that is opaque anyway."""
    reads_program = len(command.words) == 1 or any(text in ("-", "/dev/stdin") for text in command.argv[1:])
    is_interpreter = command.program.rstrip("0123456789.") in INTERPRETERS
    if is_interpreter and reads_program and any(source in DECODERS for source in command.fed_by):
        return _bad("runs what another command fetches or decodes")
    return NO_DANGER


_CHECKS: tuple[Callable[[Command, str], Danger], ...] = (
    _fork_bomb,
    _finding,
    _moving,
    _device,
    _written,
    _permissions,
    _killing,
    _subcommand,
    _fed,
    _tabled,
)


def is_whole_tree(word: Word, folder: str = "") -> bool:
    """Whether the word names the root, a home or a system folder, or all that is in one; of a brace list any member
    may.
    """
    return any(_is_whole_tree(path, word.is_pattern, folder) for path in _members(word)[:MAX_MEMBERS])


def _members(word: Word) -> list[str]:
    """The words that a brace list stands for, one more than MAX_MEMBERS at most; any other word as it is."""
    braces = _ONE_BRACE_LIST.fullmatch(word.text) if word.is_pattern else None
    if braces is None:
        return [word.text]
    before, members, after = braces.groups()
    return [before + member + after for member in members.split(",", MAX_MEMBERS)]


def _is_whole_tree(path: str, is_pattern: bool, folder: str) -> bool:
    if is_pattern:
        path = _without_globs(path)
    path = _resolve(folder, path)
    return "/" + path.lstrip("/") in WHOLE_TREES if path.startswith("/") else path in WHOLE_TREES


def _without_globs(path: str) -> str:
    """The folder that is left when the path's last parts name whatever is there (`/etc/*`)."""
    parts = path.split("/")
    while parts and (not parts[-1] or (_GLOB_ONLY.fullmatch(parts[-1]) and parts[-1] not in (".", ".."))):
        parts.pop()
    return "/".join(parts) or ("/" if path.startswith("/") else ".")


def _is_own_name(word: Word, is_at_home: bool) -> bool:
    """Whether the word names something below OWN_FOLDERS for certain. One of them as a whole, or whatever is in it, is
    no name.
    """
    members = _members(word)
    if word.is_expanded or len(members) > MAX_MEMBERS:
        return False
    return all(_is_own_path(path, word.is_pattern, is_at_home) for path in members)


def _is_own_path(path: str, is_pattern: bool, is_at_home: bool) -> bool:
    parts = path.split("/")
    if ".." in parts or posixpath.normpath(path) == "." or path.startswith(("$HOME", "~")):
        return False
    if path.startswith("/"):
        root = next((own for own in OWN_FOLDERS if path.startswith(own + "/")), "")
        parts = [part for part in path.removeprefix(root).split("/") if part not in ("", ".")]
        if not root or not parts:
            return False
    elif not is_at_home:
        return False
    return not is_pattern or _names_something(parts)


def _names_something(parts: list[str]) -> bool:
    """Whether a pattern holds a name (`*.o`, `build/*`, no `*`) and no part of it may become `..`."""
    named = [_NAMED.search(_BRACKETS.sub("", part)) is not None for part in parts]
    if any(
        "{" in part or (part.startswith(".") and part != "." and not is_named)
        for part, is_named in zip(parts, named, strict=True)
    ):
        return False
    return any(named)


def _is_own(folder: str) -> bool:
    return any(folder == own or folder.startswith(own + "/") for own in OWN_FOLDERS)


def _may_leave(command: Command) -> bool:
    """Whether it may lead out of OWN_FOLDERS: `cd` anywhere but to a name below them, another machine, another folder
    for one command.
    """
    if any(text.startswith("CDPATH=") for text in (*command.assignments, *command.argv)):
        return True
    if command.program in ("cd", "pushd"):
        operands = split_flags(command)[1]
        if len(operands) != 1 or operands[0].text == "-":
            return True
        return operands[0].text not in OWN_FOLDERS and not _is_own_name(operands[0], is_at_home=True)
    if command.program == "env":
        return any(
            text.startswith("--chdir") or (text[:1] == "-" and text[1:2] != "-" and "C" in text)
            for text in command.argv[1:]
        )
    return command.program in ("popd", "ssh")


def is_device(path: str) -> bool:
    """Whether a path is a device that stores something; /dev/null and terminals are not."""
    path = posixpath.normpath(path)
    return path.startswith("/dev/") and not _is_harmless_device(path)


def split_flags(command: Command) -> tuple[list[str], list[Word]]:
    """Options anywhere before `--`, as GNU programs take them, and the other words."""
    flags: list[str] = []
    operands: list[Word] = []
    words = command.words[1:]
    for index, word in enumerate(words):
        if word.text == "--":
            operands.extend(words[index + 1 :])
            break
        if word.text.startswith("-") and len(word.text) > 1:
            flags.append(word.text)
        else:
            operands.append(word)
    return flags, operands


def _is_harmless_device(path: str) -> bool:
    return path in HARMLESS_DEVICES or any(path.startswith(harmless + "/") for harmless in HARMLESS_DEVICES)


def _resolve(folder: str, path: str) -> str:
    return posixpath.normpath(path if path.startswith(("$HOME", "~")) else posixpath.join(folder, path))


def _has_short(flags: list[str], letters: str) -> bool:
    return any(not flag.startswith("--") and any(letter in flag for letter in letters) for flag in flags)


def _has_long(flags: list[str], name: str, least: int) -> bool:
    """GNU takes any unambiguous beginning of a long option."""
    return any(
        flag.startswith("--") and len(flag) >= least and name.startswith(flag.partition("=")[0]) for flag in flags
    )


def _has_flag(words: tuple[str, ...], flag: str) -> bool:
    if flag in HOSTILE_FLAGS:
        return any(word.startswith(flag) and len(word) > 1 for word in words)
    if flag.startswith("--"):
        return any(word.partition("=")[0] == flag for word in words)
    return any(word.startswith("-") and not word.startswith("--") and flag[1] in word for word in words)


def _occur_in_order(wanted: tuple[str, ...], words: tuple[str, ...]) -> bool:
    rest = iter(words)
    return all(word in rest for word in wanted)
