"""Has the ledger know of the calls that run here, also when Redis has forgotten that they were claimed."""

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
"""What Redis has known for so long is on its disk (`appendfsync everysec`)."""
LOOK_S = 0.5


class HeldCalls:
    """The calls that run in this process. A thread, while there are any, makes sure of each claim once, when it can no
    more be forgotten: else one whose record reads `queued` again would be told as never run at its deadline, and its
    cancel would not reach it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unsure: dict[object, tuple[float, Callable[[], object]]] = {}
        self._lock = threading.Lock()
        self._thread_of: int | None = None

    @contextmanager
    def over(self, confirm: Callable[[], object]) -> Iterator[None]:
        """While the block runs. `confirm`: claims again, whatever was claimed before. Raises BrokerUnavailable, and
        then is called again.
        """
        mark = object()
        with self._lock:
            self._unsure[mark] = self._clock() + SURE_AFTER_S, confirm
            self._start()
        try:
            yield
        finally:
            self._unsure.pop(mark, None)

    def look(self) -> None:
        """Make sure of all that is due."""
        # One step of the interpreter: other threads begin and end calls.
        for mark, (due, confirm) in list(self._unsure.items()):
            if self._clock() < due:
                continue
            try:
                confirm()
            except BrokerUnavailable as error:
                log.warning("claims_not_confirmed", error=str(error))
                return
            self._unsure.pop(mark, None)

    def _start(self) -> None:
        """A process of the pool has none of its parent's threads."""
        if self._thread_of != os.getpid():
            self._thread_of = os.getpid()
            threading.Thread(target=self._run, name="held-calls", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                if not self._unsure:
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
