"""Bounds the end of a process whose keeper is gone: asked by a signal at once, killed after a grace."""

import ctypes
import os
import select
import signal
import threading
import time

_PR_GET_PDEATHSIG = 2


def hold_lifeline(grace_s: float) -> None:
    """If this process was started to die with its parent (PR_SET_PDEATHSIG), have a thread kill it `grace_s` after that
    has gone.

    The kernel's signal asks for an orderly end. That may wait for what went with the keeper: a result for Redis is
    tried again for minutes, an engine that does not answer is waited for. A signal from anybody else bounds nothing:
    the worker of a pool finishes its calls. The processes of Celery's pool die with their worker at once, as Celery
    asks the kernel.
    """
    if not _dies_with_parent():
        return
    # Not by its number, which may be another's one day. A keeper that died before this line has ended us with its
    # signal.
    keeper = os.pidfd_open(os.getppid())
    threading.Thread(target=_outlive, args=(keeper, grace_s), name="lifeline", daemon=True).start()


def _outlive(keeper: int, grace_s: float) -> None:
    watched = select.poll()
    watched.register(keeper, select.POLLIN)
    watched.poll()
    time.sleep(grace_s)
    # Says nothing: whoever is stuck may hold the lock of the log.
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_with_parent() -> bool:
    number = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value != 0
