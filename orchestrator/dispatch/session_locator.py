"""Finds the host of a session for every call, chooses one for a new session, and another one when a host is lost or
drains.
"""

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from contract.calls import ToolCall, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable, ToolFailure
from contract.hosts import HostReport
from contract.session_locations import LocationState, SessionLocation, open_checkpoint, open_start, seal_start
from contract.signing import SigningKeys
from contract.tenancy import TenantPolicy
from orchestrator.dispatch.placement import HostRoom, NoHost, Wanted, choose_host, find_room
from orchestrator.dispatch.transport import CallLost
from store.publisher import NotSent
from store.sessions import SessionAddress, SessionStore
from telemetry.logs import get_logger

log = get_logger(__name__)

MAX_HOSTS = 3
"""How many hosts are tried for one opening."""
SETTLE_S = 30.0
"""How long a call waits for its session's host to come back, or to be given up, and for another process that moves the
session.
"""
POLL_S = 0.2
MAX_KNOWN = 100_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class HostSource(Protocol):
    """The hosts that report."""

    async def reports(self) -> list[HostReport]:
        """Return the last report of each living worker. Raises BrokerUnavailable."""
        ...


@dataclass(frozen=True)
class Opening:
    """A session that is being opened. `arguments` of the verb."""

    tenant: str
    session: str
    arguments: Mapping[str, Any]


_Claimed = TypeVar("_Claimed", bound=SessionAddress | None)
SendOpen = Callable[[Opening, SessionAddress], Awaitable[ToolResult]]
"""Sends the verb to an address once; returns its result, also a failed one. Raises NotSent, CallLost,
DeliveryFailed.
"""


class SessionLocator:
    """The addresses of sessions. They are cached, and read again when a fence has changed."""

    def __init__(self, sessions: SessionStore, hosts: HostSource, send_open: SendOpen, keys: SigningKeys) -> None:
        self._sessions, self._keys = sessions, keys
        self._hosts = hosts
        self._send_open = send_open
        self._known: dict[tuple[str, str], SessionAddress] = {}
        self._placed: Counter[str] = Counter()
        self._reported_at: dict[str, float] = {}

    async def start(self, tenant: str, session: str) -> dict[str, Any]:
        """Return the arguments with which an open session was opened. Raises ToolFailure(SESSION_NOT_FOUND),
        OperatorError.
        """
        return open_start(self._keys, tenant, session, await self.location(tenant, session))

    async def open(self, tenant: str, session: str, policy: TenantPolicy, arguments: Mapping[str, Any]) -> ToolResult:
        """Open a new session on a host with room for it. Raises ToolFailure(QUOTA_EXCEEDED), SandboxUnavailable."""
        excluded: set[str] = set()
        queue = await self._choose(policy, arguments, excluded)
        start = seal_start(
            self._keys,
            tenant,
            session,
            {name: value for name, value in arguments.items() if name not in ("restore", "workspace")},
        )
        ttl_s = float(arguments.get("ttl_s", 1800.0))
        address = await self._counted(
            queue, self._sessions.open(tenant, session, queue, start=start, ttl_s=ttl_s, limit=policy.sandboxes)
        )
        try:
            result, _ = await self._opened(Opening(tenant, session, arguments), address, policy, excluded)
        except BaseException:
            await asyncio.shield(self._forget_quietly(tenant, session))
            raise
        if not result.success:
            await self._forget_quietly(tenant, session)
        return result

    async def find(self, tenant: str, session: str, policy: TenantPolicy) -> SessionAddress:
        """Return the session's address; open the session elsewhere if it has none. Raises
        ToolFailure(SESSION_NOT_FOUND), SandboxUnavailable.
        """
        return self._known.get((tenant, session)) or await self._settled(tenant, session, policy, None)

    async def refresh(
        self, tenant: str, session: str, seen: SessionAddress, policy: TenantPolicy, *, is_lost: bool
    ) -> SessionAddress:
        """Return the address after a call could not be sent to `seen`. `is_lost`: its host does not report; once it is
        given up, the session is opened on another host.
        """
        self._known.pop((tenant, session), None)
        return await self._settled(tenant, session, policy, seen if is_lost else None)

    async def _settled(
        self, tenant: str, session: str, policy: TenantPolicy, silent: SessionAddress | None
    ) -> SessionAddress:
        """Return the address as soon as the session has one and its host is not `silent`."""
        until = time.monotonic() + SETTLE_S
        while True:
            location = await self._sessions.find(tenant, session)
            if location is None:
                raise no_such_session()
            is_late = time.monotonic() > until
            try:
                address = await self._tried(tenant, session, location, policy, silent)
            except NoHost:
                # A host that was restarted takes its sessions back. Otherwise no host gets room by itself.
                if is_late:
                    raise
                address = None
            if address is not None:
                return address
            if is_late:
                raise SandboxUnavailable(
                    f"the session is still being moved after {SETTLE_S:g} s; try again, and see `toolcrew hosts list`"
                )
            await asyncio.sleep(POLL_S)

    async def _tried(
        self, tenant: str, session: str, location: SessionLocation, policy: TenantPolicy, silent: SessionAddress | None
    ) -> SessionAddress | None:
        """Return the address if the session has one now."""
        if location.state is LocationState.MOVING:
            return await self._moved(tenant, session, location, policy)
        is_silent = silent is not None and location.fence == silent.fence
        fate = await self._sessions.fate(location.queue) if is_silent else "alive"
        if fate == "given_up":
            return await self._moved(tenant, session, location, policy)
        return self._noted(tenant, session, SessionAddress(location.queue, location.fence)) if fate == "alive" else None

    async def find_for_closing(self, tenant: str, session: str) -> SessionAddress | None:
        """Return where a session is, without opening it anywhere; None when no host has it. Waits while its host does
        not report, or another process moves the session.
        """
        until = time.monotonic() + SETTLE_S
        while (location := await self._sessions.find(tenant, session)) is not None and time.monotonic() < until:
            if location.state is LocationState.OPEN:
                fate = await self._sessions.fate(location.queue)
                if fate != "silent":
                    return SessionAddress(location.queue, location.fence) if fate == "alive" else None
            elif not location.moving_until:
                return None
            await asyncio.sleep(POLL_S)
        return None

    async def location(self, tenant: str, session: str) -> SessionLocation:
        """Return where an open session lives, whichever process opened it. Raises ToolFailure(SESSION_NOT_FOUND),
        BrokerUnavailable.
        """
        location = await self._sessions.find(tenant, session) if _NAME.fullmatch(session) else None
        if location is None:
            raise no_such_session()
        return location

    async def facts(self, tenant: str, session: str) -> dict[str, Any] | None:
        """Return what its host reported when it opened the session; None when that is not known. Raises
        BrokerUnavailable.
        """
        facts = json.loads(await self._sessions.facts(tenant, session) or "null")
        return facts if isinstance(facts, dict) else None

    def known(self, tenant: str, session: str) -> SessionAddress | None:
        """Return the address that the last call of the session used."""
        return self._known.get((tenant, session))

    async def last(self, tenant: str, session: str) -> SessionAddress | None:
        """Return the last address of a session, whether its host lives or not; None if there is no such session. Raises
        BrokerUnavailable.
        """
        location = None if (tenant, session) in self._known else await self._sessions.find(tenant, session)
        return self.known(tenant, session) or (
            SessionAddress(location.queue, location.fence) if location is not None else None
        )

    async def forget(self, tenant: str, session: str) -> None:
        """Forget a session that is closed. Raises BrokerUnavailable."""
        self._known.pop((tenant, session), None)
        await self._sessions.close(tenant, session)

    async def any_queue(self, policy: TenantPolicy) -> str:
        """Return the queue of some host, for what any host may do. Raises SandboxUnavailable."""
        return choose_host(await self._hosts.reports(), Wanted(policy.sandbox.tenant_class)).queue

    async def room(self, policy: TenantPolicy, image: str | None) -> HostRoom | None:
        """Return what hosts have for more sessions; None when no host could take one. Raises BrokerUnavailable."""
        return find_room(await self._reports(), Wanted(policy.sandbox.tenant_class, image), self._placed)

    async def _forget_quietly(self, tenant: str, session: str) -> None:
        # If Redis does not answer, the record expires.
        with contextlib.suppress(BrokerUnavailable):
            await self.forget(tenant, session)

    def _noted(self, tenant: str, session: str, address: SessionAddress) -> SessionAddress:
        while len(self._known) >= MAX_KNOWN:
            self._known.pop(next(iter(self._known)))
        self._known[tenant, session] = address
        return address

    async def _choose(self, policy: TenantPolicy, arguments: Mapping[str, Any], excluded: set[str]) -> str:
        reports = await self._reports()
        wanted = Wanted(policy.sandbox.tenant_class, arguments.get("image"))
        queue = choose_host(reports, wanted, placed=self._placed, excluded=excluded).queue
        self._placed[queue] += 1
        return queue

    async def _reports(self) -> list[HostReport]:
        """Return the reports of all hosts. Sessions that were placed since a report are counted in `_placed`."""
        reports = await self._hosts.reports()
        for report in reports:
            # The report counts what was placed before it.
            if report.reported_at > self._reported_at.get(report.queue, 0.0):
                del self._placed[report.queue]
        self._reported_at = {report.queue: report.reported_at for report in reports}
        for queue in self._placed.keys() - self._reported_at.keys():
            # An incarnation that does not report any more never comes back under this name.
            del self._placed[queue]
        return reports

    async def _counted(self, queue: str, claim: Awaitable[_Claimed]) -> _Claimed:
        """Return what the claim of a location on that host returns. A refused claim is not counted as a session:
        repeated ones would fill the host.
        """
        claimed = None
        try:
            claimed = await claim
            return claimed
        finally:
            if claimed is None and self._placed[queue]:
                self._placed[queue] -= 1

    async def _opened(
        self, opening: Opening, address: SessionAddress, policy: TenantPolicy, excluded: set[str]
    ) -> tuple[ToolResult, SessionAddress]:
        """Send the verb, and to other hosts when a host is lost before it answers, or has no room. Return the result
        and the address of the host that gave it.

        A failed opening releases the location, so that the next caller may try again.
        """
        tenant, session = opening.tenant, opening.session
        try:
            while True:
                try:
                    result = await self._send_open(opening, address)
                except (NotSent, CallLost) as lost:
                    address = await self._elsewhere(opening, address, policy, excluded, str(lost))
                    continue
                if result.error_code is ErrorCode.SANDBOX_UNAVAILABLE:
                    # The host is fuller than its report said, or its engine fails: other hosts may have room.
                    try:
                        address = await self._elsewhere(opening, address, policy, excluded, str(result.error))
                    except SandboxUnavailable:
                        await self._release(tenant, session, address.fence)
                        return result, address
                    continue
                if result.success:
                    await self._sessions.settle(
                        tenant, session, address.fence, LocationState.OPEN, json.dumps(result.metadata)
                    )
                    self._noted(tenant, session, address)
                else:
                    await self._release(tenant, session, address.fence)
                return result, address
        except BaseException:
            await asyncio.shield(self._release(tenant, session, address.fence))
            raise

    async def _elsewhere(
        self, opening: Opening, address: SessionAddress, policy: TenantPolicy, excluded: set[str], reason: str
    ) -> SessionAddress:
        """Claim another host for an opening whose host was lost, or refused it."""
        excluded.add(address.queue)
        if (adopted := await self._adopted(opening, address)) is not None:
            return adopted
        log.warning("session_opens_elsewhere", session=opening.session, queue=address.queue, reason=reason)
        if len(excluded) > MAX_HOSTS:
            raise SandboxUnavailable(
                f"{MAX_HOSTS} hosts in a row were lost, or refused the session, while it was opened; see `toolcrew "
                "hosts list`"
            )
        queue = await self._choose(policy, opening.arguments, excluded)
        await self._release(opening.tenant, opening.session, address.fence)
        claimed = await self._counted(
            queue,
            self._sessions.begin_move(opening.tenant, opening.session, address.fence, LocationState.MOVING, queue),
        )
        if claimed is None:
            raise SandboxUnavailable("the session was closed, or opened by another process, while it was opened here")
        return claimed

    async def _adopted(self, opening: Opening, address: SessionAddress) -> SessionAddress | None:
        """Return the address of an opening that the host's next worker has taken over: the same verb then returns the
        session that exists. Without that no process would know of the session.
        """
        location = (
            await self._sessions.find(opening.tenant, opening.session) if "moved" not in opening.arguments else None
        )
        is_adopted = location is not None and location.state is LocationState.OPEN and location.fence > address.fence
        return SessionAddress(location.queue, location.fence) if location is not None and is_adopted else None

    async def _moved(
        self, tenant: str, session: str, location: SessionLocation, policy: TenantPolicy
    ) -> SessionAddress | None:
        """Open the session on another host. None: its location changed meanwhile, or another process moves it; read the
        location again.
        """
        start = open_start(self._keys, tenant, session, location)
        excluded = {location.queue} if location.state is LocationState.OPEN else set[str]()
        queue = await self._choose(policy, start, excluded)
        address = await self._counted(
            queue, self._sessions.begin_move(tenant, session, location.fence, location.state, queue)
        )
        if address is None:
            return None
        # Its host may have stored a newer checkpoint before it lost the location.
        latest = await self._sessions.find(tenant, session) or location
        result = ToolResult.failed(ToolCall(id="none", name="session.open"), ErrorCode.INTERNAL, "not tried")
        # The owner may have deleted the last checkpoint. If there is none, nothing is restored, and the session's next
        # call reports that.
        checkpoints = [
            open_checkpoint(self._keys, tenant, session, sealed) for sealed in (latest.checkpoint, latest.automatic)
        ]
        for checkpoint in [*dict.fromkeys(filter(None, checkpoints)), ""]:
            # The time of an automatic checkpoint that is older than the last is not known.
            at = latest.checkpoint_at if checkpoint and checkpoint == checkpoints[0] else None
            arguments = {**start, "moved": _describe_move(location, at, address)} | (
                {"restore": checkpoint} if checkpoint else {}
            )
            log.warning(
                "session_moves",
                session=session,
                lost=location.queue,
                queue=address.queue,
                checkpoint=checkpoint or None,
            )
            # The host that answered: another one when the first was lost or refused it, and the location is held there
            # now.
            result, address = await self._opened(Opening(tenant, session, arguments), address, policy, excluded)
            if result.success:
                return address
            if result.error_code is not ErrorCode.FILE_NOT_FOUND:
                break
        raise SandboxUnavailable(f"the session's host is lost, and it could not be opened on another: {result.error}")

    async def _release(self, tenant: str, session: str, fence: int) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._sessions.settle(tenant, session, fence, LocationState.MOVING)


def _describe_move(before: SessionLocation, checkpoint_at: float | None, address: SessionAddress) -> dict[str, Any]:
    """Return what the session's next sandbox reports about the move."""
    at = None if checkpoint_at is None else datetime.fromtimestamp(checkpoint_at, UTC).isoformat(timespec="seconds")
    return {"generation": address.fence, "checkpoint_at": at, "is_planned": not before.queue}


def no_such_session() -> ToolFailure:
    """Return the same failure for a session that is closed, has expired, never was, or is another tenant's."""
    return ToolFailure(
        ErrorCode.SESSION_NOT_FOUND,
        "there is no such session: this tenant has no open session of that name. It may have been closed or have "
        "expired; open a new one",
    )


def new_session_name() -> str:
    """Return a random name, which cannot be guessed and is never taken for an option of a command."""
    return secrets.token_hex(2) + secrets.token_urlsafe(15)
