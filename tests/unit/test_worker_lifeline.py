"""An orphan that ignores the request to end is killed after its grace period. A signal alone sets no limit, and
neither does a parent that did not ask for one.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from orchestrator.operations.supervision import die_with_supervisor
from tests.stack import read_line

GRACE_S = 0.3
LONG_S = 4 * GRACE_S

CHILD = f"""
import os, signal
from workers.lifeline import hold_lifeline
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
hold_lifeline({GRACE_S})
os.write(1, b"%d\\n" % os.getpid())
while True:
    signal.pause()
"""

KEEPER = """
import os, signal, subprocess, sys
from functools import partial
from orchestrator.operations.supervision import die_with_supervisor
wish = partial(die_with_supervisor, os.getpid(), signal.SIGTERM) if sys.argv[2] == "bound" else None
subprocess.Popen([sys.executable, "-c", sys.argv[1]], preexec_fn=wish).wait()
"""


class Family:
    """A keeper and its child. The child answers SIGTERM with a line and continues. Their stdout is open while either
    of them lives.
    """

    def __init__(self, keeper: "subprocess.Popen[bytes]") -> None:
        self.keeper = keeper
        self.child = int(read_line(keeper))

    def hears_within(self, seconds: float) -> bool:
        """Return whether a line, or the end, can be read within the time."""
        return bool(select.select([self.keeper.stdout], [], [], seconds)[0])


@contextlib.contextmanager
def open_family(wish: str) -> Iterator[Family]:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, CHILD, wish], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        yield Family(keeper)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.communicate()


def test_an_orphan_that_does_not_end_when_asked_is_killed_after_its_grace() -> None:
    with open_family("bound") as family:
        family.keeper.kill()

        assert read_line(family.keeper) == b"asked\n"
        assert family.hears_within(30)
        assert read_line(family.keeper) == b"", "the child has ended"


def test_a_process_instructed_to_end_while_its_keeper_lives_takes_its_time() -> None:
    with open_family("bound") as family:
        os.kill(family.child, signal.SIGTERM)

        assert read_line(family.keeper) == b"asked\n"
        assert not family.hears_within(LONG_S)


def test_a_process_that_was_not_to_die_with_its_parent_outlives_it() -> None:
    with open_family("free") as family:
        family.keeper.kill()

        assert not family.hears_within(LONG_S)


def test_a_child_whose_keeper_died_before_it_could_make_its_wish_does_not_start() -> None:
    parent = os.getppid()

    done = subprocess.run(
        [sys.executable, "-c", "print('started')"],
        preexec_fn=partial(die_with_supervisor, parent, signal.SIGTERM),
        capture_output=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, b"")
