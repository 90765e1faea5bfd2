"""Programs of the image that archives need, and the failure for an image without one of them."""

import re

from toolcrew.contract.errors import ErrorCode, ToolFailure

NOT_FOUND = 127
"""Exit code of a shell that found no program of that name."""
_MISSING = re.compile(
    r"(?:^|[\s/])([A-Za-z0-9_.+-]{1,64}): (?:command not found|not found|No such file or directory)\s*$", re.M
)
_OTHER_TAR = ("BusyBox", "unrecognized option", "invalid option", "unknown option", "is not supported")
"""Texts of a `tar` that is not GNU tar, about the options that archives use."""


def check_programs(code: object, stderr: str) -> None:
    """Raise ToolFailure(INVALID_ARGUMENTS) if the error output of a program says that the image lacks a program, or has
    another tar than GNU tar. `code`: exit code of the program.
    """
    missing = _MISSING.search(stderr) if code == NOT_FOUND else None
    if missing is not None:
        raise missing_program(missing[1])
    if code != 0 and any(text in stderr for text in _OTHER_TAR):
        raise missing_program("GNU tar")


def missing_program(name: str) -> ToolFailure:
    """Return the failure of an archive that needs a program that the image does not have."""
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"the image of the session has no {name}, which checkpoints, forks and copies of folders need: use an image "
        "with bash, GNU tar, find and coreutils",
    )
