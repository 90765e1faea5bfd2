"""Addresses of ports of a session's sandbox, and the listener that serves them."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.previews import (
    DEFAULT_PREVIEW_S,
    MAX_PREVIEW_S,
    TICKET_PARAMETER,
    PreviewSite,
    PreviewTicket,
    seal_preview_ticket,
)
from toolcrew.contract.session_views import PreviewView
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.api.sessions import SessionId, use_session
from toolcrew.orchestrator.http.app_state import ConnectedParts
from toolcrew.orchestrator.previews.front import PreviewFront
from toolcrew.orchestrator.streams import Stream, StreamTarget
from toolcrew.store.previews import Preview, PreviewStore
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], responses=responses())


RECORD_EVERY_S = 600.0
_MAX_RECORDED = 10_000


class NewPreview(BaseModel):
    """An address of a port. `ttl_s`: seconds for which the address is valid."""

    model_config = ConfigDict(extra="forbid")

    ttl_s: float = Field(default=DEFAULT_PREVIEW_S, ge=1, le=MAX_PREVIEW_S)


@router.post("/{session_id}/ports/{port}", status_code=201, responses=responses(404))
async def expose_port(
    session_id: SessionId, port: Annotated[int, Path(ge=1, le=65_535)], body: NewPreview, caller: AnyCaller
) -> PreviewView:
    """Return an address at which browsers and programs reach a port of the sandbox, over HTTP and WebSocket. The class
    of the tenant must allow previews.
    """
    settings, pool = caller.app_state.settings, caller.app_state.parts.pool
    session = await use_session(caller, session_id)
    access = (await session.info()).previews
    if access == "none":
        raise ToolFailure(
            ErrorCode.PERMISSION_DENIED,
            "the class of this tenant has no previews: ask the operator to set `previews` of the class, and open "
            "another session then",
        )
    site = caller.app_state.previews
    if site is None:
        raise ConfigError(
            "this service has no address for previews: the operator starts `toolcrew serve api` with --previews-url"
        )
    record = Preview(tenant=session.tenant, session=session.id, access=access, actor=caller.identity.actor())
    preview = await PreviewStore(pool.redis, settings.deployment, pool.keys).keep(record, body.ttl_s)
    expires_at = time.time() + body.ttl_s
    url = f"{site.build_address(preview, port)}/"
    if access == "token":
        ticket = PreviewTicket(preview=preview, port=port, expires_at=expires_at)
        url += f"?{TICKET_PARAMETER}={seal_preview_ticket(pool.keys, ticket)}"
    return PreviewView(url=url, access=access, expires_at=expires_at)


class RecordedPorts:
    """Decides which connections to ports are in the audit log. Each request of a visitor can be a connection, so an
    entry for each would displace the other entries of the actor's stream.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recorded_at: dict[tuple[str, str, int], float] = {}

    def is_due(self, target: StreamTarget, port: int) -> bool:
        """Return whether a connection is the first one to the port in RECORD_EVERY_S seconds."""
        key, now = (target.tenant, target.session, port), self._clock()
        if now - self._recorded_at.get(key, float("-inf")) < RECORD_EVERY_S:
            return False
        self._recorded_at.pop(key, None)
        self._recorded_at[key] = now
        if len(self._recorded_at) > _MAX_RECORDED:
            del self._recorded_at[next(iter(self._recorded_at))]
        return True


@asynccontextmanager
async def serve_previews(
    site: PreviewSite, parts: ConnectedParts, deployment: str, host: str, port: int
) -> AsyncIterator[None]:
    """Serve previews on a port of this process. Raises ConfigError."""

    recorded = RecordedPorts()

    async def open_port(target: StreamTarget, number: int) -> Stream:
        is_recorded = recorded.is_due(target, number)
        return await parts.streams.open(target, {"what": "port", "port": number}, is_recorded=is_recorded)

    store = PreviewStore(parts.pool.redis, deployment, parts.pool.keys)
    front = PreviewFront(site, parts.pool.keys, store.find, open_port)
    try:
        server = await front.listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"previews cannot be served on {host}:{port} ({error.strerror}): set --previews-port to a free port"
        ) from error
    log.info("previews_serving", port=port, url=site.url)
    try:
        yield
    finally:
        server.close()
        front.close()
