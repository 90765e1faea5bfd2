"""The session that a call is made in: one that is named, one of the connection, or one of the call's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from orchestrator.dispatch.sessions import Session
from orchestrator.http.session_cache import SessionCache
from orchestrator.sdk.client import ToolClient

NEW = "new"
"""In place of a session's name: one is opened, and stays open after the call."""


class Leases(Protocol):
    """Where the calls of one caller get their sessions. All raise as `ToolClient.session` and `open_session` do."""

    def lease(self, wanted: str | None) -> AbstractAsyncContextManager[tuple[Session, str | None]]:
        """For one call: the session, and its id where it is open after the call. `wanted`: its id, NEW, or None where
        none was named.
        """
        ...

    async def attached(self, wanted: str | None) -> Session | None:
        """The session that is there already, None when there is none yet."""
        ...

    def forget(self, wanted: str | None) -> None:
        """A call found the session gone."""
        ...


class KeyLeases:
    """Of one API key, over HTTP: sessions are named by the request, and any replica finds them. A call that names none
    has one of its own.
    """

    def __init__(self, known: SessionCache, client: ToolClient, key_id: str) -> None:
        self._known, self._client, self._key_id = known, client, key_id

    @asynccontextmanager
    async def lease(self, wanted: str | None) -> AsyncIterator[tuple[Session, str | None]]:
        if wanted is None:
            async with await self._client.open_session() as session:
                yield session, None
        elif wanted == NEW:
            async with AsyncExitStack() as stack:
                session = await stack.enter_async_context(await self._client.open_session())
                yield session, session.id
                # Only now will the caller know of it: one that broke off would never close it.
                stack.pop_all()
        else:
            yield await self._find(wanted), wanted

    async def attached(self, wanted: str | None) -> Session | None:
        return await self._find(wanted) if wanted not in (None, NEW) else None

    def forget(self, wanted: str | None) -> None:
        if wanted is not None:
            self._known.forget(self._name(wanted))

    async def _find(self, wanted: str) -> Session:
        return await self._known.find(self._name(wanted), lambda: self._client.session(wanted))

    def _name(self, wanted: str) -> tuple[str, str, str]:
        return (self._client.tenant, wanted, self._key_id)


class ConnectionLeases:
    """Of one connection, over stdio: its calls share a session, opened with the first of them and closed with the
    connection.
    """

    def __init__(self, client: ToolClient, first: str | None = None) -> None:
        """`first`: a session that is open, and stays open; None: one is opened."""
        self._client, self._first = client, first
        self._own: Session | None = None
        self._opened = list[Session]()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def lease(self, wanted: str | None) -> AsyncIterator[tuple[Session, str | None]]:
        if wanted == NEW:
            session = await self._open()
        elif wanted is not None:
            session = await self._client.session(wanted)
        else:
            async with self._turn:
                self._own = session = self._own or await self._begin()
        yield session, session.id

    async def attached(self, wanted: str | None) -> Session | None:
        if wanted in (None, NEW):
            return self._own or (await self._client.session(self._first) if self._first is not None else None)
        return await self._client.session(wanted)

    def forget(self, wanted: str | None) -> None:
        if wanted is None:
            self._own = None

    async def close(self) -> None:
        """Close what was opened for the connection."""
        async with AsyncExitStack() as stack:
            for session in self._opened:
                stack.push_async_callback(session.close)

    async def _begin(self) -> Session:
        return await self._client.session(self._first) if self._first is not None else await self._open()

    async def _open(self) -> Session:
        session = await self._client.open_session()
        self._opened.append(session)
        return session
