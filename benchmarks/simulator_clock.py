"""Event loop with a simulated clock, on which waiting takes no real time.

The clock jumps to the next timer, but stops while a response of Redis is pending. Without this rule, timers would
expire during a round trip that takes real time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from redis.asyncio.connection import BlockingConnectionPool, Connection

from toolcrew.store.scripts import Script, ScriptConnection, Value

T = TypeVar("T")

ANSWER_S = 10.0
"""Longest real time of a response of Redis, in seconds."""
HEARING_S = 0.0002
"""Real time in seconds to wait for a message that Redis publishes together with a response."""


class SimulationStuck(Exception):
    """Raised when no task can continue: the simulation has an error."""


class _JumpingSelector(selectors.BaseSelector):
    """Selector that waits for sockets while a response is pending. Otherwise it advances the clock by the timeout
    immediately.
    """

    def __init__(self) -> None:
        # Other selectors round a timeout up to a millisecond.
        self._real = selectors.SelectSelector()
        self._has_heard = False
        self.now = 0.0
        self.awaited = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = self._real.select(0)
        if found or (timeout is not None and timeout <= 0):
            self._has_heard = self._has_heard or bool(found)
            return found
        if self.awaited > 0:
            self._has_heard = True
            found = self._real.select(ANSWER_S)
            if not found:
                raise SimulationStuck(f"Redis has not answered for {ANSWER_S:g} s")
            return found
        if self._has_heard:
            self._has_heard = False
            if found := self._real.select(HEARING_S):
                return found
        if timeout is None:
            raise SimulationStuck("every task waits for another")
        self.now += timeout
        return []

    def listen(self) -> None:
        """Record that a message was published outside this loop's connections."""
        self._has_heard = True

    def answer(self) -> None:
        """Record that a pending response has arrived."""
        self.awaited -= 1

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop on the simulated clock. `time()` begins at 0."""

    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


class _CountingConnection(Connection):
    """Connection that reports the number of pending responses to the loop. A subscription that only listens has no
    pending response.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._awaited = self._packed = 0

    def pack_commands(self, commands: Any) -> Any:
        commands_list = list(commands)
        packed = super().pack_commands(commands_list)
        self._packed = len(commands_list)
        return packed

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self._expect(max(1, self._packed))
        self._packed = 0
        await super().send_packed_command(command, check_health)

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        finally:
            self._expect(-1 if self._awaited else 0)

    async def disconnect(self, *arguments: Any, **options: Any) -> None:
        self._expect(-self._awaited)
        await super().disconnect(*arguments, **options)

    def _expect(self, answers: int) -> None:
        loop = asyncio.get_running_loop()
        self._awaited += answers
        if isinstance(loop, JumpingLoop):
            loop.selector.awaited += answers


class CountingScripts(ScriptConnection):
    """Script connection that reports the number of pending responses to the loop."""

    def run(self, script: Script, /, **values: Value) -> "asyncio.Future[Any]":
        answer = super().run(script, **values)
        loop = asyncio.get_running_loop()
        if isinstance(loop, JumpingLoop):
            loop.selector.awaited += 1
            answer.add_done_callback(lambda _: loop.selector.answer())
        return answer


def open_counting_pool(url: str, connections: int) -> BlockingConnectionPool:
    """Return a connection pool for a JumpingLoop."""
    return BlockingConnectionPool.from_url(
        url, connection_class=_CountingConnection, max_connections=connections, timeout=60, health_check_interval=0
    )


def run_jumping(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine on a JumpingLoop and return its result."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main())
