"""Opens and closes the sessions of items. The log of a run names each session before it is opened, so that another
process can remove it.
"""

from contextlib import suppress

from toolcrew.concurrency.tasks import Backoff, retry_until_available
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.run_events import SessionOpened, SessionOpening, StateForking, StateKept
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.session_locator import new_session_name
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.run_slots import RunSlots
from toolcrew.orchestrator.runs.session_queue import SessionQueue
from toolcrew.orchestrator.sessions.session import Session, SessionInfo
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

BUSY_S = 10.0
"""Seconds that the fork of a session waits while a checkpoint or a call of another program runs in the session."""


class ItemSessions:
    """Opens, keeps and closes the sessions of the items that one process runs."""

    def __init__(self, pool: PoolConnection, slots: RunSlots) -> None:
        self._pool = pool
        self._slots = slots
        self._queue = SessionQueue(pool.dispatcher.capacity)

    async def open(self, tenant: str, journal: Journal, spec: SessionSpec) -> Session:
        """Open a session as soon as a host has free capacity. Raises the same errors as Session.open."""
        name, pool = new_session_name(), self._pool
        async with self._slots.lend():
            async with self._queue.enter(tenant, spec.image):
                await journal.record(SessionOpening, session=name)
                session = await Session.open(pool.dispatcher, pool.blobs, tenant=tenant, spec=spec, name=name)
            info = (await session.info()).model_dump(mode="json")
            await journal.record(SessionOpened, session=name, info=info)
        return session

    def resume(self, tenant: str, info: object) -> Session:
        """Return the open session that a log describes. `info`: the field `info` of the SessionOpened event."""
        return Session(self._pool.dispatcher, self._pool.blobs, tenant, SessionInfo.model_validate(info))

    async def close(self, session: Session) -> None:
        """Close the session. If the sandbox cannot be removed now, the outcome of the item does not change, and the
        host is asked again later.
        """
        try:
            await retry_until_available(session.close)
        except (OperatorError, ToolFailure) as error:
            log.warning("session_not_closed", session=session.id, error=str(error))
            await self._abandon(session.tenant, session.id)
        self._queue.record_end()

    async def keep_state(self, session: Session, journal: Journal) -> str:
        """Keep the state of the session after the steps in the log, unless the state is already kept. Return the reason
        if the state cannot be kept; "" otherwise. Raises BrokerUnavailable.
        """
        step, last = journal.steps, journal.state
        if isinstance(last, StateForking):
            # An earlier process died while it made the fork. The host closes the fork, if there is one.
            await retry_until_available(lambda: self._pool.dispatcher.forget_sessions(session.tenant, [last.session]))
        elif last is not None and last.step == step:
            return ""
        name, problem, backoff = "", "", Backoff(BUSY_S)
        while not name:
            try:
                name = await retry_until_available(lambda: self._fork(session, journal, step))
            except (ToolFailure, OperatorError) as error:
                if isinstance(error, BrokerUnavailable):
                    raise
                problem = str(error)
                if error.code not in (ErrorCode.SESSION_BUSY, ErrorCode.RATE_LIMITED) or not await backoff.wait():
                    break
        problem = "" if name else problem
        await journal.record(StateKept, step=step, session=name, problem=problem)
        return problem

    async def _fork(self, session: Session, journal: Journal, step: int) -> str:
        """Fork the session once. Return the name of the fork, which is new in each attempt: a failed one is closed."""
        name = new_session_name()
        await journal.record(StateForking, step=step, session=name)
        await session.fork_as([name], leave_jobs=True)
        return name

    async def release_states(self, tenant: str, journal: Journal) -> None:
        """Close the kept states of a run that does not continue. If Redis stays unavailable, they expire later."""
        with suppress(OperatorError, ToolFailure):
            await retry_until_available(lambda: self._pool.dispatcher.forget_sessions(tenant, journal.states))

    async def abandon_last(self, tenant: str, journal: Journal) -> None:
        """Order the host to close the last session that the log names, without waiting for it. If Redis stays
        unavailable or the tenant was removed, the sandbox expires later.
        """
        name = journal.opening or (journal.session.session if journal.session is not None else None)
        if name is not None:
            await self._abandon(tenant, name)

    async def _abandon(self, tenant: str, session: str) -> None:
        with suppress(OperatorError, ToolFailure):
            await retry_until_available(lambda: self._pool.dispatcher.abandon_session(tenant, session))
