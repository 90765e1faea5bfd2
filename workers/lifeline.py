"""Time limit for the shutdown of a process after its parent has died: the kernel sends a signal, then a thread kills
it.
"""

import ctypes
import os
import select
import signal
import threading
import time

_PR_GET_PDEATHSIG = 2


def hold_lifeline(grace_s: float) -> None:
    """Start a thread that kills this process `grace_s` seconds after its parent has died.

    Do nothing unless the process was started to die with its parent (PR_SET_PDEATHSIG): the kernel then sends a signal
    that asks for an orderly shutdown. This shutdown may wait long for services that died with the parent, such as Redis
    or the Docker engine. After a signal from another process there is no time limit, because a worker must finish its
    calls. Celery's pool processes die with their worker at once, because Celery asks the kernel for that.
    """
    if not _dies_with_parent():
        return
    # A pidfd, not a process id: the kernel may reuse the id. If the parent died before this line, the kernel's signal
    # has already ended this process.
    parent = os.pidfd_open(os.getppid())
    threading.Thread(target=_kill_after_parent, args=(parent, grace_s), name="lifeline", daemon=True).start()


def _kill_after_parent(parent: int, grace_s: float) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    time.sleep(grace_s)
    # Write no log line: another thread may hang while it holds the lock of the log.
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_with_parent() -> bool:
    number = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value != 0
