"""A bash command line as the programs it would run, as far as its text alone tells. It runs nothing and knows no danger.

This is a reader for seat belts, not a bash: what it cannot tell makes the script opaque, never harmless. In doubt it names a command too many.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from contract.shell.shell_reader import Draft, Word, read_script
from contract.shell.wrappers import FEEDING, Nested, find_nested

MAX_COMMAND_CHARS = 256 * 1024
"""Longer texts are not read at all: they are opaque."""
MAX_DEPTH = 12
"""`bash -c` in `sudo` in `eval` and so on; deeper is opaque."""
MAX_PIECES = 256
"""Texts inside texts, and their characters together; more is opaque, so that reading takes no longer than the text is long."""
MAX_SOURCES = 8

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]]*\])?\+?=")
_COPY_OF_DESCRIPTOR = re.compile(r"\d*-?")


@dataclass(frozen=True)
class Command:
    """One simple command. `assignments`: those before it. `outputs`: files that its redirections write.

    `stdin`: its here-document or here-string. `fed_by`: programs before it in its pipeline, the nearest first; `reads_pipe` tells
    whether there is any. `function`: the function in whose body it stands. `is_concurrent`: it runs beside its neighbour (`|`, `&`).
    `is_fed`: it gets more words, or other ones, when it runs (`xargs`, `find -exec`).
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
    """It only starts another command of the script and adds no power of its own: timeout, nohup."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The words with quotes removed. Where a word is known only at run time, its text is what stands there (`$x`)."""
        return tuple(word.text for word in self.words)

    @property
    def program(self) -> str:
        """The first word without its folder, "" when there is none."""
        return self.words[0].text.rpartition("/")[2] if self.words else ""


@dataclass(frozen=True)
class Script:
    """All commands that `text` may run, those inside others (`sudo`, `bash -c`, `$(...)`) included; `opaque`: why there may be more."""

    text: str
    commands: tuple[Command, ...] = ()
    opaque: str = ""

    @property
    def is_opaque(self) -> bool:
        return bool(self.opaque)


def parse_commands(text: str) -> Script:
    """The commands of any text whatever. Never raises; time grows with the length of the text."""
    found: list[Command] = []
    opaque = ""
    waiting = [(text, 0, False)]
    pieces, characters = 0, 0
    while waiting and pieces < MAX_PIECES:
        piece, depth, is_fed = waiting.pop()
        pieces, characters = pieces + 1, characters + len(piece)
        if depth > MAX_DEPTH or len(piece) > MAX_COMMAND_CHARS or characters > 2 * MAX_COMMAND_CHARS:
            opaque = opaque or ("it is nested too deep" if depth else "it is too long to be read")
            continue
        commands, scripts, reason = _parse_piece(piece, depth, is_fed)
        found.extend(commands)
        # Pushed in reverse, so that they are read in the order in which they are written.
        waiting.extend(reversed(scripts))
        opaque = opaque or reason
    return Script(text, tuple(found), opaque or ("it is too long to be read" if waiting else ""))


def _parse_piece(text: str, depth: int, is_fed: bool) -> tuple[list[Command], list[tuple[str, int, bool]], str]:
    """The commands of one text, the texts that they would read as scripts (`is_fed`: parts of them known later), and why there may be more."""
    reading = read_script(text)
    commands: list[Command] = []
    scripts = [(piece, depth + 1, is_fed) for piece in reading.texts]
    opaque = reading.opaque
    for draft in reading.drafts:
        for command, nested, level in _unwrap(_finish(draft, is_fed), depth):
            commands.append(command)
            is_fed_inside = command.is_fed or command.program in FEEDING
            scripts.extend((script, level + 1, is_fed_inside) for script in nested.scripts)
            opaque = opaque or nested.opaque or _doubt(command)
    return commands, scripts, opaque


def _unwrap(command: Command, depth: int) -> Iterator[tuple[Command, Nested, int]]:
    """The command, and those that it would start."""
    waiting = [(command, depth)]
    while waiting:
        outer, level = waiting.pop()
        if level > MAX_DEPTH:
            yield outer, Nested(opaque="it is nested too deep"), level
            continue
        nested = find_nested(outer.words, outer.stdin)
        yield dataclasses.replace(outer, is_wrapper=True) if nested.is_transparent else outer, nested, level
        inner = dataclasses.replace(outer, outputs=(), assignments=(), is_fed=outer.is_fed or outer.program in FEEDING)
        waiting.extend((dataclasses.replace(inner, words=words), level + 1) for words in nested.commands)


def _doubt(command: Command) -> str:
    if not command.words or command.words[0].text in ("[", "[["):
        return ""
    first = command.words[0]
    return "which program it runs is known only when it runs" if first.is_expanded or first.is_pattern else ""


def _finish(draft: Draft, is_fed: bool) -> Command:
    words = draft.words
    start = 0
    while start < len(words) and _ASSIGNMENT.match(words[start].text):
        start += 1
    return Command(
        words=tuple(words[start:]),
        assignments=tuple(word.text for word in words[:start]),
        outputs=tuple(target for operator, target in draft.redirects if _writes_file(operator, target)),
        stdin=draft.stdin(),
        fed_by=tuple(_sources(draft)),
        reads_pipe=draft.source is not None,
        function=draft.function,
        is_concurrent=draft.source is not None or draft.operator in ("|", "|&", "&"),
        is_fed=is_fed,
    )


def _writes_file(operator: str, target: Word) -> bool:
    if operator == ">&":
        return _COPY_OF_DESCRIPTOR.fullmatch(target.text) is None
    return ">" in operator


def _sources(draft: Draft) -> Iterator[str]:
    source = draft.source
    for _ in range(MAX_SOURCES):
        if source is None:
            return
        name = next((word.text for word in source.words if not _ASSIGNMENT.match(word.text)), "")
        yield name.rpartition("/")[2]
        source = source.source
