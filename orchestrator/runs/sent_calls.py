"""Records the running calls of runs in sessions that existed before them, so that they end with their run."""

from contextlib import suppress

from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.run_events import CallFinished, CallSent, OnEvent, RunEvent
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import build_cancel
from toolcrew.store.run_queue import RunClaim


class SentCalls:
    """The running calls of the runs of one process. The end of its own session ends the calls of any other run."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], set[str]] = {}
        """(tenant, run) -> ids of its running calls."""

    def watch(self, claim: RunClaim) -> OnEvent:
        """Return a listener that records the calls of a run."""
        if claim.record.item.environment.session is None:
            return lambda _: None
        calls = self._calls[claim.tenant, claim.run] = set()

        def record(event: RunEvent) -> None:
            if isinstance(event, CallSent):
                calls.add(event.call.id)
            elif isinstance(event, CallFinished):
                calls.discard(event.result.call_id)

        return record

    async def cancel(self, claim: RunClaim, dispatcher: Dispatcher) -> None:
        """Cancel the running calls of a run that does not continue."""
        session = claim.record.item.environment.session
        for call in self._calls.pop((claim.tenant, claim.run), ()):
            # If Redis does not answer, the call ends at its own time limit.
            with suppress(BrokerUnavailable):
                await dispatcher.send_order(build_cancel(call), claim.tenant, session)

    def forget(self, claim: RunClaim) -> None:
        """Forget a run: it has ended, or another process continues it."""
        self._calls.pop((claim.tenant, claim.run), None)
