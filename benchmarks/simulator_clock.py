"""An event loop on which waiting costs nothing: its clock jumps to the next timer, but stands still while Redis has not
answered.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from redis.asyncio.connection import BlockingConnectionPool, Connection

from store.connection import Script, ScriptConnection

T = TypeVar("T")

ANSWER_S = 10.0
"""Real seconds that Redis may take for an answer."""
HEARING_S = 0.0002
"""Real seconds in which what Redis publishes beside an answer arrives, too."""


class SimulationStuck(Exception):
    """Nobody waits for anything: what is simulated has an error."""


class _JumpingSelector(selectors.BaseSelector):
    """Waits for sockets as long as an answer is awaited; else lets the asked time pass at once."""

    def __init__(self) -> None:
        # Of this kind, because the others round what they wait up to a millisecond.
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
        """An awaited answer has come."""
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
    """`time()` begins at 0."""

    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


class _CountingConnection(Connection):
    """Tells the loop how many answers are on their way. A subscription that only listens awaits none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._awaited = self._packed = 0

    def pack_commands(self, commands: Any) -> Any:
        asked = list(commands)
        packed = super().pack_commands(asked)
        self._packed = len(asked)
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
    """Tells the loop how many answers are on their way."""

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[str | int | float]) -> "asyncio.Future[Any]":
        answer = super().run(script, keys, arguments)
        loop = asyncio.get_running_loop()
        if isinstance(loop, JumpingLoop):
            loop.selector.awaited += 1
            answer.add_done_callback(lambda _: loop.selector.answer())
        return answer


def open_counting_pool(url: str, connections: int) -> BlockingConnectionPool:
    """Connections for a JumpingLoop."""
    return BlockingConnectionPool.from_url(
        url, connection_class=_CountingConnection, max_connections=connections, timeout=60, health_check_interval=0
    )


def run_jumping(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The coroutine's value."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main())
