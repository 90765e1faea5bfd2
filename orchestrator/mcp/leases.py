"""Sessions for the calls of MCP clients: a named session, the session of the connection, or a session for one call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from toolcrew.orchestrator.http.session_cache import SessionCache
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sdk.tenant_client import TenantClient, TenantSession
from toolcrew.orchestrator.sessions.session import Session

NEW = "new"
"""Value that a client sends as the session id to open a new session, which stays open after the call."""


class SessionLeases(Protocol):
    """Provides sessions for the calls of one caller. All methods raise like `ToolClient.session` and `open_session`."""

    def lease(self, session_id: str | None) -> AbstractAsyncContextManager[tuple[TenantSession, str | None]]:
        """Context manager that provides the session for one call, and the id of the session if it stays open after the
        call. `session_id`: an id, NEW, or None if the request names no session.
        """
        ...

    async def attached(self, session_id: str | None) -> TenantSession | None:
        """Return the session with that id if the session is already open; None if a new session must be opened."""
        ...

    def forget(self, session_id: str | None) -> None:
        """Forget a session, because a call failed with SESSION_NOT_FOUND."""
        ...


class KeyLeases:
    """Sessions of one API key, over HTTP. The request names the session, and every replica finds it. A call without a
    name gets its own session.
    """

    def __init__(self, cache: SessionCache, client: ToolClient, key_id: str) -> None:
        self._cache = cache
        self._client = client
        self._key_id = key_id

    @asynccontextmanager
    async def lease(self, session_id: str | None) -> AsyncIterator[tuple[Session, str | None]]:
        if session_id is None:
            async with await self._client.open_session() as session:
                yield session, None
        elif session_id == NEW:
            async with AsyncExitStack() as stack:
                session = await stack.enter_async_context(await self._client.open_session())
                yield session, session.id
                # The caller gets the id of the new session with the result. If the call raises an exception before, the
                # session is closed, because the caller does not know the id and could not close it.
                stack.pop_all()
        else:
            yield await self._find(session_id), session_id

    async def attached(self, session_id: str | None) -> Session | None:
        return await self._find(session_id) if session_id not in (None, NEW) else None

    def forget(self, session_id: str | None) -> None:
        if session_id is not None:
            self._cache.forget(self._name(session_id))

    async def _find(self, session_id: str) -> Session:
        return await self._cache.find(self._name(session_id), lambda: self._client.session(session_id))

    def _name(self, session_id: str) -> tuple[str, str, str]:
        return (self._client.tenant, session_id, self._key_id)


class ConnectionLeases:
    """Sessions of one connection, over stdio. Its calls share one session, which is opened with the first call and
    closed with the connection.
    """

    def __init__(self, client: TenantClient, first: str | None = None) -> None:
        """Create the sessions. `first`: the id of an open session, which stays open; None: a new session is opened."""
        self._client = client
        self._first = first
        self._own: TenantSession | None = None
        self._opened = list[TenantSession]()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def lease(self, session_id: str | None) -> AsyncIterator[tuple[TenantSession, str | None]]:
        if session_id == NEW:
            session = await self._open()
        elif session_id is not None:
            session = await self._client.session(session_id)
        else:
            async with self._turn:
                self._own = session = self._own or await self._begin()
        yield session, session.id

    async def attached(self, session_id: str | None) -> TenantSession | None:
        if session_id in (None, NEW):
            return self._own or (await self._client.session(self._first) if self._first is not None else None)
        return await self._client.session(session_id)

    def forget(self, session_id: str | None) -> None:
        if session_id is None:
            self._own = None

    async def close(self) -> None:
        """Close the sessions that were opened for the connection."""
        async with AsyncExitStack() as stack:
            for session in self._opened:
                stack.push_async_callback(session.close)

    async def _begin(self) -> TenantSession:
        return await self._client.session(self._first) if self._first is not None else await self._open()

    async def _open(self) -> TenantSession:
        session = await self._client.open_session()
        self._opened.append(session)
        return session
