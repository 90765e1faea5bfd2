"""Local files that both clients write."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from toolcrew.contract.errors import ConfigError


@contextmanager
def open_whole(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `target` at the end of the block, and not if the block fails."""
    if target.exists() and not target.is_file():
        # A device or a pipe cannot be replaced.
        with target.open("wb") as out:
            yield out
        return
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as out:
            yield out
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def begin_again(out: IO[bytes]) -> None:
    """Remove what was written. Raises ConfigError for a file that has passed it on."""
    if not out.seekable():
        raise ConfigError("the file was changed while it was copied: copy it again")
    out.seek(0)
    out.truncate()
