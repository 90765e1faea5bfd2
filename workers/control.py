"""What must not wait behind the calls of a busy pool: cancels and closes, read from a list of the host's own and obeyed
at once.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from contract.calls import ToolCall, ToolContext
from contract.envelope import decode_call
from contract.errors import BrokerUnavailable, EnvelopeRefused, RefusalReason, ToolcrewError
from contract.hosts import DRAIN_ORDER, holder_name
from contract.signing import SigningKeys
from store.hosts import WorkerControlStore
from workers.interrupts import END_SIGNAL, CancelBoard
from workers.sandbox_client import SandboxClient, sandbox_id

log = structlog.get_logger(__name__)

WAIT_S = 1
"""How long one BRPOP waits, and so about how long `stop` takes when Redis is away."""
STOP_S = 5.0
RETRY_S = 1.0
MAX_AT_ONCE = 32
"""Closing takes the engine seconds: one does not hold up the next."""
_HOLDER = re.compile(r"(pool\.[^/\s]{1,128})/([1-9][0-9]{0,9})")
"""As `process_holder` writes it. It comes from Redis: it may only name a worker of ours, and a process."""


class OrderHandler(Protocol):
    """Obeys the orders of one kind of worker: those of `verbs`."""

    verbs: frozenset[str]
    needs_session: bool

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        """Carry out one order, which came as `data`; return whether there was something to do. Raises ToolcrewError."""
        ...


class ControlListener:
    """A thread of the worker's parent process that reads control lists and has every order in them obeyed at once, side
    by side.

    An item is a signed envelope of one of the handler's verbs, or of the order to drain this very worker, the first of
    `queues`. No result is stored. Anything else is logged and dropped, and `on_refused` gets the reason. `drain` gets
    whether files may be lost, and returns whether it has begun.
    """

    def __init__(
        self,
        orders: WorkerControlStore,
        queues: Sequence[str],
        key: SigningKeys,
        handler: OrderHandler,
        drain: Callable[[bool], bool],
        clock: Callable[[], float] = time.time,
        on_refused: Callable[[RefusalReason], None] = lambda reason: None,
    ) -> None:
        self._orders = orders
        self._own, self._queues = queues[0], tuple(queues)
        self._key = key
        self._handler = handler
        self._drain = drain
        self._clock = clock
        self._on_refused = on_refused
        self._stop = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; what is being obeyed goes on."""
        self._stop.set()
        # Wakes the thread. No other worker reads this worker's own list.
        with contextlib.suppress(BrokerUnavailable):
            self._orders.wake(self._own, 1 + WAIT_S)
        self._thread.join(timeout=STOP_S)

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
            call, context = self._decode(data)
        except EnvelopeRefused as error:
            log.error("control_refused", reason=error.reason, error=str(error))
            self._on_refused(error.reason)
            return
        self._slots.acquire()
        threading.Thread(target=self._obey, args=(call, context, data), name="control-call", daemon=True).start()

    def _decode(self, data: bytes) -> tuple[ToolCall, ToolContext]:
        """Raises EnvelopeRefused unless it is a signed order of ours that is not too late."""
        try:
            call, context = decode_call(data.decode(), self._key)
        except UnicodeDecodeError as error:
            raise EnvelopeRefused("envelope is not text") from error
        if call.name == DRAIN_ORDER:
            self._check_drain(call)
        elif call.name not in self._handler.verbs:
            raise EnvelopeRefused(f"only {' and '.join(sorted(self._handler.verbs))} are served here", "wrong_task")
        elif (context.session is None and self._handler.needs_session) or (
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
            if call.name == DRAIN_ORDER:
                is_done = self._drain(call.arguments.get("lossy") is True)
            else:
                is_done = self._handler.obey(call, context, data)
            log.info("control_obeyed", verb=call.name, call=call.id, done=is_done)
        except ToolcrewError as error:
            log.error("control_failed", verb=call.name, call=call.id, error=str(error))
        finally:
            self._slots.release()


class CancelLedger(Protocol):
    """Decides which calls may start, and knows which process runs each."""

    def forbid(self, tenant: str, call_id: str) -> bool: ...

    def holder(self, tenant: str, call_id: str) -> str | None: ...


class SandboxOrders:
    """`session.cancel` (argument `call_id`) and `session.close` of sessions of this host.

    A cancelled call that still waits in the queue is forbidden, so that it never starts.
    """

    verbs = frozenset({"session.cancel", "session.close"})
    needs_session = True

    def __init__(self, open_sandboxd: Callable[[], SandboxClient], ledger: CancelLedger) -> None:
        self._open_sandboxd = open_sandboxd
        self._ledger = ledger

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        assert context.session is not None
        name = sandbox_id(context.tenant, context.session)
        with self._open_sandboxd() as client:
            if call.name == "session.close":
                return client.close(name)
            call_id = str(call.arguments["call_id"])
            # True when the call was running and is being killed, or had not started and never will.
            return self._ledger.forbid(context.tenant, call_id) or client.cancel(name, call_id)


class PoolOrders:
    """`session.cancel` alone, for calls without a sandbox: the worker that reads the order ends the call, or passes the
    order on to the one that runs it.

    The lists of the pools may be read by any of their workers; `worker` also has a list of its own.
    """

    verbs = frozenset({"session.cancel"})
    needs_session = False

    def __init__(
        self,
        orders: WorkerControlStore,
        ledger: CancelLedger,
        board: CancelBoard,
        worker: str,
        end_process: Callable[[int], bool] | None = None,
    ) -> None:
        self._orders = orders
        self._ledger = ledger
        self._board = board
        self._worker = worker
        self._end_process = end_process or _interrupt_child

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        """Return True when the call had not started and never will, or is being ended, here or by whoever runs it."""
        call_id = str(call.arguments["call_id"])
        if self._ledger.forbid(context.tenant, call_id):
            return True
        found = _HOLDER.fullmatch(self._ledger.holder(context.tenant, call_id) or "")
        if found is None:
            return False
        if found[1] != self._worker:
            self._orders.push(found[1], data)
            return True
        # Before the signal: the process looks there whether it is meant.
        self._board.mark(context.tenant, call_id)
        return self._end_process(int(found[2]))


def process_holder(worker: str, pid: int) -> str:
    """Who runs a call, for the ledger, when it is one process of a worker without sandboxes."""
    return holder_name(worker, str(pid))


def _interrupt_child(pid: int) -> bool:
    """Send END_SIGNAL to a process that this one forked; a marker from Redis cannot name any other."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent != os.getpid():
            return False
        os.kill(pid, END_SIGNAL)
    except (OSError, ValueError, IndexError):
        return False
    return True
