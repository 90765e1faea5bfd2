"""Puts calls into their queues. One script for each call checks the destination, writes the record, and pushes the
message.

Invariant: the record and the message of a call are written in one atomic step. A repeated publish pushes no second
message.
"""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable
from contract.names import call_key, host_key, place_key, tenant_calls_key, tenant_sessions_key
from store.calls import PUBLISH
from store.connection import CLOSED, LuaScript, ScriptConnection, SharedClock, Unanswered
from store.slots import held_slots_key
from telemetry.logs import get_logger

log = get_logger(__name__)

SEND_WAIT_S = 3.0
"""Time for which a call waits for Redis while it was certainly not sent, in seconds."""
RETRY_S = (0.05, 0.1, 0.2, 0.5)
CLOCK_ROUND_TRIP_S = 0.5
"""Limit of the round trip for clock updates, in seconds. After a longer round trip, the time in the reply is out of
date.
"""

_PUBLISH = LuaScript(PUBLISH)
Refusal = Literal["host_lost", "moved", "duplicate", "no_slot"]
_REFUSALS: Mapping[str, Refusal] = {
    "host_lost": "host_lost",
    "moved": "moved",
    "duplicate": "duplicate",
    "no_slot": "no_slot",
}


class NotSent(Exception):
    """The call was not published. `host_lost`: the host of the queue does not live. `moved`: the session is on another
    host, or is moving. `duplicate`: the call id was used before. `no_slot`: admission has not granted the slot yet.
    """

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class CallMessage:
    """A call in its published form. `text`: the message of its Celery task. `start_by`: latest start, in Unix seconds
    of the shared clock. `ticket`: a signed text that stays in the record until a worker decides about the call
    (store/calls.py). `session`, `fence`: for a call that must reach the host of its session; None if any worker of the
    queue may run the call. `slot`: the id of the slot that the call must hold (store/slots.py); "" if the slot is
    already confirmed. `extra_s`: by how many seconds the call may run longer
    than MAX_TIMEOUT_S.
    """

    tenant: str
    call_id: str
    attempt: int
    tool: str
    queue: str
    task_id: str
    text: str
    start_by: float
    ticket: str = ""
    session: str | None = None
    fence: int | None = None
    slot: str = ""
    extra_s: int = 0


class Publisher:
    """Publishes calls. Calls of the same iteration of the event loop share one pipeline.

    A publish without a reply is repeated. The repetition sends nothing twice, because the record contains the nonce of
    the publish.
    """

    def __init__(self, connection: ScriptConnection, deployment: str, clock: SharedClock) -> None:
        self._connection = connection
        self._deployment = deployment
        self._clock = clock

    async def publish(self, call: CallMessage) -> None:
        """Put a call into its queue.

        Raises NotSent. Raises BrokerUnavailable: Redis refuses the call, or does not answer for SEND_WAIT_S. If the
        call may have been sent, the method waits for certainty, or until the deadline of the call. Until then, the
        call may still start.
        """
        keys, arguments = self._invocation(call)
        began = asyncio.get_running_loop().time()
        attempt, may_be_sent = 0, False
        while True:
            try:
                outcome = await self._post(keys, arguments)
                break
            except Unanswered as unanswered:
                may_be_sent = may_be_sent or unanswered.may_have_run
                if str(unanswered) == CLOSED:
                    raise BrokerUnavailable(
                        "the client was closed while it sent the call: the call may or may not act"
                    ) from None
                waited_s = asyncio.get_running_loop().time() - began
                if not may_be_sent and waited_s > SEND_WAIT_S:
                    raise BrokerUnavailable(
                        f"the call was not sent: Redis does not answer ({unanswered})"
                    ) from unanswered
            except RedisError as error:
                # Redis refused only the repetition. The first publish may have pushed the message.
                if not may_be_sent:
                    raise BrokerUnavailable(f"the call was not sent: Redis refuses it ({error})") from error
                log.warning("publish_not_known", call=call.call_id, error=str(error))
            if may_be_sent and self._clock() > call.start_by:
                return  # the caller forbids the call, or gets its result
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
        if outcome in _REFUSALS:
            raise NotSent(_REFUSALS[outcome])

    def _invocation(self, call: CallMessage) -> tuple[list[str], list[str | int]]:
        """Return the keys and arguments of the script."""
        keys = [
            call_key(self._deployment, call.tenant, call.call_id),
            call.queue,
            held_slots_key(self._deployment),
            tenant_calls_key(self._deployment, call.tenant),
        ]
        # The nonce must be unique, but need not be unpredictable.
        nonce = f"{call.attempt}:{random.getrandbits(64):x}"
        arguments: list[str | int] = [
            *(call.attempt, nonce, call.tool, call.text, call.task_id, call.ticket, call.slot, call.call_id),
        ]
        if call.session is not None and call.fence is not None:
            keys += [place_key(self._deployment, call.tenant, call.session), host_key(self._deployment, call.queue)]
            keys.append(tenant_sessions_key(self._deployment, call.tenant))
            arguments += [call.session, call.fence, call.extra_s]
        return keys, arguments

    async def _post(self, keys: list[str], arguments: list[str | int]) -> str:
        """Send the call once, and return the outcome. Raises RedisError: Redis refused the script. Raises Unanswered:
        the call may have been sent.
        """
        began = asyncio.get_running_loop().time()
        answer: bytes = await self._connection.run(_PUBLISH, keys, arguments)
        outcome, seconds, micros = answer.decode().split()
        if asyncio.get_running_loop().time() - began < CLOCK_ROUND_TRIP_S:
            self._clock.learn(int(seconds) + int(micros) / 1e6)
        return outcome
