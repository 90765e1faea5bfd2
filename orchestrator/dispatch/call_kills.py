"""Orders to end a call (store/calls.py), as the program that makes the call obeys them, wherever the call waits."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from contract.calls import ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.ledger import CallState
from orchestrator.dispatch.transport import DeliveryFailed
from store.calls import CallStore
from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_S = 0.5
"""How often a program with calls on their way looks whether one of them is to be ended."""


@dataclass
class _Underway:
    """A call that this program makes. `killed`: why its task was told to stop."""

    task: "asyncio.Task[Any]"
    cancelling: int
    killed: str = ""


class KillWatch:
    """Ends the calls of this program that are to be ended and have not begun; those that run are ended where they run,
    and their results come as ever.
    """

    def __init__(self, calls: CallStore) -> None:
        self._store = calls
        self._calls: dict[tuple[str, str], _Underway] = {}
        self._watch: asyncio.Task[None] | None = None
        self._seen_at = 0.0

    @contextmanager
    def over(self, tenant: str, call_id: str) -> Iterator[None]:
        """While the block makes the call. Raises ToolFailure(CANCELLED) from whatever it waits for when the call is to
        be ended and has not begun.
        """
        task = asyncio.current_task()
        key = (tenant, call_id)
        if task is None or key in self._calls:
            # The id is in use: that call is the one that is meant.
            yield
            return
        underway = self._calls[key] = _Underway(task, task.cancelling())
        if self._watch is None:
            self._watch = begin_shared(self._run(), "kills")
        try:
            yield
        except asyncio.CancelledError:
            if underway.killed and task.uncancel() <= underway.cancelling:
                raise _never_run(underway.killed) from None
            raise
        finally:
            del self._calls[key]

    async def watched(self, tenant: str, call_id: str, work: Awaitable[ToolResult]) -> ToolResult:
        """The result of the call that `work` makes; of one that was killed it says by whom and why. Raises as `work`
        does.
        """
        try:
            with self.over(tenant, call_id):
                result = await work
        except DeliveryFailed as failed:
            await self._explain(tenant, call_id, failed)
            raise
        return await self._explained(tenant, result)

    async def _explained(self, tenant: str, result: ToolResult) -> ToolResult:
        """The result, telling who killed the call, if somebody did."""
        was_ended = result.metadata.get("cancelled") is True
        if result.error_code is not ErrorCode.CANCELLED and not was_ended:
            return result
        told, _ = await self._reason(tenant, result.call_id)
        if not told:
            return result
        words = f"{told}; {result.error or 'its processes were ended'}"
        return result.model_copy(update={"success": False, "error_code": ErrorCode.CANCELLED, "error": words})

    async def _explain(self, tenant: str, call_id: str, failed: DeliveryFailed) -> None:
        """Raises what tells of the kill instead of the failure, when that is what came of one; whether the call may
        have acted is told as before.
        """
        told, has_never_begun = await self._reason(tenant, call_id)
        if has_never_begun and told:
            raise _never_run(told) from failed
        if told:
            raise DeliveryFailed(failed.code, f"{told}; {failed.message}") from failed

    async def _reason(self, tenant: str, call_id: str) -> tuple[str, bool]:
        """Return who killed a call and why, and whether it never began; "" when it was not killed, or Redis does not
        answer.
        """
        try:
            return await self._store.kill_reason(tenant, call_id)
        except BrokerUnavailable as error:
            log.warning("kill_not_known", call=call_id, error=str(error))
            return "", False

    async def aclose(self) -> None:
        """Watch no more."""
        if self._watch is not None:
            await cancel_all((self._watch,))

    async def look(self) -> None:
        """One round. Raises BrokerUnavailable."""
        for at, order in await self._store.recent_kills(self._seen_at):
            underway = self._calls.get((order.tenant, order.call))
            if underway is not None and not underway.killed:
                state = await self._store.kill(order, is_ours=True)
                if state is CallState.FORBIDDEN and self._calls.get((order.tenant, order.call)) is underway:
                    underway.killed = order.describe()
                    underway.task.cancel()
            self._seen_at = max(self._seen_at, at)

    async def _run(self) -> None:
        """As long as there are calls: one that is over soon costs no look at all."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if not self._calls:
                    return
                try:
                    await self.look()
                except BrokerUnavailable as error:
                    log.warning("kills_not_heard", error=str(error))
        finally:
            self._watch = None
            # What is begun later may have been killed before: a run that goes on elsewhere makes its call again.
            self._seen_at = 0.0


def _never_run(told: str) -> ToolFailure:
    return ToolFailure(ErrorCode.CANCELLED, f"{told}; it had not begun, and was not run")
