"""The client that all sandboxes of an evaluation share, and the sessions that it has opened: one of each event loop."""

import asyncio
from weakref import WeakKeyDictionary

from contract.errors import ConfigError
from orchestrator.adapters.inspect_config import ToolcrewSandboxConfig
from orchestrator.dispatch.sessions import Session
from orchestrator.sdk.client import ToolClient
from orchestrator.settings import load_settings


class Crew:
    """Opened by the first who needs it. A task of its own holds the connection: Inspect begins and ends samples in
    other tasks than tasks.
    """

    def __init__(self) -> None:
        self._holder: asyncio.Task[None] | None = None
        self._client: asyncio.Future[ToolClient] | None = None
        self._told_to_end = asyncio.Event()
        self._sessions: dict[str, Session] = {}

    async def client(self) -> ToolClient:
        """Raises ConfigError, BrokerUnavailable, ToolFailure, each with what to do."""
        if self._holder is None or self._holder.done() or self._client is None:
            self._told_to_end = asyncio.Event()
            self._client = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(_hold(self._client, self._told_to_end))
        # Shielded: one sample that is cancelled while it waits takes nobody else's connection with it.
        return await asyncio.shield(self._client)

    async def open_session(self, config: ToolcrewSandboxConfig) -> Session:
        client = await self.client()
        session = await client.open_session(
            tenant=config.tenant, image=config.image, network=config.network, ttl_s=config.ttl_s
        )
        self._sessions[session.id] = session
        return session

    async def close_session(self, session: Session) -> None:
        """Returns when the sandbox is gone. One that could not be closed is tried again by `end`."""
        await session.close()
        self._sessions.pop(session.id, None)

    async def end(self, *, closes_sessions: bool) -> list[str]:
        """Close what is left open, then the connection; gives the errors. Nothing happens to sessions when
        `closes_sessions` is False: they live for their time. While a later use opens the connection again, another task
        of the same evaluation may go on."""
        left = list(self._sessions.values()) if closes_sessions else []
        told = await asyncio.gather(*(self.close_session(session) for session in left), return_exceptions=True)
        if self._holder is not None:
            self._told_to_end.set()
            await asyncio.gather(self._holder, return_exceptions=True)
            self._holder = None
        return [
            f"{session.id}: {error}"
            for session, error in zip(left, told, strict=True)
            if isinstance(error, BaseException)
        ]


async def _hold(client: "asyncio.Future[ToolClient]", told_to_end: asyncio.Event) -> None:
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
            await told_to_end.wait()
    except Exception as error:
        # Whoever waits for the client is told, whatever it was.
        if client.done():
            raise
        client.set_exception(error)


_CREWS: "WeakKeyDictionary[asyncio.AbstractEventLoop, Crew]" = WeakKeyDictionary()


def crew_of_loop() -> Crew:
    """That of the running loop. Raises ConfigError under trio."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "sandboxes of type toolcrew need asyncio: unset INSPECT_ASYNC_BACKEND, or set it to asyncio"
        ) from None
    return _CREWS.setdefault(loop, Crew())
