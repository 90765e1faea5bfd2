"""Sends what an orchestrator asks of admission to Redis: all that comes together in one script call, one call after the other."""

import asyncio
from collections.abc import Callable

import redis.asyncio
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import RedisError

from orchestrator.admission.base import SlotRequest
from orchestrator.admission.script import Answer, Operation, enqueue, load_script, parse_answer, release, script_arguments
from telemetry.logs import get_logger

log = get_logger(__name__)

AT_ONCE = 200
"""So many operations make a step: what it costs others is that Redis does nothing else for some milliseconds."""
RETRY_S = 0.5
OTHERS_AT_ONCE = 4
SILENCE_S = 10.0
"""How long an answer of Redis may take."""

Clock = Callable[[], float]
OnAnswer = Callable[[Answer, frozenset[str]], None]
"""Gets what Redis answered, and the calls whose request it has got with this step."""
OnFailure = Callable[[Exception, frozenset[str]], None]
"""Gets why there is no answer, and the calls whose request may or may not have arrived."""


class Steps:
    """The steps of one orchestrator. What is given back is said again until Redis has heard it; all else is lost with its step, and told so."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        deployment: str,
        orchestrator: str,
        on_answer: OnAnswer,
        on_failure: OnFailure,
        *,
        lease_s: float,
        clock: Clock | None,
    ) -> None:
        # One step follows the other, so a connection is kept: to get one from the pool costs a quarter of a step.
        self._client = client.client()
        self._script = self._client.register_script(load_script())
        self._deployment, self._orchestrator, self._lease_s, self._clock = deployment, orchestrator, lease_s, clock
        self._on_answer, self._on_failure = on_answer, on_failure
        self._requests: dict[str, SlotRequest] = {}
        self._releases: dict[str, float] = {}
        self._others: list[Operation] = []
        self._come = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def ask(self, call: str, request: SlotRequest) -> None:
        """A call wants a slot."""
        self._requests[call] = request
        self._note()

    def give_back(self, call: str, used_s: float) -> None:
        """A call needs its slot, or its place in the queue, no longer."""
        if self._requests.pop(call, None) is None:
            self._releases[call] = used_s
            self._note()

    def add(self, operation: Operation) -> None:
        """Anything else; only for what may be lost."""
        self._others.append(operation)
        self._note()

    async def aclose(self) -> None:
        """Let go of the connection; nothing may be on its way. The next step has another."""
        await self._client.aclose(close_connection_pool=False)

    async def settle(self, within_s: float) -> None:
        """Wait until all is sent, as far as that can be done in time."""
        waiting = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait({waiting}, timeout=within_s)
        waiting.cancel()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._come.wait()
            while self._requests or self._releases or self._others:
                if not await self._send():
                    self._come.clear()
                    # What is given back can wait a moment; who asks now is to be told now that Redis is away.
                    if not self._requests:
                        await asyncio.wait({waiting := asyncio.ensure_future(self._come.wait())}, timeout=RETRY_S)
                        waiting.cancel()
            self._come.clear()
            self._idle.set()

    def _note(self) -> None:
        self._idle.clear()
        self._come.set()

    async def _send(self) -> bool:
        """One step; whether Redis answered. What frees slots goes first: what asks for them then finds them."""
        releases = dict(list(self._releases.items())[:AT_ONCE])
        requests = dict(list(self._requests.items())[: AT_ONCE - len(releases)])
        others, self._others = self._others[:OTHERS_AT_ONCE], self._others[OTHERS_AT_ONCE:]
        for call in requests:
            del self._requests[call]
        operations = [
            *(release(call, used_s) for call, used_s in releases.items()),
            *others,
            *(enqueue(call, request) for call, request in requests.items()),
        ]
        now = self._clock() if self._clock is not None else None
        try:
            async with asyncio.timeout(SILENCE_S):
                arguments = script_arguments(self._deployment, self._orchestrator, operations, lease_s=self._lease_s, now=now)
                answer = parse_answer(await self._say(arguments))
        except (RedisError, OSError) as error:
            log.warning("admission_unanswered", operations=len(operations), error=str(error) or type(error).__name__)
            await self.aclose()
            self._on_failure(error, frozenset(requests))
            return False
        for call in releases:
            self._releases.pop(call, None)
        self._on_answer(answer, frozenset(requests))
        return True

    async def _say(self, arguments: list[str]) -> bytes:
        try:
            said: bytes = await self._script(args=arguments)
        except LostConnection:
            # The connection of before Redis's restart; with Sentinel it would go on asking the master of then. Whatever is said may be said twice.
            await self.aclose()
            said = await self._script(args=arguments)
        return said
