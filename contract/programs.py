"""Command lines of toolcrew's own programs."""

import sys


def program(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a toolcrew program. The option -P of Python removes the current folder from the import
    path, because the folder may contain any package.
    """
    return (sys.executable, "-P", "-m", module, *arguments)
