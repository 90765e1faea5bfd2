"""Open a session once for each key that a client chooses, no matter how many callers ask and which of them die."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.session_locator import new_session_name
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.api_keys import Credential
from toolcrew.store.blobs import Blobs
from toolcrew.store.session_keys import OPENING_S, SessionKeys
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

POLL_S = 0.2
MAX_KEY_CHARS = 512


class KeyedSessions:
    """The sessions that clients open with keys."""

    def __init__(
        self, keys: SessionKeys, dispatcher: Dispatcher, blobs: Blobs, credential: Credential | None = None
    ) -> None:
        self._keys = keys
        self._dispatcher = dispatcher
        self._blobs = blobs
        self._credential = credential

    async def open(self, tenant: str, key: str, spec: SessionSpec) -> Session:
        """Return the session of the key. Open it if there is none, and wait while another caller opens it.

        Raises ToolFailure: INVALID_ARGUMENTS (the key is empty or too long, or was used with other options),
        SESSION_NOT_FOUND (the session of the key has ended). Raises the errors of Session.open.
        """
        if not 0 < len(key) <= MAX_KEY_CHARS:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"the key of a session is invalid: use 1 to {MAX_KEY_CHARS} characters"
            )
        digest = hashlib.sha256(spec.model_dump_json().encode("utf-8", "surrogatepass")).hexdigest()
        while True:
            name = new_session_name()
            claim = await self._keys.claim(tenant, key, digest, name)
            if claim.state == "open":
                return await self._attach(tenant, claim.session)
            if claim.state == "claimed":
                await self._dispatcher.forget_sessions(tenant, [claim.abandoned] if claim.abandoned else [])
                session = await self._open(tenant, key, spec, name)
                if session is not None:
                    return session
            await asyncio.sleep(POLL_S)

    async def _attach(self, tenant: str, session: str) -> Session:
        try:
            return await Session.attach(
                self._dispatcher,
                self._blobs,
                tenant=tenant,
                session=session,
                credential=self._credential,
                is_guest=False,
            )
        except ToolFailure as failure:
            if failure.code is not ErrorCode.SESSION_NOT_FOUND:
                raise
            raise ToolFailure(
                ErrorCode.SESSION_NOT_FOUND,
                f"the session of this key ({session}) was closed or has expired: use a new key for a new session",
            ) from failure

    async def _open(self, tenant: str, key: str, spec: SessionSpec, name: str) -> Session | None:
        """Open the session that this caller has claimed. Return None if another caller has claimed the key since."""
        async with self._renewed(tenant, key, name):
            try:
                session = await Session.open(
                    self._dispatcher, self._blobs, tenant=tenant, spec=spec, credential=self._credential, name=name
                )
            except BaseException:
                with contextlib.suppress(BrokerUnavailable):
                    await asyncio.shield(self._keys.release(tenant, key, name))
                raise
        if await self._keys.confirm(tenant, key, name):
            return session
        await session.close()
        return None

    @contextlib.asynccontextmanager
    async def _renewed(self, tenant: str, key: str, name: str) -> AsyncIterator[None]:
        """Renew the claim to the key during the block."""
        task = asyncio.ensure_future(self._renew_regularly(tenant, key, name))
        try:
            yield
        finally:
            await cancel_all((task,))

    async def _renew_regularly(self, tenant: str, key: str, name: str) -> None:
        while True:
            await asyncio.sleep(OPENING_S / 3)
            try:
                await self._keys.renew(tenant, key, name)
            except BrokerUnavailable as error:
                log.warning("session_key_not_renewed", session=name, error=str(error))
