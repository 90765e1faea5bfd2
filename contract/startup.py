"""Start of toolcrew's own programs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_program() -> Iterator[None]:
    """Import the modules of a program without garbage collection, and exclude them from all later collections.

    The modules live as long as the process. Otherwise Python searches their objects for garbage many times during the
    imports, and once more when the process ends. For a worker that starts and stops, this was 43 % of its processor
    time. A process that is forked later also shares more memory with its parent.

    Only for programs: a library does not change the garbage collector of the process that imports it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
