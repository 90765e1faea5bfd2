"""Ends a call from anywhere: one that waits never begins, one that runs is killed where it runs; and it is known how it
ended.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass

from contract.calls import ToolCall
from contract.errors import ErrorCode, OperatorError, ToolFailure
from contract.hosts import parse_holder
from orchestrator.dispatch.pool_connection import PoolConnection
from orchestrator.terminal.commands import build_command
from store.audit import Actor, build_entry, entry_text
from store.call_life import unknown_call
from store.calls import MAX_REASON_CHARS, CallRecord, CallState, CallStore, KillOrder

HEARD_S = 5.0
"""So long a call of which nothing is known is looked for among the programs: each looks every half second for what it
is to end.
"""
GLANCE_S = 0.75
"""The same, for one that not even admission knows: only a program that is about to ask for its slot could have it."""
ENDED_S = 30.0
"""Longer than the end of a call takes whose processes do not want to end: its sandbox is removed then."""
ORDER_AGAIN_S = 1.0
"""An order may come to the host before the call does."""
LOOK_S = 0.05


@dataclass(frozen=True)
class KilledCall:
    """A call that has ended. `was_over`: before anybody killed it."""

    record: CallRecord
    was_over: bool


class CallControl:
    """Ends calls of one deployment."""

    def __init__(self, pool: PoolConnection, deployment: str) -> None:
        self._dispatcher = pool.dispatcher
        self._calls = CallStore(pool.redis, deployment)

    async def kill(
        self, tenant: str, call_id: str, actor: Actor, reason: str = "", *, heard_s: float | None = None
    ) -> KilledCall:
        """Returns when the call has ended. Its caller gets CANCELLED with who did it and `reason`, unless it ended by
        itself just then. `heard_s`: so long one of which nothing is known is looked for among the programs; None:
        HEARD_S.

        Raises ToolFailure(INVALID_ARGUMENTS) for a call of which nothing is known, or a reason that is too long;
        OperatorError when the call has not ended after half a minute, BrokerUnavailable.
        """
        heard_s = HEARD_S if heard_s is None else heard_s
        order = _build_order(tenant, call_id, actor, reason)
        before = await self._calls.find(tenant, call_id)
        # One that was lost may be sent again, until it is killed.
        if before is not None and before.state.has_ended and before.state is not CallState.LOST and not before.killed:
            return KilledCall(before, was_over=True)
        began = time.monotonic()
        while True:
            state = await self._calls.kill(order)
            record = await self._calls.find(tenant, call_id)
            if record is not None and record.state is CallState.RUNNING:
                await self._tell_holder(tenant, call_id, record)
            record = await self._ended(tenant, call_id, heard_s if state is None else ORDER_AGAIN_S)
            if record is not None:
                return KilledCall(record, was_over=False)
            waited_s = time.monotonic() - began
            if state is None and waited_s >= heard_s:
                raise unknown_call(call_id, tenant)
            if waited_s > ENDED_S:
                raise OperatorError(
                    f"call {call_id} was told to end and has not after {ENDED_S:g} s: "
                    f"see `{build_command('calls', 'show', call_id, tenant=tenant)}` and `toolcrew hosts list`"
                )

    async def _tell_holder(self, tenant: str, call_id: str, record: CallRecord) -> None:
        """Whoever runs the call reads orders at once, however busy it is."""
        queue, _ = parse_holder(record.holder)
        order = ToolCall(id=secrets.token_hex(16), name="session.cancel", arguments={"call_id": call_id})
        await self._dispatcher.command(order, tenant, record.session or None, queue or record.queue)

    async def _ended(self, tenant: str, call_id: str, within_s: float) -> CallRecord | None:
        """The record of a call that is over within a moment; None: not yet."""
        until = time.monotonic() + min(within_s, ORDER_AGAIN_S)
        while time.monotonic() < until:
            record = await self._calls.find(tenant, call_id)
            if record is not None and record.state.has_ended:
                return record
            await asyncio.sleep(LOOK_S)
        return None


def _build_order(tenant: str, call_id: str, actor: Actor, reason: str) -> KillOrder:
    if len(reason) > MAX_REASON_CHARS:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the reason has {len(reason)} characters: give at most {MAX_REASON_CHARS}"
        )
    entry = build_entry(actor, "call.kill", call_id, tenant=tenant, details={"reason": reason})
    try:
        return KillOrder(tenant=tenant, call=call_id, by=actor.label(), reason=reason, entry=entry_text(entry))
    except ValueError:
        raise unknown_call(call_id, tenant) from None
