"""Slots of the workers of all queues. One Lua script, which all orchestrators run, divides the slots between tenants
(docs/design.md).

Invariant: only the script grants a slot. Each run of the script is one atomic step. A step records which slots an
orchestrator requests and releases, and computes the resulting grants for every orchestrator. The script publishes the
grants of other orchestrators. Each call that has a slot or waits for one has a lease. If the orchestrator dies, these
leases end.
"""

import asyncio
import contextvars
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import admission_prefix, slots_key, tenants_key
from toolcrew.contract.signing import UNSEAL_LUA
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.scripts import CLOSED, ReplyMissing, Script, ScriptConnection
from toolcrew.store.tenants import PAUSE_LUA
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

Priority = Literal["interactive", "batch"]


class WaitReason(StrEnum):
    """The reason why a call has no slot yet. `slots`: the workers have no slot that the tenant may use now."""

    PAUSED = "paused"
    IN_FLIGHT = "in_flight"
    RATE = "rate"
    SLOTS = "slots"


@dataclass(frozen=True)
class SlotRequest:
    """A request to send one call. `queue`: the queue whose slots the call needs. `wait_s`: the maximum waiting time.
    `limit_s`: the maximum run time.

    `is_urgent`: the call frees a resource that others wait for (it closes a session), so it gets a slot at once.
    """

    tenant: str
    policy: TenantPolicy
    queue: str
    call_id: str
    tool: str
    priority: Priority
    wait_s: float
    limit_s: float
    is_urgent: bool = False


def count_slots_in_use(in_flight: int, slots: int) -> int:
    """Return how many of `slots` are in use when `in_flight` calls are in flight.

    Every page and command that shows slots in use must call this function. Admission sends more calls to a queue than
    it has slots, so that workers need not wait for the next message. The calls beyond `slots` are in flight, but use
    no slot.
    """
    return min(in_flight, slots)


# --- The script -------------------------------------------------------------------------------------------------------

LEASE_S = 20.0
"""Time, in seconds, after which a slot or a request for a slot ends if its orchestrator no longer renews it."""
PAIRS_AT_ONCE = 500
_FUNCTIONS = UNSEAL_LUA + PAUSE_LUA
_NAMES = ("prefix", "slots_prefix", "tenants", "this_orchestrator", "lease_s", "at", "operations_json")

Operation = Sequence[object]


def load_script() -> Script:
    """Return the Lua script that divides the slots."""
    return Script.load("slots_state.lua", "slots_operations.lua", args=_NAMES, functions=_FUNCTIONS)


def grants_channel(deployment: str, orchestrator: str) -> str:
    """Return the Redis channel of one orchestrator. On this channel, the orchestrator receives the slots that the
    script grants to its calls while another orchestrator runs the script.
    """
    return f"{admission_prefix(deployment)}grants:{orchestrator}"


def held_slots_key(deployment: str) -> str:
    """Return the key of the hash of calls that have a slot, by the id of their request."""
    return f"{admission_prefix(deployment)}held"


def script_arguments(
    deployment: str,
    orchestrator: str,
    operations: Iterable[Operation | Mapping[str, str]],
    *,
    lease_s: float = LEASE_S,
    now: float | None = None,
) -> dict[str, str]:
    """Return the arguments of one step, by their names. `now`: Unix seconds; None: the clock of Redis."""
    return {
        "prefix": admission_prefix(deployment),
        "slots_prefix": slots_key(deployment, ""),
        "tenants": tenants_key(deployment),
        "this_orchestrator": orchestrator,
        "lease_s": repr(lease_s),
        "at": "" if now is None else repr(now),
        # One text for all operations: Lua limits the number of arguments.
        "operations_json": json.dumps(list(operations), separators=(",", ":")),
    }


async def find_reasons(
    client: RedisClient, deployment: str, pairs: Collection[tuple[str, str]]
) -> dict[tuple[str, str], WaitReason]:
    """Return why calls wait for a slot, by tenant and queue. The functions of the step decide. Raises
    BrokerUnavailable.
    """
    script = Script.load("slots_state.lua", "slots_reasons.lua", args=_NAMES, functions=_FUNCTIONS)
    reasons, remaining = dict[tuple[str, str], WaitReason](), iter(pairs)
    while some := list(itertools.islice(remaining, PAIRS_AT_ONCE)):
        fields = [{"tenant": tenant, "queue": queue} for tenant, queue in some]
        with broker_errors("the reasons for waiting were not read"):
            reply = await script.run(client, **script_arguments(deployment, "", fields))
        reasons |= {pair: WaitReason(reason.decode()) for pair, reason in zip(some, reply, strict=True)}
    return reasons


def enqueue(call: str, request: SlotRequest) -> Operation:
    """Return the operation that requests a slot. `call`: `<orchestrator>.<suffix>`, unique for each request."""
    return ("enqueue", call, *_terms(request))


def restore(call: str, request: SlotRequest) -> Operation:
    """Return the operation that restores the slot of a call after Redis has lost its data."""
    return ("restore", call, *_terms(request))


def release(call: str, used_s: float) -> Operation:
    """Return the operation that releases the slot of a call, or its queue entry. `used_s` is 0 if the call did not
    run.
    """
    return ("release", call, used_s)


def renew(running: Sequence[str], waiting: Sequence[str]) -> Operation:
    """Return the operation that extends the leases of calls that have a slot or wait for one."""
    return ("renew", list(running), list(waiting))


def tick(queues: Iterable[str]) -> Operation:
    """Return the operation that checks these queues for free slots and grants them, because workers may have started or
    stopped.
    """
    return ("tick", *queues)


@dataclass(frozen=True)
class SlotReply:
    """The reply to one step. `granted`: calls of this orchestrator that have a slot. `refused`: calls that may not
    wait, with the seconds until the caller can try again. `waiting`: calls that the step queued, with the reason.
    `unknown`: renewed calls that Redis does not know. `wake_s`: seconds until the rate limit of some tenant allows its
    next call.
    """

    granted: tuple[str, ...]
    refused: dict[str, float]
    waiting: dict[str, WaitReason]
    unknown: tuple[str, ...]
    wake_s: float | None


def parse_reply(text: bytes | str) -> SlotReply:
    """Return the reply of the script. An empty table of Lua arrives as a JSON object, not as a list."""
    reply = json.loads(text)
    refused = {str(call): float(retry_after_s) for call, retry_after_s in reply["refused"]}
    waiting = {str(call): WaitReason(reason) for call, reason in reply["waiting"]}
    return SlotReply(tuple(reply["granted"]), refused, waiting, tuple(reply["unknown"]), reply.get("wake"))


def _terms(request: SlotRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    policy = request.policy
    call = {
        "tenant": request.tenant,
        "call": request.call_id,
        "queue": request.queue,
        "tool": request.tool,
        "limit": request.limit_s,
        "batch": request.priority == "batch",
        "urgent": request.is_urgent,
    }
    limits = {
        "weight": policy.weight,
        "in_flight": policy.in_flight,
        "queued": policy.queued,
        "rate": policy.rate_per_s or 0,
        "burst": policy.burst,
    }
    return call, limits


# --- Steps ------------------------------------------------------------------------------------------------------------

AT_ONCE = 200
"""Maximum number of operations in a step. Redis is blocked for some milliseconds during a step."""
RETRY_S = 0.5
STEP_DELAY_S = 0.003
"""Delay of a release, and of a request behind other requests of its tenant, to fill a step with more operations. In
seconds. No worker waits because of the delay, because a queue always has a few calls more than its workers have slots.
"""
OTHERS_AT_ONCE = 4

Clock = Callable[[], float]
OnReply = Callable[[SlotReply, frozenset[str]], None]
"""Function that receives the reply of Redis to a step, and the calls for which the step has requested slots."""
OnFailure = Callable[[str, frozenset[str]], None]
"""Function that receives the reason why Redis did not answer a step, and the calls whose requests may or may not have
arrived.
"""


@dataclass(frozen=True)
class _Step:
    """A step that was sent. `releases`, `requests`: the calls in the step, by operation. `size`: the number of
    operations.
    """

    arguments: dict[str, str]
    releases: frozenset[str]
    requests: frozenset[str]
    size: int
    is_repeated: bool = False


class SlotStore:
    """The steps of one orchestrator, one at a time. A release is repeated until Redis confirms it. All other
    operations are lost with a failed step, and the loss is reported.
    """

    def __init__(
        self,
        connection: ScriptConnection,
        deployment: str,
        orchestrator: str,
        on_reply: OnReply,
        on_failure: OnFailure,
        *,
        lease_s: float,
        clock: Clock | None,
    ) -> None:
        self._connection = connection
        self._script = load_script()
        self._deployment = deployment
        self._orchestrator = orchestrator
        self._lease_s = lease_s
        self._clock = clock
        self._on_reply = on_reply
        self._on_failure = on_failure
        self._requests: dict[str, SlotRequest] = {}
        self._releases: dict[str, float] = {}
        self._other_operations: list[Operation] = []
        self._next: asyncio.Handle | None = None
        """The scheduled step. None while a step is being sent, and while there is nothing to send."""
        self._is_sending = self._is_closed = self._is_hurried = False
        self._context = contextvars.Context()
        """An empty context: the log lines of a step must not have the context of the call that happened to start the
        step.
        """
        self._idle = asyncio.Event()
        self._idle.set()

    def ask(self, call: str, request: SlotRequest, *, is_early: bool = False, is_in_line: bool = False) -> bool:
        """Request a slot for a call. If the next step is delayed because Redis did not answer, it is sent now: the
        caller must learn at once that Redis is unavailable.

        `is_early`: send the step before this method returns, unless another step is being sent. `is_in_line`: other
        calls of the tenant already wait for the queue, so this request is not urgent. Return whether the request was
        sent.
        """
        # Until the step is sent, a caller that gives up removes its request from this dict, and Redis never receives
        # it.
        self._requests[call] = request
        self._is_hurried = self._is_hurried or not is_in_line
        is_sent_now = is_early and not self._is_sending
        if is_sent_now:
            self._stop_waiting()
            self._context.run(self._send)
        else:
            self._schedule()
        return is_sent_now

    def give_back(self, call: str, used_s: float) -> None:
        """Release the slot of a call, or withdraw the request for it."""
        # A request that was not sent yet needs no release.
        if self._requests.pop(call, None) is None:
            self._releases[call] = used_s
            self._schedule()

    def add(self, operation: Operation) -> None:
        """Send any other operation. Use this method only for operations that may be lost."""
        self._other_operations.append(operation)
        self._is_hurried = True
        self._schedule()

    def close(self) -> None:
        """Send no more steps."""
        self._is_closed = True
        self._stop_waiting()

    async def settle(self, within_s: float) -> None:
        """Wait until all operations are sent, at most `within_s` seconds."""
        waiting = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait({waiting}, timeout=within_s)
        waiting.cancel()

    def _schedule(self, delay_s: float = STEP_DELAY_S) -> None:
        """Send a step after `delay_s` seconds, or now if an operation is urgent."""
        self._idle.clear()
        if self._is_sending or self._is_closed:
            return
        if self._is_hurried and isinstance(self._next, asyncio.TimerHandle):
            self._stop_waiting()
        if self._next is None:
            loop = asyncio.get_running_loop()
            if self._is_hurried:
                self._next = loop.call_soon(self._send, context=self._context)
            else:
                self._next = loop.call_later(delay_s, self._send, context=self._context)

    def _stop_waiting(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _send(self) -> None:
        """Send one step. Releases come first, so that the requests of the same step can use their slots."""
        # Send one step at a time, so that a release cannot overtake the request of the same call, and a busy Redis does
        # not get more work.
        self._next, self._is_sending, self._is_hurried = None, True, False
        self._idle.clear()
        releases = dict(itertools.islice(self._releases.items(), AT_ONCE))
        requests = dict(itertools.islice(self._requests.items(), AT_ONCE - len(releases)))
        other_operations, self._other_operations = (
            self._other_operations[:OTHERS_AT_ONCE],
            self._other_operations[OTHERS_AT_ONCE:],
        )
        # Requests leave the list when they are sent, and releases only when they are confirmed. A request that is sent
        # twice could be granted after its caller has left; a release that is sent twice does nothing.
        for call in requests:
            del self._requests[call]
        operations = [
            *(release(call, used_s) for call, used_s in releases.items()),
            *other_operations,
            *(enqueue(call, request) for call, request in requests.items()),
        ]
        now = self._clock() if self._clock is not None else None
        arguments = script_arguments(self._deployment, self._orchestrator, operations, lease_s=self._lease_s, now=now)
        self._run(_Step(arguments, frozenset(releases), frozenset(requests), len(operations)))

    def _run(self, step: "_Step") -> None:
        self._connection.run(self._script, **step.arguments).add_done_callback(
            partial(self._take_answer, step), context=self._context
        )

    def _take_answer(self, step: "_Step", done: "asyncio.Future[bytes]") -> None:
        error = done.exception()
        if isinstance(error, ReplyMissing) and error.may_have_run and not step.is_repeated:
            # The connection may have been lost before Redis ran the step, and repeating a step is safe. Repeat it only
            # once, because the callers must learn soon that Redis does not answer.
            self._run(replace(step, is_repeated=True))
            return
        self._is_sending = False
        if error is not None:
            reason = str(error) or type(error).__name__
            if reason != CLOSED:
                log.warning("admission_unanswered", operations=step.size, error=reason)
            self._on_failure(reason, step.requests)
        else:
            # A release stays queued until Redis confirms it. A lost release would occupy the slot until the lease
            # ends.
            for call in step.releases:
                self._releases.pop(call, None)
            self._on_reply(parse_reply(done.result()), step.requests)
        if self._requests or self._releases or self._other_operations:
            # The caller of a new request must learn at once that Redis is unavailable.
            self._is_hurried = self._is_hurried or (error is not None and bool(self._requests))
            self._schedule(RETRY_S if error is not None else STEP_DELAY_S)
        else:
            self._idle.set()


# --- Grants -----------------------------------------------------------------------------------------------------------

CHECK_INTERVAL_S = 5.0
RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class GrantListener:
    """A subscription to grants. Pub/sub delivers each message at most once. `on_gap` is called after every new
    subscription, because messages may have been missed.
    """

    def __init__(
        self, client: RedisClient, channel: str, on_grants: Callable[[Sequence[str]], None], on_gap: Callable[[], None]
    ) -> None:
        self._client = client
        self._channel = channel
        self._on_grants = on_grants
        self._on_gap = on_gap

    async def run(self) -> None:
        """Receive grants and pass them on until the task is cancelled."""
        failures = 0
        while True:
            try:
                with broker_errors("granted slots are not received"):
                    async with self._client.pubsub() as pubsub:
                        await pubsub.subscribe(self._channel)
                        while True:
                            message = await pubsub.get_message(timeout=CHECK_INTERVAL_S)
                            if message is not None:
                                failures = 0
                                self._take(message)
            except BrokerUnavailable as error:
                if failures == 0:
                    log.warning("admission_connection_lost", error=str(error))
                await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S) - 1)])
                failures += 1

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            # Checked after the subscription is active. An earlier check could miss a grant before the subscription.
            self._on_gap()
        elif message["type"] == "message":
            try:
                calls = [str(call) for call in json.loads(message["data"])]
            except (ValueError, TypeError):
                # Any process may publish here. The next renewal reports a grant that was lost with this message.
                log.error("admission_grants_unreadable", size=len(message["data"]))
                return
            self._on_grants(calls)
