"""What must not wait behind the calls of a busy pool: cancels and closes, read from a list of the host's own and obeyed at once."""

import threading
import time
from collections.abc import Callable

import redis
import structlog

from contract.calls import ToolCall, ToolContext
from contract.envelope import decode_call
from contract.errors import EnvelopeRefused, ToolcrewError
from contract.names import control_queue
from workers.executor import CallLedger
from workers.sandbox_client import SandboxClient, sandbox_id

log = structlog.get_logger(__name__)

WAIT_S = 1
"""How long one BRPOP waits, and so about how long `stop` takes."""
STOP_S = 5.0
RETRY_S = 1.0
MAX_AT_ONCE = 32
"""Closing takes the engine seconds: one does not hold up the next."""


class ControlListener:
    """A thread of the worker's parent process that reads the control list of its host queue.

    A cancelled call that still waits in the queue is claimed, so that it never starts. An item is a signed envelope of `session.cancel` (argument `call_id`) or `session.close`. No result is stored. Anything else is logged and dropped.
    """

    def __init__(
        self,
        client: "redis.Redis",
        open_sandboxd: Callable[[], SandboxClient],
        ledger: CallLedger,
        queue: str,
        key: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._open_sandboxd = open_sandboxd
        self._ledger = ledger
        self._queue = queue
        self._list = control_queue(queue)
        self._key = key
        self._clock = clock
        self._stop = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; what is being obeyed goes on."""
        self._stop.set()
        self._thread.join(timeout=STOP_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                item = self._client.brpop([self._list], timeout=WAIT_S)
            except redis.RedisError as error:
                log.warning("control_not_read", error=str(error))
                self._stop.wait(RETRY_S)
                continue
            if item is not None:
                self._take(item[1])

    def _take(self, data: bytes | str) -> None:
        try:
            call, context = self._opened(data)
        except EnvelopeRefused as error:
            log.error("control_refused", reason=str(error))
            return
        self._slots.acquire()
        threading.Thread(target=self._obey, args=(call, context), name="control-call", daemon=True).start()

    def _opened(self, data: bytes | str) -> tuple[ToolCall, ToolContext]:
        """Raises EnvelopeRefused unless it is a signed cancel or close that is not too late."""
        try:
            call, context = decode_call(data.decode() if isinstance(data, bytes) else data, self._key)
        except UnicodeDecodeError as error:
            raise EnvelopeRefused("envelope is not text") from error
        if call.name not in ("session.cancel", "session.close"):
            raise EnvelopeRefused("only session.cancel and session.close are served here")
        if context.session is None or (call.name == "session.cancel" and not isinstance(call.arguments.get("call_id"), str)):
            raise EnvelopeRefused(f"{call.name} does not say which session or call it means")
        if self._clock() > context.deadline_at:
            raise EnvelopeRefused(f"{call.name} came past its deadline")
        return call, context

    def _obey(self, call: ToolCall, context: ToolContext) -> None:
        assert context.session is not None
        name = sandbox_id(context.tenant, context.session)
        try:
            with self._open_sandboxd() as client:
                is_done = (
                    client.close(name)
                    if call.name == "session.close"
                    else self._cancel(client, name, context, str(call.arguments["call_id"]))
                )
            log.info("control_obeyed", verb=call.name, call=call.id, done=is_done)
        except ToolcrewError as error:
            log.error("control_failed", verb=call.name, call=call.id, error=str(error))
        finally:
            self._slots.release()

    def _cancel(self, client: SandboxClient, name: str, context: ToolContext, call_id: str) -> bool:
        """True when the call was running and is being killed, or had not started and never will."""
        if self._ledger.claim(context.tenant, call_id, self._queue):
            return True
        return client.cancel(name, call_id)
