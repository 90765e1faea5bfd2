"""Match of command rules against the command of a call, for approvals and for commands that a tenant may never run."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolcrew.contract.shell.commands import SHELLS, ShellScript, parse_commands
from toolcrew.contract.shell.shell_reader import Word
from toolcrew.contract.specs import ToolSpec

MAX_PLAIN_INPUT_CHARS = 4096
"""Limit, in characters, of text sent to a running program that may count as plain text and not as shell commands.
Longer text that cannot be parsed as commands counts as opaque (it may contain any command).
"""


def read_command(spec: ToolSpec, arguments: Mapping[str, Any]) -> ShellScript | None:
    """Return the commands of a call, including those that a shell may read from its standard input. Return None if the
    tool takes no command.

    A list is read as the words of one command. Any other value counts as opaque: it may contain any command.
    """
    if spec.command_parameter is None:
        return None
    properties = spec.parameters.get("properties")
    if not isinstance(properties, dict) or spec.command_parameter not in properties:
        # A misspelt name must not turn the checks off.
        return ShellScript("", opaque="its tool names a command parameter that it does not have")
    value = arguments.get(spec.command_parameter, "")
    if isinstance(value, str):
        return _add_input_commands(
            parse_commands(value), arguments.get(spec.input_parameter) if spec.input_parameter is not None else None
        )
    if isinstance(value, Sequence) and all(isinstance(word, str) for word in value):
        return parse_commands(shlex.join(value))
    return ShellScript("", opaque="it is not text")


def matches_command(argv_prefix: Sequence[str], script: ShellScript | None) -> bool:
    """Return whether a rule with these words matches a call: whether any of its commands begins with the words, or may
    begin with them. Without words, the rule matches every call.
    """
    if not argv_prefix:
        return True
    if script is None:
        return False
    if script.is_opaque and all(_contains_word(word, script.text) for word in argv_prefix):
        return True
    return any(_may_start_with(command.words, argv_prefix) for command in script.commands)


def _add_input_commands(script: ShellScript, text: object) -> ShellScript:
    """Return the script with the commands in its standard input. The input counts if the script starts a shell, or if
    there is no script: then a running program receives it, which may be a shell.
    """
    if not isinstance(text, str) or (script.text and not any(command.program in SHELLS for command in script.commands)):
        return script
    input_script = parse_commands(text)
    # A short line for a running program is usually not a shell command. Then only parts that are commands count.
    is_plain_text = not script.text and len(text) <= MAX_PLAIN_INPUT_CHARS
    return replace(
        script,
        commands=script.commands + input_script.commands,
        opaque=script.opaque or ("" if is_plain_text else input_script.opaque),
    )


def _contains_word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def _may_start_with(words: Sequence[Word], prefix: Sequence[str]) -> bool:
    if not words or not _is_program(words[0], prefix[0]):
        return False
    index, end = 1, len(words)
    while True:
        candidates = words[index : index + len(prefix) - 1]
        if len(candidates) == len(prefix) - 1 and all(
            _may_equal(word, expected) for word, expected in zip(candidates, prefix[1:], strict=True)
        ):
            return True
        # Skip options and a word that may be the value of an option, so that they cannot hide a subcommand.
        if index >= end or not (
            words[index].text.startswith("-") or (index > 1 and words[index - 1].text.startswith("-"))
        ):
            return False
        index += 1


def _is_program(word: Word, name: str) -> bool:
    return word.text == name or ("/" not in name and word.text.rpartition("/")[2] == name)


def _may_equal(word: Word, text: str) -> bool:
    return word.text == text or word.is_expanded or word.is_pattern
