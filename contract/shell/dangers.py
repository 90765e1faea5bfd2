"""Danger levels of commands: none, dangerous (a person decides) and catastrophic (refused, even with an approval).

The check prevents accidents and is not a security boundary. A program that is not in the tables, or a script in a file,
may do anything that its sandbox allows.
"""

import enum
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass

from toolcrew.contract.shell.commands import Command, ShellScript
from toolcrew.contract.shell.danger_tables import (
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
from toolcrew.contract.shell.shell_reader import Word


class Level(enum.IntEnum):
    """Danger level. Levels are ordered, and a script is as dangerous as its most dangerous command."""

    NONE = 0
    DANGEROUS = 1
    CATASTROPHIC = 2


@dataclass(frozen=True)
class Danger:
    """Danger of a command. `reason`: text that continues a sentence after "it", such as "removes branches"; "" if there
    is no danger.
    """

    level: Level = Level.NONE
    reason: str = ""


NO_DANGER = Danger()
MAX_MEMBERS = 64
MAX_PATH_CHARS = 4096
_ONE_BRACE_LIST = re.compile(r"([^{}]*)\{([^{}]*)\}([^{}]*)")
_GLOB_ONLY = re.compile(r"[*?.\[\]{},!^]+")
# Lookaheads find the required letters. Two adjacent repetitions would backtrack over every split of a long mode.
_BAD_MODE = re.compile(r"[0-7]?[0-7][0-7][2367]|(?:(?=[ug]*[ao])[augo]+)?[+=](?=[rxXst]*w)[rwxXst]*")
_SET_ID_MODE = re.compile(r"[2467][0-7]{3}|[augo]*[+=](?=[rwxXt]*s)[rwxXst]*")
_BRACKETS = re.compile(r"\[[^\]]*\]?")
_NAME_CHARACTER = re.compile(r"\w")
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


def classify(script: ShellScript, folder: str = "") -> Danger:
    """Return the highest danger of all commands. An opaque script is at least dangerous. `folder`: where the script
    starts; "" if unknown.
    """
    highest = Danger(Level.DANGEROUS, f"cannot be read whole: {script.opaque}") if script.is_opaque else NO_DANGER
    # Check the whole script: loops and functions may run a later `cd` first, and a `cd` that fails changes no folder.
    is_in_own_folder = _is_below_own_folders(folder) and not any(_may_leave(command) for command in script.commands)
    for command in script.commands:
        danger = classify_command(command, folder, is_in_own_folder=is_in_own_folder)
        # The first danger of a level is reported. A specific danger replaces "cannot be read".
        if danger.level > highest.level or (
            danger.level == highest.level and danger.reason and highest.reason.startswith("cannot be read")
        ):
            highest = danger
        if command.program in ("cd", "pushd"):
            operands = split_flags(command)[1]
            folder = _resolve(folder, operands[0].text if operands else "$HOME")[:MAX_PATH_CHARS]
    return highest


def classify_command(command: Command, folder: str = "", *, is_in_own_folder: bool = False) -> Danger:
    """Return the danger of one command. `folder`: the current folder after earlier `cd` commands; "" if unknown.
    `is_in_own_folder`: the command certainly runs below OWN_FOLDERS.
    """
    highest = _check_removal(command, folder, is_in_own_folder)
    for check in _CHECKS:
        danger = check(command, folder)
        if danger.level > highest.level:
            highest = danger
    return highest


def _build_dangerous(reason: str) -> Danger:
    return Danger(Level.DANGEROUS, reason)


def _build_catastrophic(reason: str) -> Danger:
    return Danger(Level.CATASTROPHIC, reason)


def _check_fork_bomb(command: Command, _folder: str) -> Danger:
    if command.function and command.is_concurrent and command.argv[:1] == (command.function,):
        return _build_catastrophic("is a fork bomb: a function that starts two copies of itself")
    return NO_DANGER


def _check_removal(command: Command, folder: str, is_in_own_folder: bool) -> Danger:
    if command.program != "rm":
        return NO_DANGER
    flags, operands = split_flags(command)
    if _has_long(flags, "--no-preserve-root", 5):
        return _build_catastrophic("removes the root of the file system")
    is_recursive = _has_short(flags, "rR") or _has_long(flags, "--recursive", 3)
    if is_recursive:
        for word in operands:
            if is_whole_tree(word, folder):
                return _build_catastrophic(f"removes everything under {word.text}")
    if operands and not command.is_fed and all(_is_own_name(word, is_in_own_folder) for word in operands):
        return NO_DANGER
    if is_recursive:
        return _build_dangerous("removes folders with their content")
    if _has_short(flags, "f") or _has_long(flags, "--force", 3):
        return _build_dangerous("removes files without asking")
    paths = [_resolve(folder, word.text) for word in operands]
    system_path = next((path for path in paths if path.startswith(SYSTEM_FOLDERS)), "")
    return _build_dangerous(f"removes {system_path}") if system_path else NO_DANGER


def _check_find(command: Command, folder: str) -> Danger:
    argv = command.argv
    if command.program != "find":
        return NO_DANGER
    if not _has_removing_action(argv):
        return NO_DANGER
    starts = []
    for word in command.words[1:]:
        if word.text.startswith(("-", "(", "!")):
            break
        starts.append(word)
    if any(is_whole_tree(word, folder) for word in starts) and not any(word in argv for word in _FILTERS):
        return _build_catastrophic("removes everything that it finds under a system folder")
    return _build_dangerous("removes every file that it finds")


def _has_removing_action(argv: tuple[str, ...]) -> bool:
    """Return whether an action of this `find` removes files. A word that belongs to a test, such as `rm` in `-name rm`,
    is not an action.
    """
    index = 1
    while index < len(argv):
        word = argv[index]
        if word == "-delete":
            return True
        if word in FIND_EXECUTES:
            end = next(
                (at for at in range(index + 1, len(argv)) if argv[at] == ";" or argv[at - 1 : at + 1] == ("{}", "+")),
                len(argv),
            )
            if any(part.rpartition("/")[2] in FIND_REMOVERS for part in argv[index + 1 : end]):
                return True
            index = end
        elif word in FIND_TESTS_WITH_VALUE or word.startswith("-newer"):
            index += 1
        elif word == "-fprintf":
            index += 2
        index += 1
    return False


def _check_move(command: Command, folder: str) -> Danger:
    if command.program == "mv" and any(is_whole_tree(word, folder) for word in split_flags(command)[1][:-1]):
        return _build_catastrophic("moves a system folder away")
    return NO_DANGER


def _check_device(command: Command, _folder: str) -> Danger:
    """Return the danger of programs that format or erase their target."""
    name = command.program
    if not (name in DEVICE_TOOLS or name.startswith("mkfs.")):
        return NO_DANGER
    for target in command.argv[1:]:
        if is_device(target):
            return _build_catastrophic(f"overwrites the device {target}")
    return _build_dangerous(f"formats or wipes a device or file ({name})")


def _check_written_files(command: Command, folder: str) -> Danger:
    """Return the danger of the files that redirections and writing programs would change."""
    targets = [word.text for word in command.outputs]
    operands = [text.removeprefix("of=") for text in command.argv[1:] if not text.startswith("-")]
    if command.program in WRITERS:
        targets += operands
    elif command.program in COPIERS:
        targets += operands[-1:]
    highest = NO_DANGER
    for target in targets:
        path = _resolve(folder, target)
        if is_device(path):
            return _build_catastrophic(f"overwrites the device {path}")
        if any(re.fullmatch(pattern, path) for pattern in HOST_CONTROLS):
            return _build_catastrophic(f"writes to a control of the host's kernel ({path})")
        if path.startswith((*SYSTEM_FOLDERS, "/dev/")) and not _is_harmless_device(path):
            highest = _build_dangerous(f"writes to {path}")
    return highest


def _check_permissions(command: Command, folder: str) -> Danger:
    if command.program not in ("chmod", "chown", "chgrp"):
        return NO_DANGER
    flags, operands = split_flags(command)
    is_recursive = _has_short(flags, "R") or _has_long(flags, "--recursive", 3)
    if is_recursive and any(is_whole_tree(word, folder) for word in operands[1:]):
        return _build_dangerous(f"changes permissions or owners of a system folder ({command.program})")
    mode = operands[0].text if operands else ""
    if command.program == "chmod" and is_recursive and any(_BAD_MODE.fullmatch(part) for part in mode.split(",")):
        return _build_dangerous("lets every user write to a folder and its content")
    if command.program == "chmod" and any(_SET_ID_MODE.fullmatch(part) for part in mode.split(",")):
        return _build_dangerous("makes a program run with its owner's rights")
    return NO_DANGER


def _check_kill(command: Command, _folder: str) -> Danger:
    if command.program == "kill" and "-1" in command.argv[2:] and "-l" not in command.argv:
        return _build_dangerous("signals every process")
    return NO_DANGER


def _check_known_program(command: Command, _folder: str) -> Danger:
    reason = DANGEROUS_PROGRAMS.get(command.program)
    return _build_dangerous(reason) if reason else NO_DANGER


def _check_subcommand(command: Command, _folder: str) -> Danger:
    """Return the danger of a subcommand such as `git push --force`: program, words in order, and one of the flags."""
    argv, own_program = command.argv, command.program
    for program, words, flags, reason in DANGEROUS_SUBCOMMANDS:
        if own_program != program or not _occur_in_order(words, argv[1:]):
            continue
        if not flags or any(_has_flag(argv[1:], flag) for flag in flags):
            return _build_dangerous(reason)
    if own_program == "git" and any("=!" in text or text.startswith("core.") for text in argv[1:]):
        return _build_dangerous("lets git run another program")
    return NO_DANGER


def _check_piped_input(command: Command, _folder: str) -> Danger:
    """Return the danger of an interpreter that runs fetched or decoded text (`curl ... | python`). Shells that read a
    pipe are already opaque.
    """
    reads_program = len(command.words) == 1 or any(text in ("-", "/dev/stdin") for text in command.argv[1:])
    is_interpreter = command.program.rstrip("0123456789.") in INTERPRETERS
    if is_interpreter and reads_program and any(source in DECODERS for source in command.fed_by):
        return _build_dangerous("runs what another command fetches or decodes")
    return NO_DANGER


_CHECKS: tuple[Callable[[Command, str], Danger], ...] = (
    _check_fork_bomb,
    _check_find,
    _check_move,
    _check_device,
    _check_written_files,
    _check_permissions,
    _check_kill,
    _check_subcommand,
    _check_piped_input,
    _check_known_program,
)


def is_whole_tree(word: Word, folder: str = "") -> bool:
    """Return whether the word names the root, a home or system folder, or all content of one. For a brace list, one
    such member is enough.
    """
    return any(_is_whole_tree(path, word.is_pattern, folder) for path in _expand_braces(word)[:MAX_MEMBERS])


def _expand_braces(word: Word) -> list[str]:
    """Return the words of a brace list, at most MAX_MEMBERS + 1; any other word unchanged."""
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
    """Return the path without its last parts that match any name (`/etc/*` -> `/etc`)."""
    parts = path.split("/")
    while parts and (not parts[-1] or (_GLOB_ONLY.fullmatch(parts[-1]) and parts[-1] not in (".", ".."))):
        parts.pop()
    return "/".join(parts) or ("/" if path.startswith("/") else ".")


def _is_own_name(word: Word, is_in_own_folder: bool) -> bool:
    """Return whether the word certainly names a file below OWN_FOLDERS. One of these folders itself, or a pattern for
    all its content, does not count.
    """
    members = _expand_braces(word)
    if word.is_expanded or len(members) > MAX_MEMBERS:
        return False
    return all(_is_own_path(path, word.is_pattern, is_in_own_folder) for path in members)


def _is_own_path(path: str, is_pattern: bool, is_in_own_folder: bool) -> bool:
    parts = path.split("/")
    if ".." in parts or posixpath.normpath(path) == "." or path.startswith(("$HOME", "~")):
        return False
    if path.startswith("/"):
        root = next((own_folder for own_folder in OWN_FOLDERS if path.startswith(own_folder + "/")), "")
        parts = [part for part in path.removeprefix(root).split("/") if part not in ("", ".")]
        if not root or not parts:
            return False
    elif not is_in_own_folder:
        return False
    return not is_pattern or _has_name(parts)


def _has_name(parts: list[str]) -> bool:
    """Return whether a pattern contains a name (`*.o` or `build/*`, but not `*`) and no part of it can match `..`."""
    named_parts = [_NAME_CHARACTER.search(_BRACKETS.sub("", part)) is not None for part in parts]
    if any(
        "{" in part or (part.startswith(".") and part != "." and not is_named)
        for part, is_named in zip(parts, named_parts, strict=True)
    ):
        return False
    return any(named_parts)


def _is_below_own_folders(folder: str) -> bool:
    return any(folder == own_folder or folder.startswith(own_folder + "/") for own_folder in OWN_FOLDERS)


def _may_leave(command: Command) -> bool:
    """Return whether a command may run later commands outside OWN_FOLDERS: `cd` to anything but a name below them,
    another machine, or another folder for one command.
    """
    if any(text.startswith("CDPATH=") for text in (*command.assignments, *command.argv)):
        return True
    if command.program in ("cd", "pushd"):
        operands = split_flags(command)[1]
        if len(operands) != 1 or operands[0].text == "-":
            return True
        return operands[0].text not in OWN_FOLDERS and not _is_own_name(operands[0], is_in_own_folder=True)
    if command.program == "env":
        return any(
            text.startswith("--chdir") or (text[:1] == "-" and text[1:2] != "-" and "C" in text)
            for text in command.argv[1:]
        )
    return command.program in ("popd", "ssh")


def is_device(path: str) -> bool:
    """Return whether a path is a device that stores data. /dev/null and terminals are not."""
    path = posixpath.normpath(path)
    return path.startswith("/dev/") and not _is_harmless_device(path)


def split_flags(command: Command) -> tuple[list[str], list[Word]]:
    """Return the options and the other words of a command. As in GNU programs, options may be anywhere before `--`."""
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


def _has_long(flags: list[str], name: str, min_chars: int) -> bool:
    # GNU programs accept any unambiguous prefix of a long option.
    return any(
        flag.startswith("--") and len(flag) >= min_chars and name.startswith(flag.partition("=")[0]) for flag in flags
    )


def _has_flag(words: tuple[str, ...], flag: str) -> bool:
    if flag in HOSTILE_FLAGS:
        return any(word.startswith(flag) and len(word) > 1 for word in words)
    if flag.startswith("--"):
        return any(word.partition("=")[0] == flag for word in words)
    return any(word.startswith("-") and not word.startswith("--") and flag[1] in word for word in words)


def _occur_in_order(expected: tuple[str, ...], words: tuple[str, ...]) -> bool:
    # `in` consumes the iterator, so each word is searched after the previous one.
    rest = iter(words)
    return all(word in rest for word in expected)
