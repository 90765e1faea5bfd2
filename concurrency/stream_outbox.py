"""Frames that wait to be sent on one connection, in the order in which they are sent.

Answers and credits come first. Then each stream sends one frame in turn, and streams with few bytes (terminals) come
before streams with many. The frames of one stream keep their order.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from toolcrew.contract.stream_protocol import HEADER, FrameKind, StreamFrame

QUICK_BYTES = 4096
QUICK_S = 0.1
"""A stream that has sent fewer than QUICK_BYTES bytes in the last QUICK_S seconds comes before other streams."""
FRAME_COST = 256
"""Bytes of memory that a frame needs in addition to its payload."""
_SMALL_BYTES = 4096
_ORDERED = frozenset({FrameKind.DATA, FrameKind.END, FrameKind.CLOSE})


class MemoryCount:
    """Bytes of memory that the frames of one or more outboxes need."""

    def __init__(self) -> None:
        self.bytes = 0


class _StreamQueue:
    """Frames of one stream."""

    def __init__(self) -> None:
        self.frames: deque[StreamFrame] = deque()
        self.memory = 0
        self._began_at = 0.0
        self._sent = 0

    def is_quick(self, now: float) -> bool:
        return now - self._began_at > QUICK_S or self._sent < QUICK_BYTES

    def count(self, size: int, now: float) -> None:
        if now - self._began_at > QUICK_S:
            self._began_at, self._sent = now, 0
        self._sent += size

    def merge(self, frame: StreamFrame) -> bool:
        """Add a frame to the last one, if that one is small. Return False when the frames cannot be one."""
        last = self.frames[-1] if self.frames else None
        if (
            last is None
            or frame.kind is not FrameKind.DATA
            or last.flags != frame.flags
            or len(last.payload) + len(frame.payload) > _SMALL_BYTES
        ):
            return False
        self.frames[-1] = replace(last, payload=last.payload + frame.payload)
        return True


class StreamOutbox:
    """Frames that wait on one connection. `totals`: counts that include the memory of this outbox. `has_epochs`: the
    connection is the channel of a sandbox.
    """

    def __init__(
        self, *totals: MemoryCount, has_epochs: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.has_epochs = has_epochs
        self._sent_frames = 0
        self._counts = (MemoryCount(), *totals)
        self._clock = clock
        self._first: deque[bytes] = deque()
        self._credits: dict[int, int] = {}
        self._queues: dict[int, _StreamQueue] = {}
        # Streams with frames, in the order of their turns. A stream is in one of the two.
        self._quick: dict[int, None] = {}
        self._bulk: dict[int, None] = {}

    @property
    def memory(self) -> int:
        """Bytes of memory of the frames that wait."""
        return self._counts[0].bytes

    @property
    def is_empty(self) -> bool:
        return not (self._first or self._credits or self._quick or self._bulk)

    def memory_of(self, stream: int) -> int:
        """Return the bytes of memory of the data of one stream."""
        queue = self._queues.get(stream)
        return queue.memory if queue is not None else 0

    def put(self, frame: StreamFrame) -> None:
        """Add a frame. A credit replaces an earlier one of its stream that was not sent."""
        if frame.kind is FrameKind.CREDIT:
            self._credits[frame.stream] = frame.offset
            return
        if frame.kind in _ORDERED and frame.kind is not FrameKind.DATA:
            self._credits.pop(frame.stream, None)
        queue = self._queues.get(frame.stream)
        if frame.kind is FrameKind.DATA or (frame.kind in _ORDERED and queue is not None and queue.frames):
            self._put_in_turn(frame)
        else:
            self._put_first(frame)

    def forget(self, stream: int) -> None:
        """Drop the frames of a stream that no process reads any more."""
        self._credits.pop(stream, None)
        self._quick.pop(stream, None)
        self._bulk.pop(stream, None)
        queue = self._queues.pop(stream, None)
        if queue is not None:
            self._add(-queue.memory)

    def clear(self) -> None:
        """Drop all frames."""
        self._add(-self.memory)
        for part in (self._first, self._credits, self._queues, self._quick, self._bulk):
            part.clear()

    def take(self, size: int) -> bytes:
        """Return the next frames, of about `size` bytes together; empty when no frame waits."""
        parts: list[bytes] = []
        taken = 0
        while taken < size and (part := self._take_one()):
            parts.append(part)
            taken += len(part)
        return b"".join(parts)

    def _put_first(self, frame: StreamFrame) -> None:
        if frame.kind in _ORDERED:
            self._queues.pop(frame.stream, None)
        data = self._encode(frame)
        self._first.append(data)
        self._add(len(data) + FRAME_COST)

    def _put_in_turn(self, frame: StreamFrame) -> None:
        queue = self._queues.setdefault(frame.stream, _StreamQueue())
        memory = len(frame.payload)
        if not queue.merge(frame):
            memory += FRAME_COST
            queue.frames.append(frame)
            if len(queue.frames) == 1:
                self._line_up(frame.stream, queue)
        queue.memory += memory
        self._add(memory)

    def _line_up(self, stream: int, queue: _StreamQueue) -> None:
        turns = self._quick if queue.is_quick(self._clock()) else self._bulk
        turns[stream] = None

    def _take_one(self) -> bytes:
        if self._first:
            data = self._first.popleft()
            self._add(-len(data) - FRAME_COST)
            return data
        if self._credits:
            stream = next(iter(self._credits))
            return StreamFrame(FrameKind.CREDIT, stream, self._credits.pop(stream)).encode()
        turns = self._quick or self._bulk
        return self._take_turn(turns) if turns else b""

    def _take_turn(self, turns: dict[int, None]) -> bytes:
        stream = next(iter(turns))
        del turns[stream]
        queue = self._queues[stream]
        frame = queue.frames.popleft()
        memory = len(frame.payload) + FRAME_COST
        queue.memory -= memory
        self._add(-memory)
        queue.count(len(frame.payload), self._clock())
        if queue.frames:
            self._line_up(stream, queue)
        elif frame.kind is not FrameKind.DATA:
            del self._queues[stream]
        return self._encode(frame)

    def _encode(self, frame: StreamFrame) -> bytes:
        # A client must not make other connections than its sandbox's channel carry many tiny frames.
        data = frame.encode() if self.has_epochs else frame.encode_whole()
        self._sent_frames += (len(data) - len(frame.payload)) // HEADER.size
        return data

    def count_sent(self) -> int:
        """Return how many frames were taken since the last time. DATA that was cut counts as several frames."""
        count, self._sent_frames = self._sent_frames, 0
        return count

    def _add(self, memory: int) -> None:
        for count in self._counts:
            count.bytes += memory
