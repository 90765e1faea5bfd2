"""The homes of sessions: found for every call, chosen for new ones, and given anew when a host is lost or drains."""

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
from contract.places import PlaceState, SessionPlace, open_start, seal_start
from contract.signing import SigningKeys
from contract.tenancy import TenantPolicy
from orchestrator.dispatch.placement import HostRoom, NoHost, Wanted, choose_host, find_room
from orchestrator.dispatch.transport import CallLost, NotSent
from store.sessions import Home, PlaceBook
from telemetry.logs import get_logger

log = get_logger(__name__)

MAX_HOSTS = 3
"""How many hosts are tried for one opening."""
SETTLE_S = 30.0
"""How long a call waits for its session's host to come back, or to be given up, and for another process that moves the session."""
POLL_S = 0.2
MAX_KNOWN = 100_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class HostSource(Protocol):
    """Which hosts live."""

    async def reports(self) -> list[HostReport]:
        """The last report of each living worker. Raises BrokerUnavailable."""
        ...


@dataclass(frozen=True)
class Opening:
    """A session.open on its way. `arguments` of the verb."""

    tenant: str
    session: str
    arguments: Mapping[str, Any]


_Claimed = TypeVar("_Claimed", bound=Home | None)
SendOpen = Callable[[Opening, Home], Awaitable[ToolResult]]
"""Sends the verb to a home once; gives its result whatever it is. Raises NotSent, CallLost, DeliveryFailed."""


class SessionHomes:
    """Where sessions live. What is known is kept, and asked again when a fence has moved on."""

    def __init__(self, places: PlaceBook, hosts: HostSource, send_open: SendOpen, keys: SigningKeys) -> None:
        self._places, self._keys = places, keys
        self._hosts = hosts
        self._send_open = send_open
        self._known: dict[tuple[str, str], Home] = {}
        self._placed: Counter[str] = Counter()
        self._reported_at: dict[str, float] = {}

    async def start(self, tenant: str, session: str) -> dict[str, Any]:
        """Return the arguments with which an open session was opened. Raises ToolFailure(SESSION_NOT_FOUND), OperatorError."""
        return open_start(self._keys, tenant, session, await self.place(tenant, session))

    async def open(self, tenant: str, session: str, policy: TenantPolicy, arguments: Mapping[str, Any]) -> ToolResult:
        """Open a new session on a host with room for it. Raises ToolFailure(QUOTA_EXCEEDED), SandboxUnavailable."""
        excluded: set[str] = set()
        queue = await self._choose(policy, arguments, excluded)
        start = seal_start(self._keys, tenant, session, {name: value for name, value in arguments.items() if name != "restore"})
        ttl_s = float(arguments.get("ttl_s", 1800.0))
        home = await self._counted(queue, self._places.open(tenant, session, queue, start=start, ttl_s=ttl_s, limit=policy.sandboxes))
        try:
            result, _ = await self._opened(Opening(tenant, session, arguments), home, policy, excluded)
        except BaseException:
            await asyncio.shield(self._forget_quietly(tenant, session))
            raise
        if not result.success:
            await self._forget_quietly(tenant, session)
        return result

    async def find(self, tenant: str, session: str, policy: TenantPolicy) -> Home:
        """The session's home; it gets a new one when it has none. Raises ToolFailure(SESSION_NOT_FOUND), SandboxUnavailable."""
        return self._known.get((tenant, session)) or await self._settled(tenant, session, policy, None)

    async def refresh(self, tenant: str, session: str, seen: Home, policy: TenantPolicy, *, is_lost: bool) -> Home:
        """The home after a call could not be sent to `seen`. `is_lost`: its host is silent; when it has been given up the session is opened
        elsewhere."""
        self._known.pop((tenant, session), None)
        return await self._settled(tenant, session, policy, seen if is_lost else None)

    async def _settled(self, tenant: str, session: str, policy: TenantPolicy, silent: Home | None) -> Home:
        """The home, once the session has one and its host is not `silent` any more."""
        until = time.monotonic() + SETTLE_S
        while True:
            place = await self._places.find(tenant, session)
            if place is None:
                raise no_such_session()
            is_late = time.monotonic() > until
            try:
                home = await self._tried(tenant, session, place, policy, silent)
            except NoHost:
                # A host that was restarted takes its sessions back; else it stays so.
                if is_late:
                    raise
                home = None
            if home is not None:
                return home
            if is_late:
                raise SandboxUnavailable(f"the session is still being moved after {SETTLE_S:g} s; try again, and see `toolcrew hosts`")
            await asyncio.sleep(POLL_S)

    async def _tried(self, tenant: str, session: str, place: SessionPlace, policy: TenantPolicy, silent: Home | None) -> Home | None:
        """The home as far as it is to be had now."""
        if place.state is PlaceState.MOVING:
            return await self._moved(tenant, session, place, policy)
        is_silent = silent is not None and place.fence == silent.fence
        fate = await self._places.fate(place.queue) if is_silent else "alive"
        if fate == "given_up":
            return await self._moved(tenant, session, place, policy)
        return self._noted(tenant, session, Home(place.queue, place.fence)) if fate == "alive" else None

    async def find_for_closing(self, tenant: str, session: str) -> Home | None:
        """Where a session is by now, without opening it anywhere; None when no host has it. One that is silent, or about to move it, is waited for."""
        until = time.monotonic() + SETTLE_S
        while (place := await self._places.find(tenant, session)) is not None and time.monotonic() < until:
            if place.state is PlaceState.OPEN:
                fate = await self._places.fate(place.queue)
                if fate != "silent":
                    return Home(place.queue, place.fence) if fate == "alive" else None
            elif not place.moving_until:
                return None
            await asyncio.sleep(POLL_S)
        return None

    async def place(self, tenant: str, session: str) -> SessionPlace:
        """Where an open session lives by now, whoever opened it. Raises ToolFailure(SESSION_NOT_FOUND), BrokerUnavailable."""
        place = await self._places.find(tenant, session) if _NAME.fullmatch(session) else None
        if place is None:
            raise no_such_session()
        return place

    async def facts(self, tenant: str, session: str) -> dict[str, Any] | None:
        """What its host told when it opened the session; None when that is not known (any more). Raises BrokerUnavailable."""
        told = json.loads(await self._places.facts(tenant, session) or "null")
        return told if isinstance(told, dict) else None

    def known(self, tenant: str, session: str) -> Home | None:
        """As of the last call."""
        return self._known.get((tenant, session))

    async def last(self, tenant: str, session: str) -> Home | None:
        """Where a session was last, whether that host lives or not; None for one that is nowhere. Raises BrokerUnavailable."""
        place = None if (tenant, session) in self._known else await self._places.find(tenant, session)
        return self.known(tenant, session) or (Home(place.queue, place.fence) if place is not None else None)

    async def forget(self, tenant: str, session: str) -> None:
        """The session is closed. Raises BrokerUnavailable."""
        self._known.pop((tenant, session), None)
        await self._places.close(tenant, session)

    async def any_queue(self, policy: TenantPolicy) -> str:
        """Of some host, for what any may do. Raises SandboxUnavailable."""
        return choose_host(await self._hosts.reports(), Wanted(policy.sandbox.tenant_class)).queue

    async def room(self, policy: TenantPolicy, image: str | None) -> HostRoom | None:
        """What hosts have for more sessions; None when none could take one. Raises BrokerUnavailable."""
        return find_room(await self._reports(), Wanted(policy.sandbox.tenant_class, image), self._placed)

    async def _forget_quietly(self, tenant: str, session: str) -> None:
        # Expires by itself when Redis is away.
        with contextlib.suppress(BrokerUnavailable):
            await self.forget(tenant, session)

    def _noted(self, tenant: str, session: str, home: Home) -> Home:
        while len(self._known) >= MAX_KNOWN:
            self._known.pop(next(iter(self._known)))
        self._known[tenant, session] = home
        return home

    async def _choose(self, policy: TenantPolicy, arguments: Mapping[str, Any], excluded: set[str]) -> str:
        reports = await self._reports()
        wanted = Wanted(policy.sandbox.tenant_class, arguments.get("image"))
        queue = choose_host(reports, wanted, placed=self._placed, excluded=excluded).queue
        self._placed[queue] += 1
        return queue

    async def _reports(self) -> list[HostReport]:
        """Of all hosts; what was placed since is counted."""
        reports = await self._hosts.reports()
        for report in reports:
            # It tells itself of what was placed before it.
            if report.reported_at > self._reported_at.get(report.queue, 0.0):
                del self._placed[report.queue]
        self._reported_at = {report.queue: report.reported_at for report in reports}
        for queue in self._placed.keys() - self._reported_at.keys():
            # An incarnation that does not report any more never comes back under this name.
            del self._placed[queue]
        return reports

    async def _counted(self, queue: str, claim: Awaitable[_Claimed]) -> _Claimed:
        """What the claim of a place on that host gives. One that was refused is no session there: whoever asks again and again would fill the host."""
        claimed = None
        try:
            claimed = await claim
            return claimed
        finally:
            if claimed is None and self._placed[queue]:
                self._placed[queue] -= 1

    async def _opened(self, opening: Opening, home: Home, policy: TenantPolicy, excluded: set[str]) -> tuple[ToolResult, Home]:
        """Send the verb; to other hosts when one is lost before it answers, or has no room. Returns the result and the host that gave it.

        When it did not work, the next caller may try again.
        """
        tenant, session = opening.tenant, opening.session
        try:
            while True:
                try:
                    result = await self._send_open(opening, home)
                except (NotSent, CallLost) as lost:
                    home = await self._elsewhere(opening, home, policy, excluded, str(lost))
                    continue
                if result.error_code is ErrorCode.SANDBOX_UNAVAILABLE:
                    # Fuller than its report said, or its engine is in trouble: others may have room.
                    try:
                        home = await self._elsewhere(opening, home, policy, excluded, str(result.error))
                    except SandboxUnavailable:
                        await self._release(tenant, session, home.fence)
                        return result, home
                    continue
                if result.success:
                    await self._places.settle(tenant, session, home.fence, PlaceState.OPEN, json.dumps(result.metadata))
                    self._noted(tenant, session, home)
                else:
                    await self._release(tenant, session, home.fence)
                return result, home
        except BaseException:
            await asyncio.shield(self._release(tenant, session, home.fence))
            raise

    async def _elsewhere(self, opening: Opening, home: Home, policy: TenantPolicy, excluded: set[str], reason: str) -> Home:
        """Claim another host for an opening whose host was lost, or refused it."""
        excluded.add(home.queue)
        if (adopted := await self._adopted(opening, home)) is not None:
            return adopted
        log.warning("session_opens_elsewhere", session=opening.session, queue=home.queue, reason=reason)
        if len(excluded) > MAX_HOSTS:
            raise SandboxUnavailable(
                f"{MAX_HOSTS} hosts in a row were lost, or refused the session, while it was opened; see `toolcrew hosts`"
            )
        queue = await self._choose(policy, opening.arguments, excluded)
        await self._release(opening.tenant, opening.session, home.fence)
        claimed = await self._counted(queue, self._places.begin_move(opening.tenant, opening.session, home.fence, PlaceState.MOVING, queue))
        if claimed is None:
            raise SandboxUnavailable("the session was closed, or opened by somebody else, while it was opened here")
        return claimed

    async def _adopted(self, opening: Opening, home: Home) -> Home | None:
        """The home of an opening that the host's next worker has taken over: asked again it gives what there is. Left, nobody would know of it."""
        place = await self._places.find(opening.tenant, opening.session) if "moved" not in opening.arguments else None
        is_adopted = place is not None and place.state is PlaceState.OPEN and place.fence > home.fence
        return Home(place.queue, place.fence) if place is not None and is_adopted else None

    async def _moved(self, tenant: str, session: str, place: SessionPlace, policy: TenantPolicy) -> Home | None:
        """Open the session on another host; None when its place changed meanwhile, or another process is at it: look again."""
        start = open_start(self._keys, tenant, session, place)
        excluded = {place.queue} if place.state is PlaceState.OPEN else set[str]()
        queue = await self._choose(policy, start, excluded)
        home = await self._counted(queue, self._places.begin_move(tenant, session, place.fence, place.state, queue))
        if home is None:
            return None
        # Its host may have noted a newer checkpoint until it lost the place.
        latest = await self._places.find(tenant, session) or place
        result = ToolResult.failed(ToolCall(id="none", name="session.open"), ErrorCode.INTERNAL, "not tried")
        for checkpoint in _checkpoints(latest):
            arguments = {**start, "moved": _told(place, latest, checkpoint, home)} | ({"restore": checkpoint} if checkpoint else {})
            log.warning("session_moves", session=session, lost=place.queue, queue=home.queue, checkpoint=checkpoint or None)
            # The host that answered: another one when the first was lost or refused it, and the place is held there now.
            result, home = await self._opened(Opening(tenant, session, arguments), home, policy, excluded)
            if result.success:
                return home
            if result.error_code is not ErrorCode.FILE_NOT_FOUND:
                break
        raise SandboxUnavailable(f"the session's host is lost, and it could not be opened on another: {result.error}")

    async def _release(self, tenant: str, session: str, fence: int) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._places.settle(tenant, session, fence, PlaceState.MOVING)


def _checkpoints(place: SessionPlace) -> list[str]:
    """What to restore from, best first: the owner may have deleted the last one. In the end nothing, which the session's next call is told."""
    kept = dict.fromkeys((place.checkpoint, place.automatic))
    return [*filter(None, kept), ""]


def _told(before: SessionPlace, latest: SessionPlace, checkpoint: str, home: Home) -> dict[str, Any]:
    """What the session's next sandbox is to tell of its move."""
    # Of an automatic one that is older than the last nobody knows when it was taken.
    is_last = bool(checkpoint) and checkpoint == latest.checkpoint
    at = datetime.fromtimestamp(latest.checkpoint_at, UTC).isoformat(timespec="seconds") if is_last else None
    return {"generation": home.fence, "checkpoint_at": at, "is_planned": not before.queue}


def no_such_session() -> ToolFailure:
    """The same for one that is closed, has expired, never was, or is another tenant's."""
    return ToolFailure(
        ErrorCode.SESSION_NOT_FOUND,
        "there is no such session: this tenant has no open session of that name. It may have been closed or have expired; open a new one",
    )


def new_session_name() -> str:
    """Random, so that it tells nothing to who does not have it; and never taken for an option of a command."""
    return secrets.token_hex(2) + secrets.token_urlsafe(15)
