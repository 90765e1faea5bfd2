"""Confirms the claims of calls that run here, in case Redis has forgotten them."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from contract.errors import BrokerUnavailable
from store.calls import WorkerCallStore
from workers.executor import CallMiddleware
from workers.tools.base import Outcome, ToolEnvironment

log = structlog.get_logger(__name__)

SURE_AFTER_S = 2.5
"""After so long a claim is on Redis's disk (`appendfsync everysec`)."""
LOOK_S = 0.5


class HeldCalls:
    """The calls that run in this process. While there are any, a thread confirms each claim once, when Redis can no
    longer forget it.

    Without that, a call whose record reads `queued` again would be reported as never run at its deadline, and a cancel
    would not reach it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unconfirmed: dict[object, tuple[float, Callable[[], object]]] = {}
        self._lock = threading.Lock()
        self._thread_of: int | None = None

    @contextmanager
    def over(self, confirm: Callable[[], object]) -> Iterator[None]:
        """Hold a call while the block runs. `confirm` claims it again; when it raises BrokerUnavailable it is called
        again.
        """
        mark = object()
        with self._lock:
            self._unconfirmed[mark] = self._clock() + SURE_AFTER_S, confirm
            self._start()
        try:
            yield
        finally:
            self._unconfirmed.pop(mark, None)

    def look(self) -> None:
        """Confirm all claims that are due."""
        # One step of the interpreter: other threads begin and end calls.
        for mark, (due, confirm) in list(self._unconfirmed.items()):
            if self._clock() < due:
                continue
            try:
                confirm()
            except BrokerUnavailable as error:
                log.warning("claims_not_confirmed", error=str(error))
                return
            self._unconfirmed.pop(mark, None)

    def _start(self) -> None:
        """Start the thread, also in a process of a pool, which has none of its parent's threads."""
        if self._thread_of != os.getpid():
            self._thread_of = os.getpid()
            threading.Thread(target=self._run, name="held-calls", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                if not self._unconfirmed:
                    self._thread_of = None
                    return
            self.look()


class ClaimConfirmation(CallMiddleware):
    """Confirms the claims of an executor's calls. `held`: shared by all executors of a process."""

    def __init__(self, held: HeldCalls, claims: WorkerCallStore, holder: str) -> None:
        self._held = held
        self._claims = claims
        self._holder = holder

    def run(self, environment: ToolEnvironment, handler: Callable[[], Outcome]) -> Outcome:
        with self._held.over(lambda: self._claims.confirm(environment.call, environment.context, self._holder)):
            return handler()
