"""The client that all sandboxes of an Inspect evaluation share, and the sessions that it opened. Each event loop has
one client.
"""

import asyncio
from weakref import WeakKeyDictionary

from toolcrew.contract.calls import pick_fields
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.adapters.inspect_config import ToolcrewSandboxConfig
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session


class SharedClient:
    """Shared client, which connects at the first use. A separate task owns the connection, because Inspect starts and
    ends samples in different tasks than evaluations.
    """

    def __init__(self) -> None:
        self._connection_task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[ToolClient] | None = None
        self._end_requested = asyncio.Event()
        self._sessions: dict[str, Session] = {}

    async def client(self) -> ToolClient:
        """Return the connected client. Raises ConfigError, BrokerUnavailable, ToolFailure, each with the remedy."""
        if self._connection_task is None or self._connection_task.done() or self._client is None:
            self._end_requested = asyncio.Event()
            self._client = asyncio.get_running_loop().create_future()
            self._connection_task = asyncio.create_task(_keep_connected(self._client, self._end_requested))
        # The shield: the cancellation of one sample must not cancel the connection for which other samples wait.
        return await asyncio.shield(self._client)

    async def open_session(self, config: ToolcrewSandboxConfig) -> Session:
        client = await self.client()
        session = await client.open_session_from(pick_fields(SessionSpec, config), tenant=config.tenant)
        self._sessions[session.id] = session
        return session

    async def close_session(self, session: Session) -> None:
        """Close a session and return when its sandbox is removed. If the removal fails, `end` tries again."""
        await session.close()
        self._sessions.pop(session.id, None)

    async def end(self, *, closes_sessions: bool) -> list[str]:
        """Close the open sessions and then the connection. Return the errors. `closes_sessions` False: leave the
        sessions open until they expire. Another task of the same evaluation may continue; a later use connects again.
        """
        sessions = list(self._sessions.values()) if closes_sessions else []
        results = await asyncio.gather(*(self.close_session(session) for session in sessions), return_exceptions=True)
        if self._connection_task is not None:
            self._end_requested.set()
            await asyncio.gather(self._connection_task, return_exceptions=True)
            self._connection_task = None
        return [
            f"{session.id}: {error}"
            for session, error in zip(sessions, results, strict=True)
            if isinstance(error, BaseException)
        ]


async def _keep_connected(client: "asyncio.Future[ToolClient]", end_requested: asyncio.Event) -> None:
    settings = load_settings()
    try:
        if settings.redis_url is None:
            raise ConfigError(
                "sandboxes of type toolcrew need a running pool: set TOOLCREW_REDIS_URL (`toolcrew up` starts one and "
                "prints it)"
            )
        key = settings.api_key.get_secret_value() if settings.api_key is not None else None
        async with ToolClient.connect(settings=settings, api_key=key) as connected:
            client.set_result(connected)
            await end_requested.wait()
    except Exception as error:
        # All tasks that wait for the client have already received the error.
        if client.done():
            raise
        client.set_exception(error)


_CLIENTS: "WeakKeyDictionary[asyncio.AbstractEventLoop, SharedClient]" = WeakKeyDictionary()


def client_of_loop() -> SharedClient:
    """Return the shared client of the running loop. Raises ConfigError under trio."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "sandboxes of type toolcrew need asyncio: unset INSPECT_ASYNC_BACKEND, or set it to asyncio"
        ) from None
    return _CLIENTS.setdefault(loop, SharedClient())
