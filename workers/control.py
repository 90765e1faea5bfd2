"""What must not wait behind the calls of a busy pool: cancels and closes, read from a list of the host's own and obeyed at once."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from contract.calls import ToolCall, ToolContext
from contract.envelope import decode_call
from contract.errors import BrokerUnavailable, EnvelopeRefused, RefusalReason, ToolcrewError
from contract.hosts import DRAIN_ORDER
from contract.signing import SigningKeys
from store.hosts import WorkerControlStore
from workers.sandbox_client import SandboxClient, sandbox_id

log = structlog.get_logger(__name__)

WAIT_S = 1
"""How long one BRPOP waits, and so about how long `stop` takes when Redis is away."""
STOP_S = 5.0
RETRY_S = 1.0
MAX_AT_ONCE = 32
"""Closing takes the engine seconds: one does not hold up the next."""


class ControlReader:
    """A thread of the worker's parent process that reads control lists and has every order in them obeyed at once, side by side.

    An item is a signed envelope of one of `verbs`, or of the order to drain this very worker (`serve_drain`), the first of `queues`. No result is
    stored. Anything else is logged and dropped, and `on_refused` is told why.
    """

    verbs: frozenset[str] = frozenset()
    needs_session = True

    def __init__(
        self,
        orders: WorkerControlStore,
        queues: Sequence[str],
        key: SigningKeys,
        clock: Callable[[], float] = time.time,
        on_refused: Callable[[RefusalReason], None] | None = None,
    ) -> None:
        self._orders = orders
        self._on_refused = on_refused
        self._own, self._queues = queues[0], tuple(queues)
        self._drain: Callable[[bool], bool] | None = None
        self._key = key
        self._clock = clock
        self._stop = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def serve_drain(self, drain: Callable[[bool], bool]) -> None:
        """Obey orders to take this worker out of service. `drain` gets whether files may be lost, and gives whether it has begun."""
        self._drain = drain

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; what is being obeyed goes on."""
        self._stop.set()
        # Wakes the thread. No other worker reads this worker's own list.
        with contextlib.suppress(BrokerUnavailable):
            self._orders.wake(self._own, 1 + WAIT_S)
        self._thread.join(timeout=STOP_S)

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        """Carry out one order, which came as `data`; whether there was something to do. Raises ToolcrewError."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                order = self._orders.take(self._queues, WAIT_S)
            except BrokerUnavailable as error:
                log.warning("control_not_read", error=str(error))
                self._stop.wait(RETRY_S)
                continue
            if order is not None:
                self._take(order)

    def _take(self, data: bytes) -> None:
        try:
            call, context = self._opened(data)
        except EnvelopeRefused as error:
            log.error("control_refused", reason=error.reason, error=str(error))
            if self._on_refused is not None:
                self._on_refused(error.reason)
            return
        self._slots.acquire()
        threading.Thread(target=self._obey, args=(call, context, data), name="control-call", daemon=True).start()

    def _opened(self, data: bytes) -> tuple[ToolCall, ToolContext]:
        """Raises EnvelopeRefused unless it is a signed order of ours that is not too late."""
        try:
            call, context = decode_call(data.decode(), self._key)
        except UnicodeDecodeError as error:
            raise EnvelopeRefused("envelope is not text") from error
        if call.name == DRAIN_ORDER and self._drain is not None:
            self._check_drain(call)
        elif call.name not in self.verbs:
            raise EnvelopeRefused(f"only {' and '.join(sorted(self.verbs))} are served here", "wrong_task")
        elif (context.session is None and self.needs_session) or (
            call.name == "session.cancel" and not isinstance(call.arguments.get("call_id"), str)
        ):
            raise EnvelopeRefused(f"{call.name} does not say which session or call it means")
        if self._clock() > context.deadline_at:
            raise EnvelopeRefused(f"{call.name} came past its deadline", "expired")
        return call, context

    def _check_drain(self, call: ToolCall) -> None:
        """An order for another worker may lie in a list that several read."""
        if call.arguments.get("queue") != self._own:
            raise EnvelopeRefused(f"the order to drain is not for {self._own}", "wrong_task")

    def _obey(self, call: ToolCall, context: ToolContext, data: bytes) -> None:
        try:
            if call.name == DRAIN_ORDER and self._drain is not None:
                is_done = self._drain(call.arguments.get("lossy") is True)
            else:
                is_done = self.obey(call, context, data)
            log.info("control_obeyed", verb=call.name, call=call.id, done=is_done)
        except ToolcrewError as error:
            log.error("control_failed", verb=call.name, call=call.id, error=str(error))
        finally:
            self._slots.release()


class CancelLedger(Protocol):
    """Who may start a call."""

    def forbid(self, tenant: str, call_id: str) -> bool: ...


class ControlListener(ControlReader):
    """Reads the control list of a host queue: `session.cancel` (argument `call_id`) and `session.close`.

    A cancelled call that still waits in the queue is forbidden, so that it never starts.
    """

    verbs = frozenset({"session.cancel", "session.close"})

    def __init__(
        self,
        orders: WorkerControlStore,
        open_sandboxd: Callable[[], SandboxClient],
        ledger: CancelLedger,
        queue: str,
        key: SigningKeys,
        clock: Callable[[], float] = time.time,
        on_refused: Callable[[RefusalReason], None] | None = None,
    ) -> None:
        super().__init__(orders, (queue,), key, clock, on_refused)
        self._open_sandboxd = open_sandboxd
        self._ledger = ledger

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        assert context.session is not None
        name = sandbox_id(context.tenant, context.session)
        with self._open_sandboxd() as client:
            if call.name == "session.close":
                return client.close(name)
            return self._cancel(client, name, context, str(call.arguments["call_id"]))

    def _cancel(self, client: SandboxClient, name: str, context: ToolContext, call_id: str) -> bool:
        """True when the call was running and is being killed, or had not started and never will."""
        if self._ledger.forbid(context.tenant, call_id):
            return True
        return client.cancel(name, call_id)
