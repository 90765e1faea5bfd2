"""Cancel, close and drain orders.

A worker reads orders from its own list and runs them at once, even when its pool is busy.

Invariant: only a signed order that has not expired runs. An order can signal only a process that this worker has
forked.
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

from toolcrew.contract.calls import ToolCall, ToolContext
from toolcrew.contract.envelope import decode_call
from toolcrew.contract.errors import BrokerUnavailable, EnvelopeRefused, RefusalReason, ToolcrewError
from toolcrew.contract.hosts import DRAIN_ORDER, holder_name
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.hosts import WorkerControlStore
from toolcrew.workers.interrupts import END_SIGNAL, CancelBoard
from toolcrew.workers.sandbox_client import SandboxClient, sandbox_id

log = structlog.get_logger(__name__)

WAIT_S = 1
"""Seconds that one BRPOP waits. `stop` takes about as long when Redis does not answer."""
STOP_S = 5.0
RETRY_S = 1.0
MAX_AT_ONCE = 32
"""Maximum number of orders that run at the same time. Closing a session takes seconds and must not delay the next
order.
"""
_HOLDER = re.compile(r"(pool\.[^/\s]{1,128})/([1-9][0-9]{0,9})")
"""The format of `process_holder`. The value comes from Redis, so only a worker name and a pid are accepted."""


class OrderHandler(Protocol):
    """Runs the orders of one kind of worker. `verbs` lists the orders."""

    verbs: frozenset[str]
    needs_session: bool

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        """Run one order, which arrived as `data`. Return whether the order had an effect. Raises ToolcrewError."""
        ...


class ControlListener:
    """A thread in the worker's parent process that reads the control lists.

    The listener runs every order at once, each in its own thread. An item of a list is a signed envelope with one of
    the handler's verbs, or an order to drain this worker. The worker's own queue is the first of `queues`. No result is
    stored. Any other item is logged and dropped, and `on_refused` receives the reason. `drain` is called with a flag
    (True: sessions may lose files) and returns whether the drain has started.
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
        self._own = queues[0]
        self._queues = tuple(queues)
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
        """Stop reading. Running orders continue."""
        self._stop.set()
        # The wake-up ends the BRPOP of the thread. No other worker reads this worker's own list.
        with contextlib.suppress(BrokerUnavailable):
            self._orders.wake(self._own, 1 + WAIT_S)
        self._thread.join(timeout=STOP_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                order = self._orders.take(self._queues, WAIT_S)
            except BrokerUnavailable as error:
                log.warning("orders_not_read", error=str(error))
                self._stop.wait(RETRY_S)
                continue
            if order is not None:
                self._take(order)

    def _take(self, data: bytes) -> None:
        try:
            call, context = self._decode(data)
        except EnvelopeRefused as error:
            log.error("order_refused", reason=error.reason, error=str(error))
            self._on_refused(error.reason)
            return
        # Wait for a free slot here, in the reading thread: orders beyond the limit stay in Redis.
        self._slots.acquire()
        threading.Thread(target=self._obey, args=(call, context, data), name="control-call", daemon=True).start()

    def _decode(self, data: bytes) -> tuple[ToolCall, ToolContext]:
        """Return the call and its context.

        Raises EnvelopeRefused: the item is no signed order for this worker, or has expired.
        """
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
            raise EnvelopeRefused(f"{call.name} names no session or call")
        if self._clock() > context.deadline_at:
            raise EnvelopeRefused(f"{call.name} arrived after its deadline", "expired")
        return call, context

    def _check_drain(self, call: ToolCall) -> None:
        """Raise EnvelopeRefused unless the drain order is for this worker. Several workers may read the same list."""
        if call.arguments.get("queue") != self._own:
            raise EnvelopeRefused(f"the drain order is not for {self._own}", "wrong_task")

    def _obey(self, call: ToolCall, context: ToolContext, data: bytes) -> None:
        try:
            if call.name == DRAIN_ORDER:
                is_obeyed = self._drain(call.arguments.get("lossy") is True)
            else:
                is_obeyed = self._handler.obey(call, context, data)
            log.info("order_executed", verb=call.name, call=call.id, done=is_obeyed)
        except ToolcrewError as error:
            log.error("order_failed", verb=call.name, call=call.id, error=str(error))
        finally:
            self._slots.release()


class SandboxOrders:
    """Runs `session.cancel` (argument `call_id`) and `session.close` for sessions of this host.

    A cancelled call that still waits in the queue is forbidden, so that it never starts.
    """

    verbs = frozenset({"session.cancel", "session.close"})
    needs_session = True

    def __init__(self, open_sandboxd: Callable[[], SandboxClient], ledger: WorkerCallStore) -> None:
        self._open_sandboxd = open_sandboxd
        self._ledger = ledger

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        assert context.session is not None
        name = sandbox_id(context.tenant, context.session)
        with self._open_sandboxd() as client:
            if call.name == "session.close":
                return client.close(name)
            call_id = str(call.arguments["call_id"])
            # True: the call had not started and never will, or it is running and is being killed.
            return self._ledger.forbid(context.tenant, call_id) or client.cancel(name, call_id)


class PoolOrders:
    """Runs `session.cancel` for calls without a sandbox, and `session.close` for a session that has MCP sessions:
    `end_sessions` ends them at their servers.

    The worker ends its own call, or passes the order on to the worker that runs the call. Any worker of a pool may
    read the pool's list. `worker` also has its own list.
    """

    verbs = frozenset({"session.cancel", "session.close"})
    needs_session = False

    def __init__(
        self,
        orders: WorkerControlStore,
        ledger: WorkerCallStore,
        board: CancelBoard,
        worker: str,
        end_process: Callable[[int], bool] | None = None,
        end_sessions: Callable[[str, str], bool] = lambda tenant, session: False,
    ) -> None:
        self._orders = orders
        self._ledger = ledger
        self._board = board
        self._worker = worker
        self._end_process = end_process or _interrupt_child
        self._end_sessions = end_sessions

    def obey(self, call: ToolCall, context: ToolContext, data: bytes) -> bool:
        """Cancel a call, or end the MCP sessions of a session. Return True when the call had not started and never
        will, or when this or another worker ends it.
        """
        if call.name == "session.close":
            return context.session is not None and self._end_sessions(context.tenant, context.session)
        call_id = str(call.arguments["call_id"])
        if self._ledger.forbid(context.tenant, call_id):
            return True
        holder = _HOLDER.fullmatch(self._ledger.holder(context.tenant, call_id) or "")
        if holder is None:
            return False
        if holder[1] != self._worker:
            self._orders.push(holder[1], data)
            return True
        # Mark the call on the CancelBoard before the signal: the process looks there to see whether the signal is for
        # its call.
        self._board.mark(context.tenant, call_id)
        return self._end_process(int(holder[2]))


def process_holder(worker: str, pid: int) -> str:
    """Return the name under which the ledger records the process of a call. Only workers without sandboxes use it."""
    return holder_name(worker, str(pid))


def _interrupt_child(pid: int) -> bool:
    """Send END_SIGNAL to a child of this process. Any other pid is refused: the pid comes from Redis."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent != os.getpid():
            return False
        os.kill(pid, END_SIGNAL)
    except (OSError, ValueError, IndexError):
        return False
    return True
