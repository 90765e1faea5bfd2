"""Receive the events of running calls: output while the tool writes it, and questions that the tool asks. The keys
and commands of Redis are in store/call_event_streams.py.
"""

import asyncio
import contextlib
import inspect
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from toolcrew.concurrency.tasks import begin_shared, cancel_all
from toolcrew.contract.call_events import END, HIDDEN, MAX_PAUSE_S, OUTPUT, STALL_S, CallEvent, encode_answer
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import BrokerUnavailable, EnvelopeRefused
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.call_event_streams import READ_COUNT, CallEventStore, Entry
from toolcrew.store.connection import RedisClient
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

ACK_EVERY_S = 0.25
"""Seconds between two acknowledgements of events while a handler is slow."""
MAX_QUESTIONS = 8
"""Limit of events of one call, other than output, that are handled at the same time. Further events wait."""
RETRY_S = 0.5
READ_CALLS = 256
"""Limit of streams that one round trip reads."""
CLOSE_S = 2.0
TTL_MARGIN_S = 60.0

Handler = Callable[[CallEvent, "CallEventReader"], object]
"""A plain function or an async one. Its result is ignored."""
OnOutput = Callable[[str, str], object]
"""Receives (stream, text) in order; a plain or an async function. The call waits for the function, for a limited
time.
"""


def output_handler(on_output: OnOutput) -> Handler:
    """Return the handler of OUTPUT that passes each piece to `on_output`."""

    def handle(event: CallEvent, _: "CallEventReader") -> object:
        return on_output(str(event.payload.get("stream", "")), str(event.payload.get("text", "")))

    return handle


class CallEventReader:
    """Passes the events of one call to their handlers, and the answers of the handlers to the call.

    Handlers of OUTPUT run one after the other. Handlers of other kinds run at the same time; they are cancelled when
    the call has its result. An exception in a handler is logged, and the call still gets its result. Events of a kind
    without a handler are dropped.
    """

    def __init__(self, store: CallEventStore, tenant: str, call_id: str, handlers: Mapping[str, Handler]) -> None:
        self.tenant = tenant
        self.call_id = call_id
        self.keys = store.keys(tenant, call_id)
        self.last_id = "0-0"
        self._store = store
        self._handlers = handlers
        self._ttl_s = 0
        self._is_ended = False
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._entries: deque[Entry] = deque()
        self._is_failed = False
        self._moved_at = time.monotonic()
        self._handled: list[bytes] = []
        self._acknowledged_at = time.monotonic()
        self._count = 0
        self._questions: set[asyncio.Task[None]] = set()
        self._takes_questions = True
        self._question_slots = asyncio.Semaphore(MAX_QUESTIONS)

    async def open(self, ttl_s: float) -> None:
        """Create the stream, which expires `ttl_s` seconds later. Raises BrokerUnavailable when Redis does not
        answer, or when another process reads this call.
        """
        self._ttl_s = int(ttl_s)
        await self._store.create(self.keys, self._ttl_s)

    async def answer(self, payload: Mapping[str, Any]) -> None:
        """Answer a question of the running call. Raises ValueError when the answer is too large. Raises
        BrokerUnavailable when Redis does not accept the answer.
        """
        await self._store.push_answer(self.keys, encode_answer(payload), self._ttl_s)

    def take(self, entries: Sequence[Entry]) -> None:
        """Put the next entries of the stream into the queue that `deliver` reads."""
        if entries:
            if not self._entries:
                self._moved_at = time.monotonic()
            self._entries.extend(entries)
            self.last_id = entries[-1][0].decode()
            self._drained.clear()
            self._arrived.set()

    async def deliver(self) -> None:
        """Pass arriving events to their handlers, until the last event or until cancelled."""
        while not self._is_ended:
            await self._arrived.wait()
            self._arrived.clear()
            while self._entries:
                # The entry stays in the queue until its handler returns. `note` counts the entries in the queue as
                # not shown.
                entry, fields = self._entries[0]
                await self._handle(fields)
                self._moved_at = time.monotonic()
                self._entries.popleft()
                self._handled.append(entry)
                if not self._is_ended and (not self._entries or self._moved_at - self._acknowledged_at >= ACK_EVERY_S):
                    await self._acknowledge()
            self._drained.set()

    async def settle(self) -> None:
        """Wait until all entries are handled, or until the handler makes no progress."""
        began = time.monotonic()
        while self._entries:
            # The call may have had no events for a long time, so the handler's time starts now at the earliest.
            rest_s = min(max(self._moved_at, began) + STALL_S, began + MAX_PAUSE_S) - time.monotonic()
            if rest_s <= 0:
                log.warning("call_events_not_delivered", call=self.call_id, events=len(self._entries))
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._drained.wait()

    def with_hidden_count(self, result: ToolResult) -> ToolResult:
        """Return the result with a field in its metadata: the number of output characters that arrived too late to be
        shown.
        """
        hidden = sum(self._count_characters(fields) for _, fields in self._entries)
        hidden_by_worker = result.metadata.get(HIDDEN)
        hidden += hidden_by_worker if isinstance(hidden_by_worker, int) else 0
        return result.model_copy(update={"metadata": {**result.metadata, HIDDEN: hidden}}) if hidden else result

    def _count_characters(self, fields: Mapping[Any, Any]) -> int:
        try:
            return len(str(self._store.parse(self.keys, fields).payload.get("text", "")))
        except EnvelopeRefused:
            return 0

    def end_questions(self) -> None:
        """Cancel the handlers of questions and start no more of them, because the call has ended."""
        self._takes_questions = False
        for task in self._questions:
            task.cancel()

    async def _handle(self, fields: Mapping[Any, Any]) -> None:
        try:
            event = self._store.parse(self.keys, fields)
        except EnvelopeRefused as error:
            log.error("call_event_refused", call=self.call_id, reason=str(error))
            return
        if event.kind == END:
            if event.payload.get("count") != self._count:
                log.warning(
                    "call_events_lost", call=self.call_id, received=self._count, written=event.payload.get("count")
                )
            self._is_ended = True
            return
        self._count += 1
        handler = self._handlers.get(event.kind)
        if handler is None:
            return
        if event.kind == OUTPUT:
            if not self._is_failed:
                await self._call_handler(handler, event)
            return
        await self._question_slots.acquire()
        # The call may have ended while this event waited.
        if not self._takes_questions:
            self._question_slots.release()
            return
        task = asyncio.create_task(self._handle_question(handler, event), name=f"{event.kind}-{self.call_id}")
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _handle_question(self, handler: Handler, event: CallEvent) -> None:
        try:
            await self._call_handler(handler, event)
        finally:
            self._question_slots.release()

    async def _call_handler(self, handler: Handler, event: CallEvent) -> None:
        """Run a handler. The handler is code of a user's program, so its exception is logged and the call keeps its
        result. After an exception the handler gets no more output.
        """
        try:
            value = handler(event, self)
            # A plain function may return a value that is not awaitable, as `write` does. The value is ignored.
            if inspect.isawaitable(value):
                await value
        except Exception:
            log.exception("call_event_handler_failed", call=self.call_id, kind=event.kind)
            self._is_failed = self._is_failed or event.kind == OUTPUT

    async def _acknowledge(self) -> None:
        self._acknowledged_at = time.monotonic()
        handled, self._handled = self._handled, []
        try:
            await self._store.acknowledge(self.keys, handled)
        except BrokerUnavailable as error:
            # The next acknowledgement includes these entries.
            self._handled = handled
            log.warning("call_events_connection_lost", error=str(error))


class CallEventListener:
    """Reads the events of all calls of this process over one blocking connection. The connection is used only while
    such calls exist. The signed context of each call contains the id of the listener.
    """

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys) -> None:
        self._store = CallEventStore(client, deployment, keys)
        self._readers: dict[str, CallEventReader] = {}
        self._unread: dict[str, CallEventReader] = {}
        self._deletions: dict[str, asyncio.Task[None]] = {}
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def id(self) -> str:
        """The name under which workers wake this listener."""
        return self._store.listener

    @contextlib.asynccontextmanager
    async def listen(
        self, tenant: str, call_id: str, handlers: Mapping[str, Handler], ttl_s: float
    ) -> AsyncIterator[CallEventReader | None]:
        """Pass a call's events to `handlers` while the block sends the call and awaits its result. At the end of the
        block it waits until the events that are still in Redis are handled, except after an exception.

        `ttl_s`: the longest time that the call can take. Yields None if there are no handlers, if Redis does not
        answer, or if another reader has the call: a call never fails because of its events.
        """
        reader = await self._open(tenant, call_id, handlers, ttl_s) if handlers else None
        if reader is None:
            yield None
            return
        delivering = asyncio.create_task(reader.deliver(), name=f"events-{call_id}")
        try:
            yield reader
            reader.end_questions()
            await self._settle(reader)
        finally:
            del self._readers[reader.keys.name]
            delivering.cancel()
            reader.end_questions()
            if not self._is_closed:
                # Delete the events in a separate task, because this block may be cancelled.
                task = begin_shared(self._delete(reader), "call-events-end")
                self._deletions[reader.keys.name] = task

    async def close(self) -> None:
        """Stop listening. The keys of calls that have ended are deleted first; the keys of running calls expire."""
        self._is_closed = True
        if self._deletions:
            await asyncio.wait(self._deletions.values(), timeout=CLOSE_S)
        await cancel_all([*self._deletions.values(), *([self._task] if self._task is not None else [])])

    async def _open(
        self, tenant: str, call_id: str, handlers: Mapping[str, Handler], ttl_s: float
    ) -> CallEventReader | None:
        if self._is_closed:
            return None
        reader = CallEventReader(self._store, tenant, call_id, handlers)
        name = reader.keys.name
        if name in self._readers:
            return None
        # Register the call before its stream is created, because a wake-up may arrive immediately and must find the
        # call.
        self._readers[name] = reader
        try:
            # The events of an earlier attempt at this call have the same keys.
            if (deletion := self._deletions.get(name)) is not None:
                await asyncio.wait({deletion})
            await reader.open(ttl_s + TTL_MARGIN_S)
        except BrokerUnavailable as error:
            log.warning("call_events_not_opened", call=call_id, error=str(error))
            del self._readers[name]
            return None
        except BaseException:
            del self._readers[name]
            raise
        if self._task is None:
            self._task = begin_shared(self._run(), "call-events")
        return reader

    async def _delete(self, reader: CallEventReader) -> None:
        """Delete the events of a call that has ended. If Redis does not answer, they expire."""
        try:
            await self._store.delete(reader.keys)
        except BrokerUnavailable as error:
            log.warning("call_events_connection_lost", error=str(error))
        finally:
            # A second call that used the same id may have replaced or removed the entry.
            self._deletions.pop(reader.keys.name, None)

    async def _settle(self, reader: CallEventReader) -> None:
        """Read the remaining events without waiting for a wake-up, and wait for their handlers. The worker wrote
        these events before the result.
        """
        try:
            # The reading task may hang on a connection that is half closed. The result does not wait for the task.
            async with asyncio.timeout(STALL_S):
                await self._read([reader])
        except (BrokerUnavailable, TimeoutError) as error:
            log.warning("call_events_not_read", call=reader.call_id, error=str(error))
        await reader.settle()

    async def _run(self) -> None:
        is_sound = True
        while True:
            try:
                # A failed read has consumed its wake-ups. After it, all streams are read until one read succeeds.
                await self._read(await self._take_woken() if is_sound else list(self._readers.values()))
                is_sound = True
            except BrokerUnavailable as error:
                is_sound = False
                log.warning("call_events_connection_lost", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _take_woken(self) -> list[CallEventReader]:
        """Return the calls that have new events. After a long time without a wake-up, return all calls, because a
        wake-up may be lost.
        """
        names = await self._store.take_wakes()
        if names is None:
            return list(self._readers.values())
        return [self._readers[name] for name in names if name in self._readers]

    async def _read(self, readers: Iterable[CallEventReader]) -> None:
        """Read the new entries of these calls. Only one task reads at a time, because two would read the same entry
        twice. The task that reads serves all tasks that wait.
        """
        self._unread.update((reader.keys.name, reader) for reader in readers)
        async with self._reading:
            unread, self._unread = list(self._unread.values()), {}
            try:
                while unread:
                    unread = unread[READ_CALLS:] + await self._read_group(unread[:READ_CALLS])
            except BaseException:
                # The next task that reads takes these calls.
                self._unread = {reader.keys.name: reader for reader in unread} | self._unread
                raise

    async def _read_group(self, readers: list[CallEventReader]) -> list[CallEventReader]:
        """Read once, and return the calls that may have more entries."""
        readers = [reader for reader in readers if self._readers.get(reader.keys.name) is reader]
        found = await self._store.read([(reader.keys, reader.last_id) for reader in readers])
        for reader, entries in zip(readers, found, strict=True):
            reader.take(entries)
        return [reader for reader, entries in zip(readers, found, strict=True) if len(entries) == READ_COUNT]
