"""MCP sessions at servers over HTTP: one for each session of toolcrew and each server, whichever worker runs a call.

Invariant: an id is used only for the tenant, the session and the address for which a worker stored it. The signature
of the record covers all three, so a record that was copied to another session is not used.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from toolcrew.contract.errors import EnvelopeRefused
from toolcrew.contract.functions.session_state import SessionState
from toolcrew.contract.signing import SigningKeys
from toolcrew.workers.mcp.settings import HttpEntry

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServerSession:
    """A session at a server. `id`: the server's own name of the session. `revision`: of the protocol."""

    id: str
    revision: str


@dataclass(frozen=True)
class ServerSessions:
    """The MCP sessions of one session of toolcrew, by server. Every method blocks, and raises ToolFailure when Redis
    does not answer.
    """

    state: SessionState
    keys: SigningKeys
    owner: str
    """Tenant and session, as in the signature."""

    def find(self, server: str, entry: HttpEntry) -> ServerSession | None:
        """Return the stored session; None if there is none."""
        return self._read(server, entry, asyncio.run(self.state.get(server)))

    def keep(
        self, server: str, entry: HttpEntry, opened: ServerSession, instead_of: ServerSession | None
    ) -> ServerSession:
        """Store `opened`, unless another call has stored a session. Return the session that all calls use from now on.
        `instead_of`: a stored session that the server has lost.
        """
        sealed = self.keys.seal(self._purpose(server, entry), json.dumps([opened.id, opened.revision]))

        def choose(stored: object) -> object:
            session = self._read(server, entry, stored)
            return sealed if session is None or session == instead_of else stored

        return self._read(server, entry, asyncio.run(self.state.update(server, choose))) or opened

    def _read(self, server: str, entry: HttpEntry, stored: object) -> ServerSession | None:
        if not isinstance(stored, str):
            return None
        try:
            session, revision = json.loads(self.keys.unseal(self._purpose(server, entry), stored))
        except EnvelopeRefused:
            # The operator has changed the address or the secret, or another program has written the record.
            log.warning("mcp_session_refused", server=server, owner=self.owner)
            return None
        return ServerSession(session, revision)

    def _purpose(self, server: str, entry: HttpEntry) -> str:
        return f"mcp-session {self.owner} {server} {entry.url}"


OpenSessions = Callable[[str, str], ServerSessions]
"""Returns the MCP sessions of a tenant's session."""
