"""What bash_tool refuses, whoever asks and whoever has approved. A seat belt: the sandbox is the wall."""

import posixpath

from contract.errors import ErrorCode, ToolFailure
from contract.shell.commands import Script, parse_commands
from contract.shell.dangers import Level, classify
from contract.shell.wrappers import SHELLS

_HOME = "/workspace"


def refuse_catastrophe(command: str, cwd: str | None = None, stdin: str = "") -> None:
    """Raises ToolFailure(SECURITY_REFUSED). `stdin` is read as a script, too, when the command starts a shell."""
    folder = posixpath.normpath(posixpath.join(_HOME, cwd or ""))
    script = parse_commands(command)
    _refuse(script, folder, "the command")
    if stdin and any(part.program in SHELLS for part in script.commands):
        refuse_input(stdin, folder)


def refuse_input(text: str, folder: str = _HOME) -> None:
    """Text for a shell that runs already. Raises ToolFailure(SECURITY_REFUSED)."""
    _refuse(parse_commands(text), folder, "the input for a shell")


def _refuse(script: Script, folder: str, what: str) -> None:
    danger = classify(script, folder)
    if danger.level >= Level.CATASTROPHIC:
        raise ToolFailure(
            ErrorCode.SECURITY_REFUSED,
            f"{what} was not run: it {danger.reason}; no approval changes that, do what you need in a narrower way",
            reason=danger.reason,
        )
