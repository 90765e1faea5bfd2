"""One call that is heard while it runs: its events handed over in order, deleted when they are, and answered."""

import asyncio
import contextlib
import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis.asyncio

from contract.call_events import END, HIDDEN, MAX_PAUSE_S, OUTPUT, STALL_S, CallEvent, encode_answer, entry_event
from contract.calls import ToolResult
from contract.errors import EnvelopeRefused
from contract.names import call_answers_key, call_events_key, call_room_key, call_wake_name
from store.pending_commands import Errands
from telemetry.logs import get_logger

log = get_logger(__name__)

ACK_EVERY_S = 0.25
"""A slow handler's progress is told so often."""
MAX_QUESTIONS = 8
"""So many events other than output are worked on at once; what comes beyond waits."""

Handler = Callable[[CallEvent, "HeardCall"], object]
"""A plain function or an async one; what it gives does not matter."""
OnOutput = Callable[[str, str], object]
"""Gets (stream, text) in order; a plain function or an async one. What it waits for holds up the call, for a bounded time."""


def output_handler(on_output: OnOutput) -> Handler:
    """The handler of OUTPUT that gives a program its pieces."""

    def handle(event: CallEvent, _: "HeardCall") -> object:
        return on_output(str(event.payload.get("stream", "")), str(event.payload.get("text", "")))

    return handle


class HeardCall:
    """The caller's end of one call's events.

    Handlers of OUTPUT are awaited one after the other; those of other kinds run beside them, and are cancelled when the call has its result. A
    handler that raises is logged, and the call gets its result all the same. A kind without a handler is dropped.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        errands: Errands,
        deployment: str,
        tenant: str,
        call_id: str,
        handlers: Mapping[str, Handler],
    ) -> None:
        self.tenant = tenant
        self.call_id = call_id
        self.name = call_wake_name(tenant, call_id)
        names = (deployment, tenant, call_id)
        self.key, self._room, self._answers = call_events_key(*names), call_room_key(*names), call_answers_key(*names)
        self.last_id = "0-0"
        self._client = client
        self._errands = errands
        self._handlers = handlers
        self._ttl_s = 0
        self._is_ended = False
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._entries: deque[tuple[bytes, Mapping[Any, Any]]] = deque()
        self._is_failed = False
        self._moved_at = time.monotonic()
        self._taken: list[bytes] = []
        self._told_at = time.monotonic()
        self._count = 0
        self._questions: set[asyncio.Task[None]] = set()
        self._takes_questions = True
        self._question_slots = asyncio.Semaphore(MAX_QUESTIONS)

    async def open(self, ttl_s: float) -> None:
        """Make the stream, which expires by itself after `ttl_s`. Raises RedisError, also when another process hears this call."""
        self._ttl_s = int(ttl_s)
        async with self._client.pipeline(transaction=True) as pipe:
            # A group nobody reads by: the one command that makes an empty stream, and refuses one that is there.
            pipe.xgroup_create(self.key, "caller", id="$", mkstream=True)
            pipe.expire(self.key, self._ttl_s)
            await pipe.execute()

    async def answer(self, payload: Mapping[str, Any]) -> None:
        """Answer what the running call has asked. Raises ValueError when it is too large, RedisError when Redis does not take it."""
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.rpush(self._answers, encode_answer(payload))
            pipe.expire(self._answers, self._ttl_s)
            await pipe.execute()

    def take(self, entries: Sequence[tuple[bytes, Mapping[Any, Any]]]) -> None:
        """New entries of the stream, in order."""
        if entries:
            if not self._entries:
                self._moved_at = time.monotonic()
            self._entries.extend(entries)
            self.last_id = entries[-1][0].decode()
            self._drained.clear()
            self._arrived.set()

    async def deliver(self) -> None:
        """Hand over what arrives, until the last event or until cancelled."""
        while not self._is_ended:
            await self._arrived.wait()
            self._arrived.clear()
            while self._entries:
                # It stays in the queue until it is handed over: what is still there counts as not shown.
                entry, fields = self._entries[0]
                await self._handle(fields)
                self._moved_at = time.monotonic()
                self._entries.popleft()
                self._taken.append(entry)
                if not self._is_ended and (not self._entries or self._moved_at - self._told_at >= ACK_EVERY_S):
                    self._tell_progress()
            self._drained.set()

    async def settle(self) -> None:
        """Returns when all that was taken is delivered; sooner when the handler takes nothing any more."""
        began = time.monotonic()
        while self._entries:
            # A call may have been silent for long: the handler's time starts now at the earliest.
            rest_s = min(max(self._moved_at, began) + STALL_S, began + MAX_PAUSE_S) - time.monotonic()
            if rest_s <= 0:
                log.warning("call_events_not_delivered", call=self.call_id, events=len(self._entries))
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._drained.wait()

    def note(self, result: ToolResult) -> ToolResult:
        """The result, telling how many characters of output came too late to be shown."""
        hidden = sum(_characters(fields) for _, fields in self._entries)
        told = result.metadata.get(HIDDEN)
        hidden += told if isinstance(told, int) else 0
        return result.model_copy(update={"metadata": {**result.metadata, HIDDEN: hidden}}) if hidden else result

    def end_questions(self) -> None:
        """Stop what still works on the call's questions, and begin with no more: who asked has ended."""
        self._takes_questions = False
        for task in self._questions:
            task.cancel()

    def delete(self) -> None:
        """Have all that there is of the call in Redis deleted: who still writes notices that nobody hears it."""
        self._errands.add(("DEL", self.key, self._room, self._answers))

    async def _handle(self, fields: Mapping[Any, Any]) -> None:
        try:
            event = entry_event(fields)
        except EnvelopeRefused as error:
            log.error("call_event_refused", call=self.call_id, reason=str(error))
            return
        if event.kind == END:
            if event.payload.get("count") != self._count:
                log.warning("call_events_lost", call=self.call_id, heard=self._count, written=event.payload.get("count"))
            self._is_ended = True
            return
        self._count += 1
        handler = self._handlers.get(event.kind)
        if handler is None:
            return
        if event.kind == OUTPUT:
            if not self._is_failed:
                await self._guarded(handler, event)
            return
        await self._question_slots.acquire()
        if not self._takes_questions:
            self._question_slots.release()
            return
        task = asyncio.create_task(self._work_on(handler, event), name=f"{event.kind}-{self.call_id}")
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _work_on(self, handler: Handler, event: CallEvent) -> None:
        try:
            await self._guarded(handler, event)
        finally:
            self._question_slots.release()

    async def _guarded(self, handler: Handler, event: CallEvent) -> None:
        """The handler is somebody else's code: what it raises must not cost the call its result. One that raised gets no more output."""
        try:
            given = handler(event, self)
            # A plain function may well give something: what `write` does, for example.
            if inspect.isawaitable(given):
                await given
        except Exception:
            log.exception("call_event_handler_failed", call=self.call_id, kind=event.kind)
            self._is_failed = self._is_failed or event.kind == OUTPUT

    def _tell_progress(self) -> None:
        """Have deleted what was handed over, and let a worker that waits for room go on."""
        self._told_at = time.monotonic()
        self._errands.add(
            ("XDEL", self.key, *self._taken),
            ("LPUSH", self._room, 1),
            ("LTRIM", self._room, 0, 0),
            ("EXPIRE", self._room, self._ttl_s),
        )
        self._taken.clear()


def _characters(fields: Mapping[Any, Any]) -> int:
    try:
        return len(str(entry_event(fields).payload.get("text", "")))
    except EnvelopeRefused:
        return 0
