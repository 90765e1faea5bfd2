"""Whether a rule's words are about a call's command: asked for approvals, and for what a tenant may never run."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from contract.shell.commands import SHELLS, Script, parse_commands
from contract.shell.shell_reader import Word
from contract.specs import ToolSpec

MAX_TALK_CHARS = 4096
"""Text for a running program that is longer than this must be readable as commands, or cannot be told."""


def read_command(spec: ToolSpec, arguments: Mapping[str, Any]) -> Script | None:
    """The commands of a call, those that a shell may read from its standard input included; None when its tool takes
    none.

    A list is read as one command's words; anything else cannot be told.
    """
    if spec.command_parameter is None:
        return None
    properties = spec.parameters.get("properties")
    if not isinstance(properties, dict) or spec.command_parameter not in properties:
        # A misspelt name must not turn the checks off.
        return Script("", opaque="its tool names a command parameter that it does not have")
    given = arguments.get(spec.command_parameter, "")
    if isinstance(given, str):
        return _with_input(
            parse_commands(given), arguments.get(spec.input_parameter) if spec.input_parameter is not None else None
        )
    if isinstance(given, Sequence) and all(isinstance(word, str) for word in given):
        return parse_commands(shlex.join(given))
    return Script("", opaque="it is not text")


def touches(argv_prefix: Sequence[str], script: Script | None) -> bool:
    """Whether any command of the call begins with these words, or may: what a rule that forbids or asks is about. No
    words: any call.
    """
    if not argv_prefix:
        return True
    if script is None:
        return False
    if script.is_opaque and all(_stands_in(word, script.text) for word in argv_prefix):
        return True
    return any(_may_begin(command.words, argv_prefix) for command in script.commands)


def _with_input(script: Script, text: object) -> Script:
    """And what is sent to a shell that it starts or, when it starts nothing, to a program that runs already, which may
    be one.
    """
    if not isinstance(text, str) or (script.text and not any(command.program in SHELLS for command in script.commands)):
        return script
    sent = parse_commands(text)
    # A line for any program that talks is no shell's text, most often: then only what reads as a command counts.
    is_talk = not script.text and len(text) <= MAX_TALK_CHARS
    return replace(
        script, commands=script.commands + sent.commands, opaque=script.opaque or ("" if is_talk else sent.opaque)
    )


def _stands_in(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def _may_begin(words: Sequence[Word], prefix: Sequence[str]) -> bool:
    if not words or not _is_program(words[0], prefix[0]):
        return False
    index, end = 1, len(words)
    while True:
        found = words[index : index + len(prefix) - 1]
        if len(found) == len(prefix) - 1 and all(
            _may_be(word, wanted) for word, wanted in zip(found, prefix[1:], strict=True)
        ):
            return True
        # Options, and the one word that may be an option's value, do not hide what follows.
        if index >= end or not (
            words[index].text.startswith("-") or (index > 1 and words[index - 1].text.startswith("-"))
        ):
            return False
        index += 1


def _is_program(word: Word, wanted: str) -> bool:
    return word.text == wanted or ("/" not in wanted and word.text.rpartition("/")[2] == wanted)


def _may_be(word: Word, wanted: str) -> bool:
    return word.text == wanted or word.is_expanded or word.is_pattern
